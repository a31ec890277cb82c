"""The command ``deepinfer-plugins``. Each sub-command imports what it needs when it is called."""

from __future__ import annotations

import importlib.metadata
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="deepinfer-plugins",
    help="DeepSeek-V4.1-Flash on unmodified vLLM and SGLang.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Engine(StrEnum):
    """The engines this package plugs into."""

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
