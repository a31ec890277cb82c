"""What a step costs by its number of rows: measured at start-up, refined while running, kept between starts.

A *cost curve* is a list of sizes with milliseconds. An engine with captured graphs runs a step padded to a captured
size, so the cost of a step is a staircase: that of the smallest size that holds it. One without graphs pads nothing;
its sizes are samples, and between them the cost is interpolated linearly.
Nothing says that it rises; a larger size can be faster (another kernel), and the schedule makes use of that.

The file of a curve is JSON, ours or a user's own::

    {"format": "deepinfer-plugins cost curve", "version": 1, "sizes": [1, 8, 64], "milliseconds": [4.1, 4.2, 5.9]}

``"padded": false`` says that steps are not padded. Other keys say where it came from; they are kept and not read.

Source: section 4.2.1 of the model's fact sheet.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import os
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_plugins.core.settings import Settings

# What a step's time is told apart by, in the metrics of both engines: choosing how many drafts to verify (on the host),
# drafting, the model's forward on tokens and drafts, and sampling with verification.
PHASES = ("schedule", "draft", "forward", "sample")
FORMAT = "deepinfer-plugins cost curve"
VERSION = 1
TIMED = 5
# A size counts for the slope from its 10th sample on, of the 5000 samples taken last.
LEAST_FORWARDS = 10
WINDOW = 5000
# The sampler's time at a number of requests: its last 9 samples there, from the 5th on.
LEAST_SAMPLERS = 5
LAST_SAMPLERS = 9
# Other processes may be about to read what has just expired; only what expired two hours ago is removed.
KEPT_AFTER_EXPIRY_S = 2 * 3600


@dataclass(frozen=True)
class CostCurve:
    """Milliseconds of a step by its size.

    Args:
        sizes: Rows, strictly ascending, from 1 on.
        milliseconds: As many, positive.
        padded: Whether steps are padded to these sizes.
        facts: Where it came from; for people.

    Raises:
        ValueError: If it isn't that; the message names the first entry which is wrong.
    """

    sizes: tuple[int, ...]
    milliseconds: tuple[float, ...]
    padded: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("a cost curve needs at least one size")
        if len(self.sizes) != len(self.milliseconds):
            raise ValueError(
                f"a cost curve needs one time for each size; found {len(self.sizes)} sizes "
                f"and {len(self.milliseconds)} milliseconds"
            )
        before = 0
        for index, (size, ms) in enumerate(zip(self.sizes, self.milliseconds)):
            if type(size) is not int or size <= before:
                expected = f"a whole number above {before}"
                raise ValueError(f"sizes of a cost curve: entry {index} is {size!r}; expected {expected}")
            if not isinstance(ms, int | float) or isinstance(ms, bool) or not 0.0 < ms < math.inf:
                raise ValueError(
                    f"milliseconds of a cost curve: entry {index} is {ms!r}; expected a positive number"
                )
            before = size
        if not isinstance(self.padded, bool):
            raise ValueError(f"padded of a cost curve is {self.padded!r}; expected true or false")

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    @classmethod
    def load(cls, path: str | Path) -> CostCurve:
        """Read a file, one of ours or a user's.

        Raises:
            ValueError: If it does not hold a cost curve; the message names the file.
            OSError: If it can't be read.
        """
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(record, dict):
                raise ValueError(f"expected an object, found {str(record)[:40]!r}")
            found = (record.pop("format", None), record.pop("version", None))
            if found != (FORMAT, VERSION):
                raise ValueError(
                    f"expected the format {FORMAT!r}, version {VERSION}; found {found[0]!r}, version {found[1]!r}"
                )
            sizes, ms = record.pop("sizes", None), record.pop("milliseconds", None)
            if not isinstance(sizes, list) or not isinstance(ms, list):
                raise ValueError("expected the lists sizes and milliseconds")
            padded = record.pop("padded", True)
            return cls(tuple(sizes), tuple(ms), padded, record)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the file; whoever reads it at the same time sees the old content or all of the new one."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            **self.facts,
            "format": FORMAT,
            "version": VERSION,
            "sizes": self.sizes,
            "milliseconds": self.milliseconds,
            "padded": self.padded,
        }
        # The name ends in a way that no reader of the folder looks for.
        handle, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=1)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def measure(
    run: Callable[[int], float],
    sizes: Sequence[int],
    average: Callable[[list[float]], list[float]] | None = None,
    padded: bool = True,
    **facts: Any,
) -> CostCurve:
    """Time a step of each size.

    Every size runs six times. The first is to warm up; of the other five the fastest and the slowest are dropped and
    the rest averaged.

    Args:
        run: Runs one step of that many rows to its end on the device and returns its milliseconds, without
            those of the sampler.
        sizes: Any order.
        average: Of each time over the ranks that step together, which must have the same curve; None for one rank.
        padded: Whether the engine pads steps to these sizes.
        facts: Kept with the curve.
    """
    ordered = sorted(set(sizes))
    times = []
    for size in ordered:
        run(size)
        samples = sorted(run(size) for _ in range(TIMED))[1:-1]
        times.append(sum(samples) / len(samples))
    if average is not None:
        times = average(times)
    return CostCurve(tuple(ordered), tuple(times), padded, facts)


class CurveCache:
    """Curves on disk, so that a restart need not measure.

    Args:
        folder: Made when needed; may be shared by machines and models.
        ttl_s: A curve older than this, in seconds, counts as absent: machines change.
        now: The clock, in seconds since the epoch.
    """

    def __init__(
        self, folder: str | Path, ttl_s: float = 3600.0, now: Callable[[], float] = time.time
    ) -> None:
        self.folder = Path(folder)
        self.ttl_s = ttl_s
        self._now = now

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of a key: everything that a step's time depends on (chip, model, parallelism, sizes, versions)."""
        digest = hashlib.sha256(json.dumps([VERSION, key], sort_keys=True).encode()).hexdigest()
        return self.folder / f"cost-curve-{digest[:32]}.json"

    def load(self, key: Mapping[str, Any]) -> CostCurve | None:
        """The curve of this key, or None: there is none, it is too old, or it is of another key.

        Raises:
            ValueError: If there is a file and it holds no curve: something else wrote to the folder.
        """
        path = self.path(key)
        try:
            curve = CostCurve.load(path)
        except FileNotFoundError:
            return None
        measured_at = curve.facts.get("measured_at")
        if curve.facts.get("key") != json.loads(json.dumps(key)) or not isinstance(measured_at, int | float):
            return None
        return curve if 0 <= self._now() - measured_at <= self.ttl_s else None

    def save(self, key: Mapping[str, Any], curve: CostCurve) -> Path:
        """Keep a curve, and remove those that expired two hours ago or more."""
        path = self.path(key)
        facts = {**curve.facts, "key": dict(key), "measured_at": self._now()}
        replace(curve, facts=facts).save(path)
        for other in self.folder.glob("cost-curve-*.json"):
            if other != path and self._now() - other.stat().st_mtime > self.ttl_s + KEPT_AFTER_EXPIRY_S:
                other.unlink(missing_ok=True)
        return path


def providers(ops: Any) -> dict[str, str]:
    """Which function computes each operator, for the key of a curve: another one, another curve.

    Args:
        ops: A dataclass of functions, as of ``catalogue.load_ops``.
    """
    functions = {field.name: getattr(ops, field.name) for field in fields(ops)}
    return {name: f"{function.__module__}:{function.__qualname__}" for name, function in functions.items()}


def sizes_to_measure(samples: Iterable[int], captured: Iterable[int], most: int) -> list[int]:
    """Numbers of rows to time a step at, ascending.

    Every captured size up to the one that the largest step is padded to: what is between two of them costs what the
    larger one does. Samples where steps are not padded, and the largest step if it is not.

    Args:
        samples: Sizes of steps without graphs.
        captured: Sizes of graphs.
        most: Rows of the largest step.
    """
    graphs = sorted(captured)
    padded = graphs[: bisect.bisect_left(graphs, most) + 1]
    eager = {most, *samples} if not graphs or graphs[-1] < most else set()
    return sorted({*padded, *(size for size in eager if size <= most and size > max(padded, default=0))})


def find(
    settings: Settings,
    key: Mapping[str, Any],
    run: Callable[[int], float],
    sizes: Sequence[int],
    padded: bool,
) -> CostCurve:
    """The curve to start with: from the file that was named, from an earlier start, or measured.

    Args:
        settings: The environment, which names the file and the folder of earlier starts.
        key: Everything that a step's time depends on, see :meth:`CurveCache.path`.
        run: See :func:`measure`.
        sizes: To measure.
        padded: Whether the engine pads steps to these sizes.

    Raises:
        ValueError: If a file holds no curve; the message names it.
    """
    if settings.cost_curve is not None:
        return CostCurve.load(settings.cost_curve)
    if settings.curve_cache is None:
        return measure(run, sizes, padded=padded)
    cache = CurveCache(settings.curve_cache, settings.curve_cache_ttl_s)
    curve = cache.load(key)
    if curve is None:
        curve = measure(run, sizes, padded=padded)
        cache.save(key, curve)
    return curve


# A moment among a device's work: an event on a GPU, which the host runs ahead of; elsewhere seconds.
Mark: TypeAlias = "float | torch.cuda.Event"


class Clock:
    """Marks among the work of a device, and the time between them once the device has come there.

    Args:
        device: On a GPU, marks are set on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None

    def mark(self) -> Mark:
        """Now, as far as the device's work is concerned. Waits for nothing."""
        if self._gpu is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))
        return event

    def passed(self, mark: Mark) -> bool:
        """Whether the device has come to the mark, so that what was copied before it is there."""
        return isinstance(mark, float) or mark.query()

    def milliseconds(self, start: Mark, end: Mark) -> float:
        """Between two marks that are passed."""
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float) and isinstance(end, float)
            return 1e3 * (end - start)
        return float(start.elapsed_time(end))

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)


class _Medians:
    """Medians of the last samples, by group and of all; each sample costs a few microseconds."""

    def __init__(self, window: int) -> None:
        self._samples: deque[tuple[int, float]] = deque()
        self._window = window
        self.all: list[float] = []
        self.groups: defaultdict[int, list[float]] = defaultdict(list)

    def add(self, group: int, value: float) -> None:
        if len(self._samples) == self._window:
            old_group, old = self._samples.popleft()
            for values in (self.all, self.groups[old_group]):
                del values[bisect.bisect_left(values, old)]
        self._samples.append((group, value))
        bisect.insort(self.all, value)
        bisect.insort(self.groups[group], value)


def _median(ascending: Sequence[float]) -> float:
    """Median of what is in order already; the mean of the middle two of an even number."""
    half = len(ascending) // 2
    return ascending[half] if len(ascending) % 2 else (ascending[half - 1] + ascending[half]) / 2


class Refinement(NamedTuple):
    """What running steps have taught beyond the curve.

    Args:
        slope: Milliseconds per row of a step's size that the curve lacks; may be negative, and then does not count.
        sampler_ms: Of the sampler, by number of requests.
        any_sampler_ms: Of the sampler at any other number of requests.
    """

    slope: float = 0.0
    sampler_ms: Mapping[int, float] = {}
    any_sampler_ms: float = 0.0


class CostModel:
    """A curve, and what running steps say beyond it.

    The time of a step of b rows for n requests is that of the smallest size of the curve that holds b, plus
    ``max(0, slope)`` times that size, plus the sampler's time at n. If steps are not padded, the size is b itself.

    What is observed counts at once. Ranks that step together must choose alike though, so there either one rank
    plans for all, or all start by adopting the empty :class:`Refinement`, and now and then one sends
    its :meth:`refinement`, which all of them :meth:`adopt` in the same step.

    Args:
        curve: Measured at start-up or read from a file.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._adopted: Refinement | None = None
        self._forwards = _Medians(WINDOW)
        self._samplers = _Medians(WINDOW)
        self._last_samplers: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=LAST_SAMPLERS))
        # By rows: the entry that holds them, the size that the step then has, and its milliseconds.
        rows, sizes = np.arange(curve.largest + 1), np.array(curve.sizes)
        self._entry = np.searchsorted(sizes, rows)
        self._size = sizes[self._entry] if curve.padded else rows
        self._curve_ms = np.interp(self._size, sizes, np.array(curve.milliseconds, dtype=np.float64))
        self._slope_of_table: float | None = None
        self._table = self._curve_ms

    def observe_forward(self, size: int, milliseconds: float) -> None:
        """A step of this size, padding included, took so long, without its sampler.

        What the curve says nothing about is ignored: larger sizes, and if it is of padded steps, sizes between.
        """
        if 0 < size <= self.curve.largest and self._size[size] == size:
            self._forwards.add(int(self._entry[size]), (milliseconds - float(self._curve_ms[size])) / size)

    def observe_sampler(self, num_requests: int, milliseconds: float) -> None:
        """The sampler took so long for this many requests."""
        self._samplers.add(num_requests, milliseconds)
        self._last_samplers[num_requests].append(milliseconds)

    def refinement(self) -> Refinement:
        """What this model has observed. It can be pickled."""
        known = {
            n: self._sampler_ms(n) for n, last in self._last_samplers.items() if len(last) >= LEAST_SAMPLERS
        }
        return Refinement(self._slope(), known, self._any_sampler_ms())

    def adopt(self, refinement: Refinement) -> None:
        """Use this from now on instead of what is observed here."""
        self._adopted = refinement

    @property
    def slope(self) -> float:
        """Milliseconds per row that the curve lacks; it counts only if positive."""
        return self._slope() if self._adopted is None else self._adopted.slope

    def sampler_ms(self, num_requests: int) -> float:
        """Milliseconds of the sampler."""
        if self._adopted is None:
            return self._sampler_ms(num_requests)
        return self._adopted.sampler_ms.get(num_requests, self._adopted.any_sampler_ms)

    def _slope(self) -> float:
        """The median over sizes, from 10 samples on, of the median of ``(observed - curve) / size``; else 0.

        Sizes between two entries count with the larger one.
        """
        sizes = [_median(s) for s in self._forwards.groups.values() if len(s) >= LEAST_FORWARDS]
        return statistics.median(sizes) if sizes else 0.0

    def _sampler_ms(self, num_requests: int) -> float:
        """The median of the last 9 samples at this number of requests if there are 5, else that of all samples."""
        last = self._last_samplers.get(num_requests, ())
        return statistics.median(last) if len(last) >= LEAST_SAMPLERS else self._any_sampler_ms()

    def _any_sampler_ms(self) -> float:
        return _median(self._samplers.all) if self._samplers.all else 0.0

    def step_ms(self, rows: int, drafts: int, num_requests: int) -> NDArray[np.float64]:
        """Times of the steps that a choice is made from.

        Args:
            rows: Of the step without drafts.
            drafts: That could be verified.
            num_requests: For the sampler.

        Returns:
            fp64 ``[candidates]``: entry k is the time with k drafts. Sizes beyond the largest of the curve are no
            candidates. If already ``rows`` are beyond it (a prefill shares the step), all are, and the
            line through the curve's last two entries, or through 0 and its only one, is continued.
        """
        sampler = self.sampler_ms(num_requests)
        slope = max(0.0, self.slope)
        if slope != self._slope_of_table:
            self._slope_of_table = slope
            self._table = self._curve_ms + slope * self._size
        if rows <= self.curve.largest:
            return self._table[rows : rows + drafts + 1] + sampler
        sizes, ms = (0, *self.curve.sizes), (0.0, *self.curve.milliseconds)
        grade = slope + max(0.0, (ms[-1] - ms[-2]) / (sizes[-1] - sizes[-2]))
        return self._table[-1] + grade * (np.arange(rows, rows + drafts + 1) - sizes[-1]) + sampler
