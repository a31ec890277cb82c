"""``deepinfer-plugins evaluate``: how well a checkpoint predicts text, and how well its draft predicts it."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deepinfer_plugins.core import shipped

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from deepinfer_plugins.evaluation.measure import Evaluation, Runner
    from deepinfer_plugins.evaluation.ngram import Floats
    from deepinfer_plugins.evaluation.text import Piece
    from deepinfer_plugins.features.calibration import Acceptance
    from deepinfer_plugins.model.config import ModelConfig

_RUNNERS = {
    "reference": "deepinfer_plugins.evaluation.measure:ReferenceRunner",
    "vllm": "deepinfer_plugins.vllm_ext.evaluation:VllmRunner",
    "sglang": "deepinfer_plugins.sglang_ext.evaluation:SglangRunner",
}


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure.

    Args:
        engine: ``"reference"``, ``"vllm"`` or ``"sglang"``.
        model: A folder or a Hugging Face id; None for ``DEEPINFER_HF_MODEL_DIR``, or else what comes with the package.
        tokens: Held-out tokens to score; 0 for none.
        prompts: Held-out prompts to continue; 0 for none.
        new_tokens: Tokens after each prompt.
        drafts: Drafts per step.
        seed: Of the choice of text.
        acceptance_log: File that the acceptance log is added to.
    """

    engine: str = "reference"
    model: str | None = None
    tokens: int = 8192
    prompts: int = 48
    new_tokens: int = 96
    drafts: int = 5
    seed: int = 0
    acceptance_log: Path | None = None


def main(request: Request, as_json: bool) -> int:
    """Measure, and print a table or JSON.

    Returns:
        Exit status: 0 if everything measured is as good as the shipped checkpoint must be, 1 if not, 2 if it could
        not be measured, which is then said on standard error.
    """
    # Matrices of small checkpoints gain nothing from a second thread, and on a CPU waiting for it costs tenfold.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    errors = Console(stderr=True)
    started = time.monotonic()
    try:
        folder = checkpoint_folder(request.model)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=errors) as progress:
            found, version = _measure(request, folder, progress)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        errors.print(f"evaluate: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    answer = {
        "format": "deepinfer-plugins evaluation",
        "version": 1,
        "engine": request.engine,
        "engine_version": version,
        "model": str(folder),
        "options": {
            name: getattr(request, name) for name in ("tokens", "prompts", "new_tokens", "drafts", "seed")
        },
        "seconds": round(time.monotonic() - started, 1),
        **found.as_dict(),
    }
    if as_json:
        print(json.dumps(answer, indent=1))
    else:
        show(answer, found, Console())
    return 0 if answer["ok"] else 1


def checkpoint_folder(model: str | None) -> Path:
    """What a command runs: the model named, that of ``DEEPINFER_HF_MODEL_DIR``, or the one shipped."""
    from deepinfer_plugins.core.settings import Settings
    from deepinfer_plugins.model.checkpoint import resolve_model_folder

    configured = Settings.from_env().hf_model_dir
    if model is None:
        return Path(configured) if configured else shipped.default_checkpoint()
    return resolve_model_folder(model, configured, _download)


def _download(model: str) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(model)


def _measure(request: Request, folder: Path, progress: Progress) -> tuple[Evaluation, str]:
    """Run the checkpoint, while the baseline learns beside it."""
    from deepinfer_plugins.evaluation import text
    from deepinfer_plugins.evaluation.measure import Evaluation
    from deepinfer_plugins.model.checkpoint import Checkpoint

    config = Checkpoint.open(folder).config
    tokenizer = text.open_tokenizer(folder)
    documents = shipped.read_documents(shipped.corpus())
    chosen = text.choose(
        tokenizer, documents, config.eos_token_id, request.tokens, request.prompts, request.seed
    )
    found = Evaluation()
    with tempfile.TemporaryDirectory() as aside, ThreadPoolExecutor(1) as beside:
        learned = beside.submit(_baseline, tokenizer, documents, config, chosen.scored)
        log = Path(aside) / "acceptance"
        task = progress.add_task(f"starting {request.engine}", total=1)
        runner = _runner(request, folder, log)
        progress.update(task, completed=1)
        try:
            version = runner.version
            if chosen.scored:
                pieces = [piece.tokens for piece in chosen.scored]
                task = progress.add_task("scoring tokens", total=sum(map(len, pieces)))
                scores = runner.log_probabilities(pieces, partial(progress.advance, task))
                task = progress.add_task("the n-gram baseline", total=1)
                found.add_scores([piece.kind for piece in chosen.scored], scores, learned.result())
                progress.update(task, completed=1)
            if chosen.prompts and request.drafts:
                counts = _generate(request, runner, chosen.prompts, log, progress)
                found.add_drafts(counts, _read(log), request.engine)
        finally:
            runner.close()
        if request.acceptance_log and log.exists():
            with request.acceptance_log.open("a", encoding="utf-8") as file:
                file.write(log.read_text(encoding="utf-8"))
    for name, measured in (("perplexity", chosen.scored), ("acceptance", chosen.prompts and request.drafts)):
        if not measured:
            found.not_measured[name] = "not asked for"
    return found, version


def _baseline(
    tokenizer: Tokenizer, documents: Sequence[shipped.Document], config: ModelConfig, scored: Sequence[Piece]
) -> list[Floats]:
    """What the n-gram model makes of the text that is scored; nothing if none is."""
    from deepinfer_plugins.evaluation.ngram import KneserNey
    from deepinfer_plugins.evaluation.text import tokenize

    if not scored:
        return []
    seen = [document for document in documents if not shipped.is_held_out(document.name)]
    model = KneserNey(tokenize(tokenizer, seen, config.eos_token_id), config.vocab_size)
    return [model.log_probabilities(np.array(piece.tokens)) for piece in scored]


def _generate(
    request: Request, runner: Runner, prompts: Sequence[Piece], log: Path, progress: Progress
) -> dict[str, list[int]]:
    """Continue the prompts, kind by kind.

    Returns:
        By kind: verifications that accepted none of the drafts, one, two and so on.
    """
    from deepinfer_plugins.evaluation.measure import count_accepted

    task = progress.add_task("generating tokens", total=len(prompts) * request.new_tokens)
    found: dict[str, list[int]] = {}
    done = np.zeros(request.drafts + 1, dtype=np.int64)
    for kind in sorted({piece.kind for piece in prompts}):
        chosen = [piece.tokens for piece in prompts if piece.kind == kind]
        counts = runner.generate(chosen, request.new_tokens, partial(progress.advance, task))
        logged = np.array(count_accepted(_read(log), request.drafts))
        if logged.any():
            counts, done = (logged - done).tolist(), logged
        found[kind] = [*counts, *[0] * (request.drafts + 1 - len(counts))]
    progress.update(task, completed=len(prompts) * request.new_tokens)
    return found


def _read(log: Path) -> Acceptance:
    from deepinfer_plugins.features.calibration import read_logs

    return read_logs([log] if log.exists() else [])


def _runner(request: Request, folder: Path, log: Path) -> Runner:
    """Start what runs the checkpoint; an engine's room is reached by name."""
    from deepinfer_plugins.evaluation import text

    module, _, name = _RUNNERS[request.engine].partition(":")
    runner = getattr(importlib.import_module(module), name)
    longest = max(text.LENGTH, text.PROMPT_LENGTHS.stop + request.new_tokens)
    # Engines keep room for drafts behind the longest sequence.
    return runner(folder, request.drafts if request.prompts else 0, log, longest + 64)


def show(answer: dict[str, Any], found: Evaluation, console: Console) -> None:
    """Print what was measured, what was not, and which bars hold."""
    from deepinfer_plugins.evaluation.measure import noise_floor

    console.print(
        f"{escape(answer['model'])}\n{answer['engine']} {escape(answer['engine_version'])}, {answer['seconds']} s"
    )
    if found.perplexity is not None:
        table = Table("text", "tokens", "perplexity", "order-3 Kneser-Ney", "ratio", title="held-out text")
        for kind, each in {**found.perplexity_by_kind, "all": found.perplexity}.items():
            values = (each.model, each.baseline, each.ratio)
            table.add_row(kind, str(each.tokens), *(f"{value:.3f}" for value in values))
        console.print(table)
    if found.speculation is not None:
        table = Table("text", "steps", "tokens a step", title="accepted drafts by position, greedy")
        for position in range(1, len(found.speculation.rates) + 1):
            table.add_column(str(position))
        for kind, spec in {**found.speculation_by_kind, "all": found.speculation}.items():
            rates = (f"{value:.3f}" for value in (spec.mean_length, *spec.rates))
            table.add_row(kind, str(spec.verifications), *rates)
        console.print(table)
    if found.calibration is not None:
        table = Table("draft", "judged", "accepted", "temperature", title="calibration of confidences")
        for column in ("error", "error at 1", "by chance"):
            table.add_column(column)
        for at in found.calibration.positions:
            numbers = (
                at.acceptance,
                at.temperature,
                at.error_after,
                at.error_before,
                noise_floor(at.samples),
            )
            table.add_row(str(at.position + 1), str(at.samples), *(f"{number:.3f}" for number in numbers))
        console.print(table)
        console.print(f"DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE={found.calibration.setting}")
    for name, why in found.not_measured.items():
        console.print(f"[yellow]not measured:[/] {name}: {escape(why)}")
    for check in found.checks():
        verdict = {True: "[green]holds[/]", False: "[red]missed[/]", None: "[yellow]too few samples[/]"}
        value = "none" if check.value is None else f"{check.value:.3f}"
        console.print(f"{verdict[check.ok]} {check.name}: {value}, the bar is {check.bar}")
