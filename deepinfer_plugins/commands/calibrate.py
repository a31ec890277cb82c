"""``deepinfer-plugins calibrate LOG...``: temperatures of the draft's confidences, from acceptance logs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepinfer_plugins.features.calibration import Bin, Calibration, calibrate, read_logs

PLOTS = (".png", ".svg")


def main(
    logs: Sequence[Path], output: Path | None = None, plot: Path | None = None, as_json: bool = False
) -> int:
    """Fit, print, and write what was asked for.

    Args:
        logs: Acceptance logs; read as one.
        output: File for the result as JSON; None for none.
        plot: File for reliability diagrams, ``.png`` or ``.svg``; None for none.
        as_json: Print the result as JSON instead of a table.

    Returns:
        Exit status: 0, or 2 if something asked for cannot be done, which is then said on standard error.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        if plot is not None and plot.suffix not in PLOTS:
            raise ValueError(f"--plot {plot}: supported are files that end in {' and '.join(PLOTS)}")
        log = read_logs(logs)
        if not log.observed.any():
            raise ValueError(
                f"no draft was verified in {', '.join(map(str, logs))}; nothing to calibrate with"
            )
        found = calibrate(log)
        if output is not None:
            output.write_text(json.dumps(found.as_dict(), indent=2) + "\n", encoding="utf-8")
        if plot is not None:
            draw(found, plot)
    except (ValueError, OSError, ImportError) as error:
        errors.print(f"calibrate: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    if as_json:
        console.print_json(data=found.as_dict())
    else:
        show(found, console)
    return 0


def show(found: Calibration, console: Console) -> None:
    """Print a table, and the setting last, ready to be copied."""
    table = Table("draft", "verified", "accepted", "temperature", "calibration error", "likelihood, nats")
    for position in found.positions:
        if not position.samples:
            table.add_row(str(position.position + 1), "0", "", f"{position.temperature:.4g} (all)", "", "")
            continue
        table.add_row(
            str(position.position + 1),
            f"{position.samples:,}",
            f"{position.acceptance:.1%}",
            f"{position.temperature:.4g}{' (all)' if position.pooled else ''}",
            f"{position.error_before:.4f} -> {position.error_after:.4f}",
            f"{-position.likelihood_before:.4f} -> {-position.likelihood_after:.4f}",
        )
    console.print(table)
    console.print(
        f"{found.verifications:,} verifications; "
        "expected calibration error and mean log-likelihood without -> with the temperature"
    )
    if any(position.pooled for position in found.positions):
        console.print("(all): too few verified drafts there; fitted to all positions together")
    console.print(
        f"DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE={found.setting}", highlight=False, soft_wrap=True
    )


def draw(found: Calibration, path: Path) -> None:
    """Draw one reliability diagram per position: acceptance over confidence, without and with the temperature.

    Raises:
        ImportError: If matplotlib is not installed; the message says what to install.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"--plot needs matplotlib ({error}); pip install 'deepinfer-plugins[plot]', or leave --plot out"
        ) from None

    columns = min(len(found.positions), 4)
    rows = -(-len(found.positions) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.4 * rows), layout="constrained")
    for position in found.positions:
        axes = figure.add_subplot(rows, columns, position.position + 1)
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for bins, distance, label in (
            (position.bins_before, position.error_before, "T = 1"),
            (position.bins_after, position.error_after, f"T = {position.temperature:.3g}"),
        ):
            axes.plot(*_points(bins), marker="o", markersize=4, label=f"{label}, error {distance:.3f}")
        axes.set(
            title=f"draft {position.position + 1}, {position.samples:,} verified",
            xlabel="confidence",
            ylabel="accepted",
            xlim=(0, 1),
            ylim=(0, 1),
            aspect="equal",
        )
        axes.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=150)


def _points(bins: Sequence[Bin]) -> tuple[list[float], list[float]]:
    filled = [b for b in bins if b.samples]
    return [b.mean_confidence for b in filled], [b.acceptance for b in filled]
