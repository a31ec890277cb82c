"""Attention and selection with other constants than their modules', at the release's shapes; and the time by kernel.

Usage: python benchmarks/kernel_constants.py [--tokens 64] [--ops sparse_attention,index_select,hc_mix]
Prints JSON, one line to a trial.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from kernel_cases import Draw, KernelCase, all_cases  # noqa: E402

from deepinfer_plugins.model.presets import preset  # noqa: E402

# The program beside this one; its name is also that of a package.
MEASURE = importlib.import_module("kernels")

TRIALS: dict[str, list[dict[str, int]]] = {
    "sparse_attention/compressed": [
        {},
        {"FEW_ROWS": 0},
        {"FEW_ROWS": 1 << 30},
        {"KEYS": 64},
        {"SHARES": 1},
        {"INDEX_PARTS": 1},
        {"INDEX_PARTS": 4},
    ],
    "index_select/all": [
        {},
        {"PLACES": 64},
        {"PROGRAMS": 528},
        {"PROGRAMS": 1056},
        {"PROGRAMS": 4096},
        {"KEYS": 4096},
    ],
    "index_select/publish": [{}],
    "index_select/candidates": [{}],
    "hc_mix/hidden": [{}, {"SPLIT": 320}, {"SPLIT": 1280}, {"BLOCK": 128}],
}


def by_kernel(case: KernelCase, function: Any, args: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each kernel of a call, on arguments that the cache may hold."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            function(**args)
        torch.cuda.synchronize()
    return {event.key[:60]: round(event.device_time_total / 5, 1) for event in profile.key_averages()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ops", default="sparse_attention,index_select,hc_mix")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda")
    cases = {f"{case.op}/{case.name}": case for case in all_cases(preset("release"))}
    wanted = arguments.ops.split(",")
    with torch.inference_mode():
        for name, trials in TRIALS.items():
            case = cases[name]
            if case.op not in wanted:
                continue
            module = importlib.import_module(f"deepinfer_plugins.kernels.{case.op}.triton")
            function = getattr(module, case.op)
            copies = max(1, min(MEASURE.MOST_COPIES, MEASURE.COLD_BYTES // case.num_bytes(arguments.tokens)))
            sets = [case.make(arguments.tokens, Draw(device, seed)) for seed in range(copies)]
            usual = dict(vars(module))
            for trial in trials:
                vars(module).update(trial)
                try:
                    spent = MEASURE.seconds([partial(function, **args) for args in sets], device)
                    record: dict[str, Any] = {
                        "us": round(spent * 1e6, 1),
                        "TB/s": round(case.num_bytes(arguments.tokens) / spent / 1e12, 3),
                    }
                    if not trial:
                        record["by_kernel"] = by_kernel(case, function, sets[0])
                except Exception as error:  # a trial that does not compile costs its figure, not the run
                    record = {"error": f"{error!r}"[:300]}
                vars(module).update({key: usual[key] for key in trial})
                print(json.dumps({"case": name, "tokens": arguments.tokens, **trial, **record}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
