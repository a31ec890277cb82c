"""How well the draft's confidences predict acceptance, and the temperatures that make them predict it best.

The confidence of draft i is the sigmoid of its logit over the temperature of position i: the probability that
the target accepts draft i, given that it accepts the drafts before it. Whether it did is known for every
verified draft up to the first rejected one; an *acceptance log* collects that. Drafts behind a rejected one and
drafts that the schedule trimmed say nothing and are left out. Which drafts were trimmed depended on their logits
alone (never on their outcome), so a log written under a schedule is as good as one without, only with
fewer samples at late positions.

An acceptance log is text, one JSON object per line. A line with the key ``format`` says what the file is and
may carry anything known about the run; the first line is one, and there may be more, so logs can be concatenated.
Every other line is one verification of one request::

    {"format": "deepinfer-plugins acceptance log", "version": 1, "model": "..."}
    {"confidence_logits": [2.1, 0.4, -1.0], "verified": 3, "accepted": 1}

Source: sections 2.11 and 4.2 of the model's fact sheet; temperature scaling and the calibration error are those of
Guo et al., "On Calibration of Modern Neural Networks" (2017).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

FORMAT = "deepinfer-plugins acceptance log"
VERSION = 1
BINS = 15
# As in the release: keeps the exponential finite, and a temperature above zero.
LOGIT_BOUND = 60.0
LEAST_TEMPERATURE = 1e-5
# Outside of these a fit says that the logits predict nothing, or everything; both ends are already extreme.
FITTED_RANGE = (0.05, 20.0)
# A temperature fitted from fewer verified drafts than this is noise: all positions share one instead.
LEAST_SAMPLES = 100


class Acceptance(NamedTuple):
    """What became of drafts: one row is one verification of one request.

    Args:
        confidence_logits: fp64 ``[n, depth]``; anything behind a request's last draft.
        verified: int64 ``[n]``: how many drafts, from the first on, the target judged. If the request ended inside of
            them (a stop, or its length), those up to its end.
        accepted: int64 ``[n]``: how many of those it accepted; the one behind them, if verified, it rejected.
    """

    confidence_logits: Floats
    verified: NDArray[np.int64]
    accepted: NDArray[np.int64]

    @classmethod
    def of(cls, confidence_logits: ArrayLike, verified: ArrayLike, accepted: ArrayLike) -> Self:
        """Check and convert.

        Raises:
            ValueError: If shapes differ, or not 0 <= accepted <= verified <= depth, or a verified draft's
                logit is not finite.
        """
        logits = np.asarray(confidence_logits, dtype=np.float64)
        judged, taken = np.asarray(verified, dtype=np.int64), np.asarray(accepted, dtype=np.int64)
        if logits.ndim != 2 or judged.shape != logits.shape[:1] or taken.shape != logits.shape[:1]:
            raise ValueError(
                "expected confidence logits [n, depth] and verified and accepted [n]; "
                f"found {logits.shape}, {judged.shape}, {taken.shape}"
            )
        depth = logits.shape[1]
        wrong = np.flatnonzero((taken < 0) | (taken > judged) | (judged > depth))
        if wrong.size:
            row = wrong[0]
            raise ValueError(
                f"row {row}: {taken[row]} accepted of {judged[row]} verified of {depth} drafts; "
                "expected 0 <= accepted <= verified <= drafts"
            )
        found = cls(logits, judged, taken)
        if not np.isfinite(logits[found.observed]).all():
            row, position = np.argwhere(found.observed & ~np.isfinite(logits))[0]
            raise ValueError(f"row {row}: the confidence logit of draft {position} is not a finite number")
        return found

    @property
    def depth(self) -> int:
        """Drafts per request at most."""
        return self.confidence_logits.shape[1]

    @property
    def observed(self) -> NDArray[np.bool_]:
        """bool ``[n, depth]``: drafts whose confidence can be compared with an outcome."""
        positions = np.arange(self.depth)
        return (positions < self.verified[:, None]) & (positions <= self.accepted[:, None])

    @property
    def outcome(self) -> NDArray[np.bool_]:
        """bool ``[n, depth]``: accepted; means something where observed."""
        return np.arange(self.depth) < self.accepted[:, None]

    def position(self, index: int) -> tuple[Floats, Floats]:
        """Logits and outcomes (0 or 1) of the observed drafts at one position, fp64 ``[samples]`` each."""
        seen = self.observed[:, index]
        return self.confidence_logits[seen, index], self.outcome[seen, index].astype(np.float64)


class AcceptanceLog:
    """Writes an acceptance log; to be closed, or used in a ``with``.

    Args:
        path: Appended to, so that runs add up.
        facts: About the run, for whoever reads the file: model, engine, sampling.
    """

    def __init__(self, path: str | Path, **facts: Any) -> None:
        self._file: TextIO = Path(path).open("a", encoding="utf-8")
        self._line({"format": FORMAT, "version": VERSION, **facts})

    def write(self, confidence_logits: ArrayLike, verified: ArrayLike, accepted: ArrayLike) -> None:
        """Add one step: arguments of :meth:`Acceptance.of`. Requests without a verified draft are left out."""
        step = Acceptance.of(confidence_logits, verified, accepted)
        for logits, judged, taken in zip(step.confidence_logits, step.verified, step.accepted):
            if judged:
                self._line(
                    {
                        "confidence_logits": [round(float(logit), 6) for logit in logits[:judged]],
                        "verified": int(judged),
                        "accepted": int(taken),
                    }
                )
        # An engine may be killed at any time; what a step said is then on disk.
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")


def read_logs(paths: Iterable[str | Path]) -> Acceptance:
    """All verifications of some acceptance logs.

    Raises:
        ValueError: If a line is not what an acceptance log holds; the message names file and line.
        OSError: If a file can't be read.
    """
    rows: list[list[float]] = []
    verified: list[int] = []
    accepted: list[int] = []
    for path in paths:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
                if not isinstance(record, dict):
                    raise ValueError(
                        f"{path}, line {number}: expected an object, found {line.strip()[:40]!r}"
                    )
                if number == 1 or "format" in record:
                    found = (record.get("format"), record.get("version"))
                    if found != (FORMAT, VERSION):
                        raise ValueError(
                            f"{path}, line {number}: expected the format {FORMAT!r}, version {VERSION}; "
                            f"found {found[0]!r}, version {found[1]!r}"
                        )
                    continue
                try:
                    logits, judged, taken = _verification(record)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
                rows.append(logits)
                verified.append(judged)
                accepted.append(taken)
    padded = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return Acceptance(padded, np.array(verified, np.int64), np.array(accepted, np.int64))


def _verification(record: dict[str, Any]) -> tuple[list[float], int, int]:
    """One line of a log, checked as :meth:`Acceptance.of` checks rows, without the cost of arrays for each."""
    logits, verified, accepted = (record.get(key) for key in ("confidence_logits", "verified", "accepted"))
    if not isinstance(logits, list) or not all(isinstance(logit, int | float) for logit in logits):
        raise ValueError(f"expected confidence_logits, a list of numbers; found {logits!r}")
    if not isinstance(verified, int) or not isinstance(accepted, int):
        raise ValueError(f"expected whole numbers verified and accepted; found {verified!r} and {accepted!r}")
    if not 0 <= accepted <= verified <= len(logits):
        raise ValueError(
            f"{accepted} accepted of {verified} verified of {len(logits)} drafts; "
            "expected 0 <= accepted <= verified <= drafts"
        )
    if not all(map(math.isfinite, logits)):
        raise ValueError(f"confidence_logits are not all finite: {logits}")
    return [float(logit) for logit in logits], verified, accepted


def per_position(temperatures: Sequence[float], depth: int) -> tuple[float, ...]:
    """Temperatures of each position from a setting with one for all, or one for each.

    Values below 1e-5 count as 1e-5, as in the release.

    Raises:
        ValueError: If there is neither one nor ``depth``.
    """
    if len(temperatures) not in (1, depth):
        raise ValueError(
            f"{len(temperatures)} confidence temperatures for {depth} drafts per request; "
            f"give one for all positions, or {depth}"
        )
    values = tuple(max(float(temperature), LEAST_TEMPERATURE) for temperature in temperatures)
    return values * depth if len(values) == 1 else values


def confidences(confidence_logits: ArrayLike, temperatures: ArrayLike = 1.0) -> Floats:
    """``sigmoid(clamp(logit / temperature, -60, 60))``, fp64; shapes broadcast."""
    scaled = np.asarray(confidence_logits, np.float64) / np.asarray(temperatures, np.float64)
    return 1.0 / (1.0 + np.exp(-np.clip(scaled, -LOGIT_BOUND, LOGIT_BOUND)))


def negative_log_likelihood(confidence_logits: ArrayLike, outcomes: ArrayLike, temperature: float) -> float:
    """Mean over samples, in nats, of what :func:`fit_temperature` minimises; NaN without samples."""
    scaled = np.asarray(confidence_logits, np.float64) / temperature
    if not scaled.size:
        return math.nan
    return float(np.mean(np.logaddexp(0.0, scaled) - np.asarray(outcomes, np.float64) * scaled))


def fit_temperature(confidence_logits: ArrayLike, outcomes: ArrayLike) -> float:
    """The temperature that makes the outcomes most likely.

    The negative log-likelihood is convex in the inverse temperature ``a``: its derivative, the sum of
    ``logit * (sigmoid(a * logit) - outcome)``, never falls. So its zero is bisected for, down to rounding.

    Args:
        confidence_logits: ``[samples]``, finite.
        outcomes: ``[samples]``, 1 where accepted, else 0; a probability of acceptance in between also works.

    Returns:
        Between 0.05 and 20: where the likelihood has no maximum inside (logits that tell outcomes apart without
        error, or not at all), the end at which it is greater. 1 without samples.
    """
    logits, labels = np.asarray(confidence_logits, np.float64), np.asarray(outcomes, np.float64)
    if not logits.size or not logits.any():
        return 1.0

    def slope(inverse: float) -> float:
        return float(np.sum(logits * (confidences(inverse * logits) - labels)))

    lowest, highest = FITTED_RANGE
    low, high = 1.0 / highest, 1.0 / lowest
    if slope(low) >= 0.0:
        return highest
    if slope(high) <= 0.0:
        return lowest
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            return 1.0 / middle
        if slope(middle) < 0.0:
            low = middle
        else:
            high = middle


class Bin(NamedTuple):
    """Samples whose confidences fall into one bin; the means are NaN in an empty one."""

    lower: float
    upper: float
    samples: int
    mean_confidence: float
    acceptance: float


def reliability(confidence: ArrayLike, outcomes: ArrayLike, bins: int = BINS) -> list[Bin]:
    """Samples by confidence, for a reliability diagram.

    Bins have equal width and hold their upper end: bin k of n is (k / n, (k + 1) / n]; the first one also holds 0.

    Args:
        confidence: ``[samples]``, in [0, 1].
        outcomes: ``[samples]``, in [0, 1].
        bins: How many.
    """
    values, labels = np.asarray(confidence, np.float64), np.asarray(outcomes, np.float64)
    edges = np.arange(1, bins) / bins
    index = np.searchsorted(edges, values, side="left")
    counts = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = np.bincount(index, values, bins) / counts
        rates = np.bincount(index, labels, bins) / counts
    return [
        Bin(k / bins, (k + 1) / bins, int(counts[k]), float(means[k]), float(rates[k])) for k in range(bins)
    ]


def expected_calibration_error(confidence: ArrayLike, outcomes: ArrayLike, bins: int = BINS) -> float:
    """Mean distance between confidence and acceptance, bin by bin.

    The sum over the bins of :func:`reliability` of ``samples / all * |acceptance - mean confidence|``. NaN without
    samples. Of n samples that are calibrated perfectly it still expects about ``sqrt(bins / n) / 3``.
    """
    filled = [b for b in reliability(confidence, outcomes, bins) if b.samples]
    total = sum(b.samples for b in filled)
    if not total:
        return math.nan
    return sum(b.samples * abs(b.acceptance - b.mean_confidence) for b in filled) / total


@dataclass(frozen=True, slots=True)
class Position:
    """Calibration of one draft position; what has no samples is NaN.

    Args:
        position: From 0.
        samples: Observed drafts.
        acceptance: Share of them accepted.
        temperature: Fitted, or that of all positions together where samples are few.
        pooled: Whether it is the latter.
        error_before, error_after: Expected calibration error at temperature 1, and at ``temperature``.
        likelihood_before, likelihood_after: Mean negative log-likelihood, likewise.
        bins_before, bins_after: Reliability, likewise.
    """

    position: int
    samples: int
    acceptance: float
    temperature: float
    pooled: bool
    error_before: float
    error_after: float
    likelihood_before: float
    likelihood_after: float
    bins_before: tuple[Bin, ...]
    bins_after: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What :func:`calibrate` found."""

    verifications: int
    positions: tuple[Position, ...]

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(position.temperature for position in self.positions)

    @property
    def setting(self) -> str:
        """The value of ``DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE``."""
        return ",".join(f"{temperature:.4g}" for temperature in self.temperatures)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: null instead."""

        def clean(value: Any) -> Any:
            if isinstance(value, float):
                return None if math.isnan(value) else value
            if isinstance(value, Bin):
                return {name: clean(part) for name, part in value._asdict().items()}
            return [clean(part) for part in value] if isinstance(value, tuple) else value

        return {
            "format": "deepinfer-plugins calibration",
            "version": 1,
            "setting": self.setting,
            "temperatures": list(self.temperatures),
            "verifications": self.verifications,
            "positions": [
                {field: clean(getattr(position, field)) for field in Position.__slots__}
                for position in self.positions
            ],
        }


def calibrate(log: Acceptance, bins: int = BINS) -> Calibration:
    """Fit a temperature for each position and say how good confidences are without and with it.

    A position with fewer than 100 observed drafts takes the temperature fitted to all positions together.
    """
    seen = log.observed
    pooled = fit_temperature(log.confidence_logits[seen], log.outcome[seen])
    positions = []
    for index in range(log.depth):
        logits, outcomes = log.position(index)
        few = logits.size < LEAST_SAMPLES
        temperature = pooled if few else fit_temperature(logits, outcomes)
        before, after = confidences(logits), confidences(logits, temperature)
        positions.append(
            Position(
                position=index,
                samples=logits.size,
                acceptance=float(outcomes.mean()) if outcomes.size else math.nan,
                temperature=temperature,
                pooled=few,
                error_before=expected_calibration_error(before, outcomes, bins),
                error_after=expected_calibration_error(after, outcomes, bins),
                likelihood_before=negative_log_likelihood(logits, outcomes, 1.0),
                likelihood_after=negative_log_likelihood(logits, outcomes, temperature),
                bins_before=tuple(reliability(before, outcomes, bins)),
                bins_after=tuple(reliability(after, outcomes, bins)),
            )
        )
    return Calibration(len(log.verified), tuple(positions))
