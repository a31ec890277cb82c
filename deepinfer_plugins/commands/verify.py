"""``deepinfer-plugins verify``: the promise, held on the user's own machine and checkpoint.

Every request has a seed. What it gets alone, without speculation, is what it must get in any batch, in any order,
with drafts, and with drafts verified on a budget that is drawn anew every step.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deepinfer_plugins.commands.evaluate import checkpoint_folder
from deepinfer_plugins.core import shipped
from deepinfer_plugins.core.settings import VERIFY, VERIFY_BUDGET
from deepinfer_plugins.evaluation.identity import Answer, Check, Request, compare, make_requests

# What decides how drafts are made and verified is the command's own here.
_OWN = (
    "DEEPINFER_USE_NEXTN_DECODE",
    "DEEPINFER_ENABLE_MTP_VARLEN",
    VERIFY,
    VERIFY_BUDGET,
    "DEEPINFER_PLUGINS_ACCEPTANCE_LOG",
)
ALONE = "alone"


@dataclass(frozen=True, slots=True)
class Options:
    """What to verify.

    Args:
        engine: ``"vllm"`` or ``"sglang"``.
        model: A folder or a Hugging Face id; None for ``DEEPINFER_HF_MODEL_DIR``, or else what comes with the package.
        requests: How many.
        max_tokens: New tokens of a request, at most.
        longest: Tokens of a prompt, at most.
        drafts: Drafts per step.
        seed: Of the requests, orders and budgets.
        other_engine: What ``--json`` printed with the other engine, to compare with; None for nothing.
    """

    engine: str
    model: str | None = None
    requests: int = 14
    max_tokens: int = 24
    longest: int = 160
    drafts: int = 5
    seed: int = 0
    other_engine: Path | None = None


class EngineFailed(RuntimeError):
    """The engine did not come up, or ended while it answered."""


def main(options: Options, as_json: bool) -> int:
    """Verify, and print a table or JSON.

    Returns:
        Exit status: 0 if all is equal, 1 if not, 2 if it could not be tried, which is then said on standard error.
    """
    errors = Console(stderr=True)
    started = time.monotonic()
    try:
        folder = checkpoint_folder(options.model)
        requests = _requests(options, folder)
        other = None if options.other_engine is None else _other(options.other_engine, requests)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=errors) as progress:
            checks, reference, version = _run(options, folder, requests, progress)
    except (ValueError, OSError, ImportError, EngineFailed) as error:
        errors.print(f"verify: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    if other is not None:
        checks.append(compare("the other engine", other, reference, logprobs=False))
    ok = all(check.ok for check in checks)
    answer = {
        "engine": options.engine,
        "engine_version": version,
        "model": options.model,
        "seconds": round(time.monotonic() - started, 1),
        "checks": [check.as_dict() for check in checks],
        "ok": ok,
        "requests": requests,
        "answers": reference,
    }
    if as_json:
        print(json.dumps(answer, indent=1))
    else:
        show(options, folder, checks, version, Console())
    return 0 if ok else 1


def _requests(options: Options, folder: Path) -> list[Request]:
    from tokenizers import Tokenizer

    from deepinfer_plugins.model.checkpoint import Checkpoint

    # Its errors say what is wrong with a folder, before an engine is started on it.
    Checkpoint.open(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    held_out = [
        document
        for document in shipped.read_documents(shipped.corpus())
        if shipped.is_held_out(document.name)
    ]
    return make_requests(
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


def _run(
    options: Options, folder: Path, requests: list[Request], progress: Progress
) -> tuple[list[Check], list[Answer], str]:
    """Start the engine in each way and compare what it answers with what a request gets alone."""
    count = len(requests)
    order = list(range(count))
    shuffled = random.Random(options.seed).sample(order, count)
    together = [
        {"name": "all together", "order": order, "together": count},
        {"name": "in threes, in another order", "order": shuffled, "together": 3},
    ]
    alone = {"name": ALONE, "order": order, "together": 1}
    drafts = str(options.drafts)
    scheduled = {"DEEPINFER_ENABLE_MTP_VARLEN": "1", VERIFY_BUDGET: f"random:{options.seed}"}
    ways: list[tuple[str, int, dict[str, str], list[dict[str, Any]]]] = [
        ("no drafts", 0, {}, [alone, *together]),
        (f"{drafts} drafts", options.drafts, {}, [alone, *together]),
        (f"{drafts} drafts, random budgets", options.drafts, scheduled, together),
    ]
    checks: list[Check] = []
    reference: list[Answer] = []
    version = ""
    for name, depth, environment, runs in ways:
        found, version = _answers(options, folder, requests, depth, environment, runs, name, progress)
        for run, answers in found.items():
            if not reference:
                reference = answers
            else:
                checks.append(compare(f"{name}, {run}", reference, answers))
    return checks, reference, version


def _answers(
    options: Options,
    folder: Path,
    requests: list[Request],
    drafts: int,
    environment: dict[str, str],
    runs: list[dict[str, Any]],
    name: str,
    progress: Progress,
) -> tuple[dict[str, list[Answer]], str]:
    """Answer the requests with an engine in a process of its own."""
    plan = {
        "engine": options.engine,
        "model": str(folder),
        "drafts": drafts,
        "max_positions": options.longest + options.max_tokens + 1,
        "at_once": len(requests),
        "requests": requests,
        "runs": runs,
    }
    surroundings = {key: value for key, value in os.environ.items() if key not in _OWN} | environment
    # Matrices of small checkpoints gain nothing from a second thread, and on a CPU waiting for it costs tenfold.
    surroundings.setdefault("OMP_NUM_THREADS", "1")
    task = progress.add_task(f"{name}: starting {options.engine}", total=len(runs) * len(requests))
    with tempfile.TemporaryDirectory() as aside:
        plan_file, answers_file = Path(aside) / "plan.json", Path(aside) / "answers.json"
        plan_file.write_text(json.dumps(plan), encoding="utf-8")
        child = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.answer", str(plan_file), str(answers_file)],
            env=surroundings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None and child.stderr is not None
        said: deque[str] = deque(maxlen=20)
        reader = Thread(target=_read, args=(child.stderr, said), daemon=True)
        reader.start()
        try:
            for line in child.stdout:
                progress.update(task, description=f"{name}: {options.engine} answers")
                progress.advance(task, int(line))
            child.wait()
        finally:
            child.kill()
            child.wait()
        reader.join()
        if not answers_file.is_file():
            last = "\n".join(said)
            raise EngineFailed(
                f"{options.engine} ended with status {child.returncode}; it said last:\n{last}"
            )
        found = json.loads(answers_file.read_text(encoding="utf-8"))
    progress.update(task, description=name)
    return found["runs"], found["version"]


def _read(stream: IO[str], lines: deque[str]) -> None:
    lines.extend(line.rstrip() for line in stream)


def show(options: Options, folder: Path, checks: list[Check], version: str, console: Console) -> None:
    """Print a table of the checks and where the first difference of each is."""
    console.print(f"{escape(str(folder))}\n{options.engine} {escape(version)}")
    table = Table("run", "requests", "equal", "", title="held against each request alone, without drafts")
    for check in checks:
        verdict = "[green]equal[/]" if check.ok else "[red]differs[/]"
        table.add_row(escape(check.name), str(check.requests), str(check.equal), verdict)
    console.print(table)
    for check in checks:
        at = check.first_difference
        if at is not None:
            console.print(
                f"[red]{escape(check.name)}[/]: request {at.request}, new token {at.position}: {at.what} "
                f"{escape(str(at.expected))} expected, {escape(str(at.found))} found"
            )
