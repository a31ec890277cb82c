"""``deepinfer-plugins make-checkpoint DIR``: a random checkpoint in the release's format."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


def main(
    folder: Path,
    shape: str = "small",
    seed: int = 0,
    shard_bytes: int | None = None,
    weights: bool = True,
) -> int:
    """Write the checkpoint, showing how far it is.

    Args:
        folder: Where to; must be empty or absent.
        shape: Name of a preset: ``small``, ``tiny``, ``wide`` or ``release``.
        seed: Seed of every value.
        shard_bytes: Largest size of a shard that holds more than one tensor; None for a quarter of the checkpoint.
        weights: If False, write the configuration and the index only.

    Returns:
        Exit status: 0, or 2 if something asked for cannot be done, which is then said on standard error.
    """
    # torch takes a second to import: not on the way to --help.
    from deepinfer_plugins.model.make_checkpoint import make_checkpoint

    errors = Console(stderr=True)
    columns = (
        TextColumn("Writing weights"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=errors, transient=True, disable=not weights) as bar:
            task = bar.add_task("", total=None)
            config = make_checkpoint(
                folder,
                shape,
                seed,
                shard_bytes,
                weights,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except (ValueError, OSError) as error:
        errors.print(f"make-checkpoint: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    what = f"{config.num_hidden_layers} layers of width {config.hidden_size}"
    files = "" if weights else ", configuration and index only"
    Console().print(
        f"{folder}: {shape}, {what}, seed {seed}{files}", markup=False, highlight=False, soft_wrap=True
    )
    return 0
