"""The command ``deepinfer-plugins``. Each sub-command imports what it needs when it is called."""

from __future__ import annotations

import importlib.metadata
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_plugins.core.engines import Engine, default

app = typer.Typer(
    name="deepinfer-plugins",
    help="DeepSeek-V4.1-Flash on unmodified vLLM and SGLang.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Runs(StrEnum):
    """What a checkpoint can be evaluated with."""

    reference = "reference"
    vllm = "vllm"
    sglang = "sglang"


@app.command()
def doctor(
    engine: Annotated[Engine | None, typer.Option(help="Default: the one that is installed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask the engine what it would run. The exit status is 1 if something asked for is not active."""
    from deepinfer_plugins.commands.doctor import diagnose

    if as_json:
        found = diagnose(engine.value if engine else None)
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        from rich.console import Console

        from deepinfer_plugins.commands.show import show

        with Console(stderr=True).status("asking the engine, which takes its start-up time"):
            found = diagnose(engine.value if engine else None)
        show(found, Console())
    raise typer.Exit(1 if found.problems else 0)


@app.command("make-checkpoint")
def make_checkpoint(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where; must be empty or absent.")],
    shape: Annotated[
        str, typer.Option(help="A preset of sizes; release has the sizes of the release.")
    ] = "small",
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    shard_bytes: Annotated[
        int | None, typer.Option("--shard-size", min=1, help="Largest shard in bytes; default: the preset's.")
    ] = None,
    weights: Annotated[
        bool,
        typer.Option("--weights/--no-weights", help="Write weights, or the configuration and index only."),
    ] = True,
) -> None:
    """Write a checkpoint of random weights in the release's format."""
    from deepinfer_plugins.commands.make_checkpoint import main as run

    raise typer.Exit(run(folder, shape, seed, shard_bytes, weights))


@app.command()
def calibrate(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Acceptance logs.")],
    output: Annotated[Path | None, typer.Option(help="Write what was found to this file, as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw reliability diagrams into this .png or .svg file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit the temperatures of the draft's confidences, one per position, to acceptance logs.

    DEEPINFER_PLUGINS_ACCEPTANCE_LOG=FILE makes an engine write such a log.
    """
    from deepinfer_plugins.commands.calibrate import main as run

    raise typer.Exit(run(logs, output, plot, as_json))


@app.command()
def checkpoint() -> None:
    """Print the folder of the small trained checkpoint that comes with the package."""
    from deepinfer_plugins.core.shipped import default_checkpoint

    typer.echo(default_checkpoint())


@app.command()
def evaluate(
    engine: Annotated[
        Runs, typer.Option(help="What runs the model; reference needs no engine.")
    ] = Runs.reference,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or Hugging Face id; default: DEEPINFER_HF_MODEL_DIR, or the one shipped."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Held-out tokens to score.")] = 8192,
    prompts: Annotated[int, typer.Option(min=0, help="Held-out prompts to continue.")] = 48,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens after each prompt.")] = 96,
    drafts: Annotated[int, typer.Option(min=0, max=8, help="Drafts per step.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the choice of text.")] = 0,
    acceptance_log: Annotated[
        Path | None, typer.Option(help="Also add the acceptance log, for calibrate, to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure perplexity on held-out text against an n-gram model's, and acceptance and calibration of drafts.

    The exit status is 1 if a value is not as good as the shipped checkpoint's must be, and 2 if it can't be measured.
    """
    from deepinfer_plugins.commands.evaluate import Request, main

    request = Request(engine.value, model, tokens, prompts, new_tokens, drafts, seed, acceptance_log)
    raise typer.Exit(main(request, as_json))


@app.command()
def verify(
    engine: Annotated[Engine | None, typer.Option(help="Default: the one that is installed.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or Hugging Face id; default: DEEPINFER_HF_MODEL_DIR, or the one shipped."),
    ] = None,
    thorough: Annotated[
        bool,
        typer.Option(
            help="Where not told otherwise: 64 requests, 1, 8 and 32 at a time, 1 to 8 drafts, two sizes of chunks, "
            "those also without drafts. Takes many times as long."
        ),
    ] = False,
    requests: Annotated[int | None, typer.Option(min=1, help="How many requests. [default: 16]")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of a request, at most.")] = 12,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, at most.")] = 64,
    drafts: Annotated[int, typer.Option(min=1, max=8, help="Drafts per step.")] = 5,
    depths: Annotated[
        str | None,
        typer.Option(
            help="Other numbers of drafts per step to try, such as 1,8 or 1..8; each starts the engine."
        ),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Requests under way at a time, such as 1,8,32. [default: 8]")
    ] = None,
    chunks: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a prompt per step, such as 16,32; each starts the engine, with a small cache. [default: 32]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of requests, orders and budgets.")] = 0,
    reference_concurrency: Annotated[
        int,
        typer.Option(min=1, help="Requests under way at a time in the run that all others are held against."),
    ] = 1,
    engine_options: Annotated[
        str,
        typer.Option(metavar="JSON", help="Arguments of vllm.LLM or sglang.Engine, as a JSON object."),
    ] = "{}",
    other_engine: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also compare with what --json printed in the other engine."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hold the engine to the promise: the same tokens alone, batched, reordered, with drafts and with random budgets.

    Also from prompts in chunks or in the cache, when a request ends inside a window of drafts, beside requests that are
    aborted, and after preemptions. A run in which none of that happened does not count as equal.

    The exit status is 1 if a token or a log-probability differs or a run shows nothing, and 2 if it can't be tried.
    """
    from deepinfer_plugins.commands.verify import Options, main

    try:
        chosen = engine or default()
    except LookupError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from error
    options = Options(
        engine=chosen.value,
        model=model,
        requests=requests or (64 if thorough else 16),
        max_tokens=max_tokens,
        longest=longest,
        drafts=drafts,
        depths=_numbers("--depths", depths or ("1..8" if thorough else ""), 1, 8),
        concurrency=_numbers("--concurrency", concurrency or ("1,8,32" if thorough else "8"), 1),
        chunks=_numbers("--chunks", chunks or ("16,32" if thorough else "32"), 1),
        thorough=thorough,
        seed=seed,
        reference_at_once=reference_concurrency,
        engine_options=_object("--engine-options", engine_options),
        other_engine=other_engine,
    )
    raise typer.Exit(main(options, as_json))


def _object(option: str, text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        typer.BadParameter: If it is none.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"{text!r}: expected a JSON object: {error}", param_hint=option) from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{text!r}: expected a JSON object", param_hint=option)
    return found


def _numbers(option: str, text: str, least: int, most: int | None = None) -> tuple[int, ...]:
    """The numbers in a list such as ``1,4..8``, each once, ascending.

    Raises:
        typer.BadParameter: If it is no such list, or a number is out of range.
    """
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dots, last = part.strip().partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()):
            raise typer.BadParameter(f"{text!r}: expected numbers, such as 1,4..8", param_hint=option)
        found |= set(range(int(first), int(last if dots else first) + 1))
    if wrong := [number for number in sorted(found) if number < least or number > (most or number)]:
        upto = f" to {most}" if most else " on"
        raise typer.BadParameter(f"{wrong[0]}: expected numbers from {least}{upto}", param_hint=option)
    return tuple(sorted(found))


@app.command()
def version() -> None:
    """Print the versions of this package and of what it plugs into."""
    for name in ("deepinfer-plugins", "vllm", "sglang", "torch"):
        try:
            typer.echo(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue


def main() -> None:
    """The entry point."""
    app()
