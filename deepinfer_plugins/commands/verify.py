"""``deepinfer-plugins verify``: the promise, held on the user's own machine and checkpoint.

Every request has a seed. What it gets alone, without speculation and with nothing in the cache, is what it must get in
any company and order, from any chunks and cached prefixes, with drafts, however many of them are verified, before it
is aborted or cut off, and after it was preempted.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deepinfer_plugins.commands import answer
from deepinfer_plugins.commands.evaluate import checkpoint_folder
from deepinfer_plugins.core import shipped
from deepinfer_plugins.core.settings import VERIFY, VERIFY_BUDGET
from deepinfer_plugins.evaluation import identity
from deepinfer_plugins.evaluation.identity import Answer, Check, Cut, Request, compare

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What decides how drafts are made and verified is the command's own here.
_OWN = (
    "DEEPINFER_USE_NEXTN_DECODE",
    "DEEPINFER_ENABLE_MTP_VARLEN",
    VERIFY,
    VERIFY_BUDGET,
    "DEEPINFER_PLUGINS_ACCEPTANCE_LOG",
)
END_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """What to verify.

    Args:
        engine: ``"vllm"`` or ``"sglang"``.
        model: A folder or a Hugging Face id; None for ``DEEPINFER_HF_MODEL_DIR``, or else what comes with the package.
        requests: How many.
        max_tokens: New tokens of a request, at most.
        longest: Tokens of a prompt, at most.
        drafts: Drafts per step, for everything but what ``depths`` adds.
        depths: Other numbers of drafts to try, each with an engine of its own.
        concurrency: How many requests are under way at a time, one run each.
        chunks: Tokens of a prompt per step, each with an engine of its own whose caches are small.
        thorough: Whether other numbers of drafts run at every concurrency and not at the highest alone, random
            budgets get an engine with all of the cache too, and chunks one without drafts.
        seed: Of the requests, orders and budgets.
        reference_at_once: How many requests are under way at a time in the run that all others are held against.
        engine_options: More of the engine's own options, by name.
        other_engine: What ``--json`` printed with the other engine, to compare with; None for nothing.
    """

    engine: str
    model: str | None = None
    requests: int = 16
    max_tokens: int = 12
    longest: int = 64
    drafts: int = 5
    depths: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = (8,)
    chunks: tuple[int, ...] = (32,)
    thorough: bool = False
    seed: int = 0
    reference_at_once: int = 1
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    other_engine: Path | None = None

    @property
    def at_once(self) -> int:
        """The highest concurrency that the requests allow."""
        return min(max(*self.concurrency, self.reference_at_once), self.requests)


class EngineFailed(RuntimeError):
    """The engine did not come up, or ended while it answered."""


def main(options: Options, as_json: bool) -> int:
    """Verify, and print a table or JSON.

    Returns:
        Exit status: 0 if all is equal, 1 if not or if a check shows nothing, 2 if it could not be tried, which is then
        said on standard error.
    """
    errors = Console(stderr=True)
    started = time.monotonic()
    try:
        folder = checkpoint_folder(options.model)
        tokenizer, requests = _requests(options, folder)
        other = None if options.other_engine is None else _other(options.other_engine, requests)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=errors) as progress:
            run = Verification(options, folder, tokenizer, requests, other, progress)
            checks = []
            for check in run.checks():
                checks.append(check)
                progress.console.print(f"{escape(check.name)}: {_verdict(check)}", highlight=False)
    except (ValueError, OSError, ImportError, EngineFailed) as error:
        errors.print(f"verify: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    ok = all(check.ok for check in checks)
    found = {
        "engine": options.engine,
        "engine_version": run.version,
        "model": options.model,
        "reference_at_once": options.reference_at_once,
        "engine_options": dict(options.engine_options),
        "seconds": round(time.monotonic() - started, 1),
        "checks": [check.as_dict() for check in checks],
        "ok": ok,
        "requests": requests,
        "answers": run.reference,
    }
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show(options, folder, checks, run.version, Console())
    return 0 if ok else 1


def _requests(options: Options, folder: Path) -> tuple[Tokenizer, list[Request]]:
    from deepinfer_plugins.evaluation.text import open_tokenizer
    from deepinfer_plugins.model.checkpoint import Checkpoint

    # Its errors say what is wrong with a folder, before an engine is started on it.
    Checkpoint.open(folder)
    tokenizer = open_tokenizer(folder)
    held_out = [
        document
        for document in shipped.read_documents(shipped.corpus())
        if shipped.is_held_out(document.name)
    ]
    return tokenizer, identity.make_requests(
        tokenizer, held_out, options.requests, options.max_tokens, options.longest, options.seed
    )


def _other(file: Path, requests: list[Request]) -> list[Answer]:
    """The answers in what another run printed, if it was asked the same."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if found.get("requests") != json.loads(json.dumps(requests)):
        raise ValueError(
            f"{file} answers other requests than these; run both with the same model, options and seed"
        )
    answers: list[Answer] = found["answers"]
    return answers


@dataclass(frozen=True, slots=True)
class Way:
    """A way to start the engine.

    Args:
        name: For people.
        drafts: Drafts per step; 0 for none.
        scheduled: Whether every step verifies a random number of them.
        small_pages: Whether pages of the caches hold few tokens.
        chunk: Tokens of a prompt per step; None: as the engine does. A number comes with small caches.
    """

    name: str
    drafts: int = 0
    scheduled: bool = False
    small_pages: bool = False
    chunk: int | None = None


def ways(options: Options) -> list[Way]:
    """How the engine is started, the reference first."""
    drafts = options.drafts
    # With the engine's pages, a prompt has to be long to be found again.
    found = [Way("no drafts"), Way(f"{drafts} drafts, small pages", drafts, small_pages=True)]
    found += [Way(f"{depth} drafts", depth) for depth in options.depths if depth != drafts]
    if options.thorough:
        found.append(Way(f"{drafts} drafts, random budgets", drafts, scheduled=True))
    for chunk in options.chunks:
        how = f"chunks of {chunk}, small cache"
        if options.thorough:
            found.append(Way(f"no drafts, {how}", small_pages=True, chunk=chunk))
        found.append(Way(f"{drafts} drafts, random budgets, {how}", drafts, True, True, chunk))
    return found


class Verification:
    """Every way to run the requests, one after the other, each held against the reference.

    Args:
        options: What to verify.
        folder: The checkpoint.
        tokenizer: Of the checkpoint.
        requests: To run.
        other: What the other engine answered; None for nothing.
        progress: Shows how far it is.
    """

    def __init__(
        self,
        options: Options,
        folder: Path,
        tokenizer: Tokenizer,
        requests: list[Request],
        other: list[Answer] | None,
        progress: Progress,
    ) -> None:
        self._options, self._folder, self._tokenizer = options, folder, tokenizer
        self._requests, self._other, self._progress = requests, other, progress
        self.reference: list[Answer] = []
        self.version = ""

    def checks(self) -> Iterator[Check]:
        """Run them."""
        for way in ways(self._options):
            with Running(self._options, self._folder, way, self._progress) as engine:
                self.version = engine.version
                if way.chunk is not None:
                    yield self._chunked(engine, way, way.chunk)
                elif not way.drafts:
                    yield from self._without_drafts(engine, way)
                else:
                    usual = way.drafts == self._options.drafts
                    everywhere = usual or self._options.thorough
                    for at_once in self._options.concurrency if everywhere else [self._options.at_once]:
                        check, answers = self._beside(engine, way, at_once)
                        yield check
                    if usual and not way.scheduled:
                        yield from self._events(engine, way, answers)

    def _without_drafts(self, engine: Running, way: Way) -> Iterator[Check]:
        reference_at_once = self._options.reference_at_once
        self.reference, _ = engine.run(self._requests, reference_at_once)
        if self._other is not None:
            yield compare("the other engine", self._other, self.reference, logprobs=False)
        for at_once in self._options.concurrency:
            if max(at_once, reference_at_once) > 1:
                yield self._beside(engine, way, at_once)[0]

    def _beside(self, engine: Running, way: Way, at_once: int) -> tuple[Check, list[Answer]]:
        """So many at a time, in an order that is drawn."""
        answers, counters = self._shuffled(engine, way, at_once)
        how = "alone" if at_once == 1 else f"{min(at_once, len(answers))} at a time"
        return self._compare(way, how, answers, _drafting(way, counters)), answers

    def _chunked(self, engine: Running, way: Way, chunk: int) -> Check:
        at_once = self._options.at_once
        # Nothing has been in its cache yet.
        answers, counters = self._shuffled(engine, way, at_once, cold=False)
        return self._compare(
            way,
            f"{at_once} at a time",
            answers,
            {
                "prompts in several chunks": sum(len(each["prompt"]) > chunk for each in self._requests),
                "preemptions": counters["preemptions"],
                **_drafting(way, counters),
            },
        )

    def _shuffled(
        self, engine: Running, way: Way, at_once: int, cold: bool = True
    ) -> tuple[list[Answer], dict[str, int]]:
        """Answers in the order of the requests, which came in another one."""
        order = list(range(len(self._requests)))
        random.Random(f"{self._options.seed} {way.name} {at_once}").shuffle(order)
        shuffled, counters = engine.run([self._requests[index] for index in order], at_once, cold=cold)
        return [
            found for _, found in sorted(zip(order, shuffled, strict=True), key=lambda pair: pair[0])
        ], counters

    def _events(self, engine: Running, way: Way, answers: list[Answer]) -> Iterator[Check]:
        """What may happen to requests that draft.

        Args:
            engine: Running.
            way: Its name.
            answers: What it made of all requests.
        """
        at_once = self._options.at_once
        again, counters = engine.run(self._requests, at_once, cold=False)
        evidence = {"cached tokens": sum(found["cached"] for found in again), **_drafting(way, counters)}
        yield self._compare(way, "cached prefixes", again, evidence)
        # Few enough at a time for others to wait for their slots.
        yield self._aborted(engine, way, max(1, min(at_once, len(self._requests) // 2)))
        by_length = identity.cut_by_length(self._requests, answers)
        yield self._cut(engine, way, "max_tokens inside a window", by_length)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        by_stop = identity.cut_by_stop(self._requests, answers, self._tokenizer.decode, special)
        yield self._cut(engine, way, "a stop string inside a window", by_stop)

    def _aborted(self, engine: Running, way: Way, at_once: int) -> Check:
        """Every other request is aborted in the middle; the next one comes at once."""
        lengths = [len(answer["tokens"]) for answer in self.reference]
        aborts = {index: max(1, length // 3) for index, length in enumerate(lengths) if index % 2}
        answers, counters = engine.run(self._requests, at_once, aborts)
        found = [len(answer["tokens"]) for answer in answers]
        # How far an aborted request came is up to the moment; what it has by then is not.
        expected = [
            identity.beginning(wanted, found[index]) if index in aborts else wanted
            for index, wanted in enumerate(self.reference)
        ]
        return compare(
            f"{way.name}, requests aborted beside others",
            expected,
            answers,
            {"aborted midway": counters["aborted"], "slots taken over": len(answers) - at_once},
        )

    def _cut(self, engine: Running, way: Way, how: str, cuts: Sequence[Cut]) -> Check:
        answers, _ = engine.run([cut.request for cut in cuts], self._options.at_once)
        inside = sum(cut.is_inside(found) for cut, found in zip(cuts, answers, strict=True))
        check = compare(
            f"{way.name}, {how}",
            [identity.beginning(self.reference[cut.index], cut.end) for cut in cuts],
            answers,
            {"ends inside an accepted window": inside},
        )
        if (at := check.first_difference) is None:
            return check
        return replace(check, first_difference=replace(at, request=cuts[at.request].index))

    def _compare(self, way: Way, how: str, answers: list[Answer], evidence: dict[str, int]) -> Check:
        return compare(f"{way.name}, {how}", self.reference, answers, evidence)


def _drafting(way: Way, counters: dict[str, int]) -> dict[str, int]:
    """What shows that a way's drafts were what it says."""
    if not way.drafts:
        return {}
    found = {"drafts accepted": counters["accepted"]}
    if way.scheduled:
        found["drafts not verified"] = counters["drafted"] - counters["verified"]
    return found


class Running(AbstractContextManager["Running"]):
    """An engine in a process of its own.

    Args:
        options: What to verify.
        folder: The checkpoint.
        way: To start it.
        progress: Shows how far it is.

    Raises:
        EngineFailed: If it does not come up; from :meth:`run`, if it ends.
    """

    def __init__(self, options: Options, folder: Path, way: Way, progress: Progress) -> None:
        surroundings = {key: value for key, value in os.environ.items() if key not in _OWN}
        if way.scheduled:
            surroundings |= {
                "DEEPINFER_ENABLE_MTP_VARLEN": "1",
                VERIFY_BUDGET: f"random:{options.seed}",
            }
        # Matrices of small checkpoints gain nothing from a second thread, and on a CPU waiting for it costs tenfold.
        surroundings.setdefault("OMP_NUM_THREADS", "1")
        self._engine, self._name, self._progress = options.engine, way.name, progress
        self._task = progress.add_task(f"{way.name}: starting {options.engine}", total=0)
        self._child = subprocess.Popen(
            [sys.executable, "-m", answer.__name__],
            env=surroundings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._child.stderr is not None
        self._last: deque[str] = deque(maxlen=20)
        self._reader = Thread(target=_read, args=(self._child.stderr, self._last), daemon=True)
        self._reader.start()
        at_once = options.at_once if way.chunk is None else min(options.at_once, way.chunk)
        start = answer.Start(
            engine=options.engine,
            model=str(folder),
            drafts=way.drafts,
            max_positions=options.longest + options.max_tokens + 1,
            at_once=at_once,
            small_pages=way.small_pages,
            chunk=way.chunk,
            tight=way.chunk is not None,
            engine_options=dict(options.engine_options),
        )
        try:
            self.version: str = self._ask(start)["version"]
        except BaseException:
            self._end()
            raise

    def run(
        self,
        requests: Sequence[Request],
        at_once: int,
        aborts: dict[int, int] | None = None,
        cold: bool = True,
    ) -> tuple[list[Answer], dict[str, int]]:
        """Answer requests, as ``answer.Run`` says."""
        self._progress.update(self._task, description=f"{self._name}: {self._engine} answers")
        (task,) = (task for task in self._progress.tasks if task.id == self._task)
        self._progress.update(self._task, total=(task.total or 0) + len(requests))
        by_text = {str(index): tokens for index, tokens in (aborts or {}).items()}
        found = self._ask(answer.Run(requests=list(requests), at_once=at_once, aborts=by_text, cold=cold))
        return found["answers"], found["counters"]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.update(self._task, description=self._name)
        self._end()

    def _ask(self, what: Any) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
        # If it has ended, why is on its standard error.
        with suppress(BrokenPipeError):
            print(json.dumps(what), file=self._child.stdin, flush=True)
        for line in self._child.stdout:
            found: dict[str, Any] = json.loads(line)
            if "done" not in found:
                return found
            self._progress.advance(self._task, found["done"])
        status = self._child.wait()
        self._reader.join()
        last = "\n".join(self._last)
        raise EngineFailed(f"{self._engine} ended with status {status}; it said last:\n{last}")

    def _end(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        # An engine that does not end by itself has answered all the same.
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(END_TIMEOUT_S)
        self._child.kill()
        self._child.wait()
        self._child.stdout.close()


def _read(stream: IO[str], lines: deque[str]) -> None:
    lines.extend(line.rstrip() for line in stream)


def _verdict(check: Check) -> str:
    if check.first_difference is not None:
        return "[red]differs[/]"
    return "[red]not shown[/]" if check.missing else "[green]equal[/]"


def show(options: Options, folder: Path, checks: list[Check], version: str, console: Console) -> None:
    """Print a table of the checks and where the first difference of each is."""
    console.print(f"{escape(str(folder))}\n{options.engine} {escape(version)}")
    reference = (
        "each request alone" if options.reference_at_once == 1 else f"{options.reference_at_once} at a time"
    )
    title = f"held against {reference}, without drafts"
    table = Table("run", "requests", "equal", "happened", "", title=title)
    for check in checks:
        happened = ", ".join(f"{what} {count}" for what, count in check.evidence.items())
        table.add_row(escape(check.name), str(check.requests), str(check.equal), happened, _verdict(check))
    console.print(table)
    for check in checks:
        at = check.first_difference
        if at is not None:
            console.print(
                f"[red]{escape(check.name)}[/]: request {at.request}, new token {at.position}: {at.what} "
                f"{escape(str(at.expected))} expected, {escape(str(at.found))} found"
            )
        elif check.missing:
            console.print(
                f"[red]{escape(check.name)}[/]: shows nothing, for this never happened: {', '.join(check.missing)}; "
                "ask more or longer (--requests, --max-tokens, --longest)"
            )
