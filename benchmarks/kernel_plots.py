"""What ``kernels.py`` recorded, drawn: each operator's fastest rival over its own time, and what it makes of the chip.

Usage: python benchmarks/kernel_plots.py RECORD.json OUT.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Dark enough to be told apart on white.
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4b94", "#b08900", "#444444")


def series(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Results of each case, by number of tokens; for those that have a rival."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in sorted(record["results"], key=lambda one: one["tokens"]):
        ratios = [
            rival["rival_over_ours"] for rival in result.get("rivals", ()) if "rival_over_ours" in rival
        ]
        if ratios:
            found.setdefault(f"{result['op']} {result['name']}", []).append(result | {"ratio": min(ratios)})
    return found


def draw(record: dict[str, Any], path: Path) -> None:
    """Three panels: products in FP8, products in bf16, experts; above ratios, below shares of the chip's ceilings."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "kernels"  # the same file for the same numbers
    panels = {"FP8 products": "mxfp8_", "bf16 products": "linear ", "experts": "experts "}
    figure = Figure(figsize=(4.6 * len(panels), 6.6), layout="constrained")
    axes = figure.subplots(2, len(panels), sharex=True)
    cases = series(record)
    for column, (title, start) in enumerate(panels.items()):
        above, below = axes[0][column], axes[1][column]
        chosen = {name: results for name, results in cases.items() if name.startswith(start)}
        for colour, (name, results) in zip(COLOURS, chosen.items(), strict=False):
            tokens = [one["tokens"] for one in results]
            label = name.rpartition(" ")[2]
            above.plot(tokens, [one["ratio"] for one in results], color=colour, marker="o", ms=3, label=label)
            below.plot(tokens, [one["of_copy"] for one in results], color=colour, marker="o", ms=3)
            below.plot(tokens, [one["of_matmul"] for one in results], color=colour, ls=":")
        above.axhline(1, color="#999999", lw=0.8)
        above.set(title=title, xscale="log", ylim=(0, None))
        above.legend(fontsize=8)
        below.set(xscale="log", ylim=(0, None), xlabel="tokens")
    axes[0][0].set_ylabel("fastest rival's time over ours")
    axes[1][0].set_ylabel("share of a copy (dotted: of a product)")
    figure.suptitle(f"{record['chip']}, {record['commit']}")
    figure.savefig(path, metadata={"Date": None})


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    draw(json.loads(Path(argv[0]).read_text()), Path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
