"""Do tokens under speculation have the target's distribution? A million pairs of tokens each, on this machine's chip.

Usage: PYTHONPATH=. python benchmarks/distribution.py [--draws 1000000] [--providers torch triton] --out F
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deepinfer_plugins.core.target import Want
from deepinfer_plugins.evaluation.distribution import draw_pairs
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.platforms.detect import detect

CASES: dict[str, dict[str, Any]] = {"plain": {}, "filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 5}}
OPERATORS = ("SAMPLE", "FILTER_LOG_PROBS", "ACCEPT_OR_RESAMPLE")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--providers", nargs="+", default=["torch"])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chip = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    found = []
    for provider in arguments.providers:
        for operator in OPERATORS:
            os.environ[f"DEEPINFER_PLUGINS_{operator}"] = provider
        ops = load_ops(Want(detect().arch))
        for way in ("coupling", "rejection"):
            for name, params in CASES.items():
                with torch.inference_mode():
                    fit = draw_pairs(way, arguments.draws, device, ops, **params)
                found.append(
                    {"provider": provider, "way": way, "sampling": name}
                    | {key: None if math.isnan(value) else value for key, value in asdict(fit).items()}
                    | {"limit": fit.limit, "fits": fit.fits}
                )
                print(json.dumps(found[-1]), flush=True)
    record = {"chip": chip, "torch": torch.__version__, "pairs": found}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
