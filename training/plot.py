"""Draw the curves of a training run.

Usage: python -m training.plot LOG_FOLDER OUTPUT.svg (needs matplotlib: the extra ``plot``)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", type=Path, help="folder of log-backbone.json and log-draft.json")
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    backbone, draft = (
        json.loads((arguments.logs / f"log-{phase}.json").read_text()) for phase in ("backbone", "draft")
    )
    plt.rcParams["svg.hashsalt"] = "training"
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    steps = [entry["step"] for entry in backbone]
    left.plot(steps, [entry["loss"] for entry in backbone], label="loss, one batch (nats per token)")
    left.plot(steps, [entry["index"] for entry in backbone], label="indexer, sum over layers (nats)")
    tested = [entry for entry in backbone if "held_out_perplexity" in entry]
    left.set(title="backbone", xlabel="step", ylim=(0, 5))
    left.legend()
    middle.plot(
        [entry["step"] for entry in tested], [entry["held_out_perplexity"] for entry in tested], marker="o"
    )
    middle.set(title="backbone, held-out windows", xlabel="step", ylabel="perplexity", ylim=(0, None))
    for offset in range(len(draft[0]["agree"])):
        right.plot(
            [entry["step"] for entry in draft],
            [entry["agree"][offset] for entry in draft],
            label=f"draft {offset + 1}",
        )
    right.set(title="draft: agrees with the backbone's choice", xlabel="step", ylim=(0, 1))
    right.legend(ncols=2)
    figure.savefig(arguments.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
