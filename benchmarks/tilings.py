"""Time of the linear layers and of ``experts`` under every tiling: what the tables of their Triton providers come from.

Kernels are compiled by several processes first, for the chip that is here; then each is timed as in ``kernels.py``.

Usage: python benchmarks/tilings.py [--cases mxfp8_linear/wo_b,linear/gate] [--tokens 16,128] [--out FILE]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))
from compile_ahead import compile_ahead, find  # noqa: E402
from kernel_cases import Draw, KernelCase  # noqa: E402
from kernels import COLD_BYTES, MOST_COPIES, provider_of, seconds  # noqa: E402, TID251

CASES = "mxfp8_linear/wq_b,mxfp8_linear/wo_b,linear/gate,experts/experts"
SHARED_BYTES = 227 << 10


def candidates(case: KernelCase, n: int) -> list[tuple[Any, ...]]:
    """Tilings worth a trial: for a linear layer with whether parts have programs of their own."""
    few = max(16, min(256, 1 << (n - 1).bit_length()))
    found: list[tuple[Any, ...]] = []
    if case.op == "experts":
        return list(itertools.product((64, 128), (4, 8), (2, 3, 4)))
    rows = sorted({few, max(16, few // 2), *([64, 128, 256] if n >= 256 else [])})
    for outputs, count, step, warps, stages, separate in itertools.product(
        (64, 128), rows, (64, 128), (4, 8), (3, 5), (False, True)
    ):
        weight = 2 if case.op == "linear" or n >= 1024 else 1
        shared = (stages - 1) * step * (weight * outputs + 2 * count)
        accumulators = outputs * count // (32 * warps) * (1 if separate else 2)
        if shared <= SHARED_BYTES and accumulators <= 160 and outputs * count >= 1024 * warps // 4:
            found.append((outputs, count, step, warps, stages, separate))
    return found


def forced(case: KernelCase, choice: tuple[Any, ...]) -> Any:
    """A context in which the provider has this tiling for everything."""
    if case.op == "experts":
        module = importlib.import_module("deepinfer_plugins.kernels.experts.triton")
        outputs, warps, stages = choice
        options = {"OUTPUTS": outputs, "num_warps": warps, "num_stages": stages}
        return mock.patch.object(module, "_LAUNCH", options)
    module = importlib.import_module("deepinfer_plugins.kernels.triton_matmul")
    tile = module.Tiling(*choice[:5])

    def always(*sizes: int) -> tuple[Any, bool]:
        return tile, choice[5] and sizes[-1] > 1

    return mock.patch.multiple(module, tiling=always, described_tiling=always)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--tokens", default="1,16,64,128,512,4096")
    parser.add_argument("--preset", default="release")
    parser.add_argument("--seconds", type=float, default=0.01, help="of measuring a tiling")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    work = [(name, int(n)) for name in arguments.cases.split(",") for n in arguments.tokens.split(",")]
    jobs = [(name, n, choice) for name, n in work for choice in candidates(find(name, arguments.preset), n)]
    compile_ahead(jobs, arguments.preset, forced=forced)
    results = []
    with torch.inference_mode():
        for name, n in work:
            case = find(name, arguments.preset)
            function: Any = provider_of(case.op, "triton")
            copies = max(1, min(MOST_COPIES, COLD_BYTES // case.num_bytes(n)))
            sets = [case.make(n, Draw(device, seed)) for seed in range(copies)]
            calls = [functools.partial(function, **args) for args in sets]
            times = {"now": seconds(calls, device, arguments.seconds)}
            for choice in candidates(case, n):
                with forced(case, choice):
                    try:
                        times[str(choice)] = seconds(calls, device, arguments.seconds)
                    except Exception as error:  # too much shared memory, say: one tiling's affair
                        times[str(choice)] = float("inf")
                        print(f"# {name} {n} {choice}: {error!r}"[:200], file=sys.stderr)
            best = sorted(times, key=lambda choice: times[choice])[:6]
            record = {"case": name, "tokens": n, "now_us": round(times["now"] * 1e6, 2)}
            if case.op != "experts":
                record["rival_us"] = round(
                    seconds([case.rivals[0][1](args) for args in sets], device, arguments.seconds) * 1e6, 2
                )
            record["best_us"] = {choice: round(times[choice] * 1e6, 2) for choice in best}  # type: ignore[assignment]
            results.append(record)
            print(json.dumps(record), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
