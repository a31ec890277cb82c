"""Every operator at the release's shapes: time, bytes and operations per second, and a rival in the same run.

A call is captured in a CUDA graph several times over, each time with arguments of its own, until these no longer
fit the second-level cache: so weights are read from memory, as in a model, and the host's time is left out. The
ceilings are what a copy and a large bf16 matrix product by cuBLAS reach in the same run.

Without ``--provider`` an operator's provider is the one that batch-invariant mode chooses on this chip, as the
environment's ``DEEPINFER_PLUGINS_*`` ask for it; each result names it. Rivals compute what the operator computes;
bounds do less, like multiplying what was decoded before (``KernelCase``). The table has the fastest of each.

Usage: python benchmarks/kernels.py [--ops linear,mxfp8_linear] [--tokens 1,128] [--provider triton] [--out FILE]
       python benchmarks/kernels.py --rows [--ops ...] [--out FILE]

``--rows`` measures nothing: it checks that a row has the same bits alone, in batches of 2, 7, 64, 1000 and 4096,
and at other places of the batch, and how far the results are from the operator's definition.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from compile_ahead import compile_ahead, provider_of  # noqa: E402
from kernel_cases import Draw, KernelCase, Rival, all_cases  # noqa: E402

from deepinfer_plugins.core.target import Want  # noqa: E402
from deepinfer_plugins.kernels.registry import choose  # noqa: E402
from deepinfer_plugins.model.presets import preset  # noqa: E402
from deepinfer_plugins.platforms.detect import detect  # noqa: E402

TOKENS = [2**power for power in range(14)]
# Several times the second-level cache of any chip that we know.
COLD_BYTES = 1 << 28
MOST_COPIES = 24
SIZES = (1, 2, 7, 64, 1000, 4096)


def seconds(calls: list[Callable[[], Any]], device: torch.device, budget_s: float = 0.05) -> float:
    """The shortest mean time of a call over several runs through all of them."""
    for call in calls:
        call()
    if device.type != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    spent = 0.0
    while len(times) < 3 or (spent < budget_s and len(times) < 20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
        spent += times[-1]
    return min(times[1:]) / len(calls)


def versions() -> dict[str, str | None]:
    """Of what the operators are built with, as far as it is there."""
    try:
        triton_version = importlib.import_module("triton").__version__
    except ModuleNotFoundError:
        triton_version = None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton_version}


def ceilings(device: torch.device) -> dict[str, float]:
    """Bytes per second of a copy, counting what is read and what is written, and operations of cuBLAS in bf16.

    A copy is made by the driver, and by a kernel that computes something of what it moves; the faster one counts.
    """
    size, side = (1 << 27, 8192) if device.type == "cuda" else (1 << 19, 256)
    source = torch.zeros(size, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    copies: list[Callable[[], Any]] = [
        lambda: target.copy_(source),
        lambda: torch.bitwise_not(source, out=target),
    ]
    copy = min(seconds([call], device) for call in copies)
    a, b = (Draw(device, seed).normal(side, side) for seed in range(2))
    moved = 2 * source.nbytes
    return {"bytes_per_s": moved / copy, "flops_per_s": 2 * side**3 / seconds([lambda: a @ b], device)}


def chosen_providers(ops: set[str], asked: str) -> dict[str, str]:
    """Names of the operators' providers.

    Args:
        ops: The operators.
        asked: A provider; operators without one of this name are left out. Empty: what invariant mode chooses here.
    """
    if asked:
        return {op: asked for op in ops if provider_of(op, asked)}
    want = Want(detect().arch)
    return {op: choose(op, want).provider.name for op in ops}


def argument_sets(case: KernelCase, n: int, device: torch.device) -> list[dict[str, Any]]:
    """Arguments for ``n`` tokens, so many times over that the second-level cache does not hold them all."""
    copies = max(1, min(MOST_COPIES, COLD_BYTES // case.num_bytes(n))) if device.type == "cuda" else 1
    return [case.make(n, Draw(device, seed)) for seed in range(copies)]


def measure_others(
    others: Sequence[Rival], sets: list[dict[str, Any]], spent: float, device: torch.device
) -> list[dict[str, Any]]:
    """A record of each: its time, and how many times ``spent`` that is, or why it could not run."""
    records: list[dict[str, Any]] = []
    for name, prepare in others:
        record: dict[str, Any] = {"rival": name}
        try:
            record["rival_seconds"] = seconds([prepare(args) for args in sets], device)
            record["rival_over_ours"] = record["rival_seconds"] / spent
        except Exception as error:
            # A rival that this torch, this chip or this environment lacks costs its figure, not the run.
            record["rival_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        records.append(record)
    return records


def measure(
    case: KernelCase,
    tokens: list[int],
    provider: str,
    with_rival: bool,
    top: dict[str, float],
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """A record for each number of tokens."""
    function = provider_of(case.op, provider)
    for n in tokens:
        if function is None or n > case.most_tokens:
            continue
        sets = argument_sets(case, n, device)
        spent = seconds([lambda args=args: function(**args) for args in sets], device)  # type: ignore[misc]
        record: dict[str, Any] = {
            "op": case.op,
            "name": case.name,
            "shape": case.shape,
            "tokens": n,
            "provider": provider,
            "seconds": spent,
            "bytes_per_s": case.num_bytes(n) / spent,
            "of_copy": case.num_bytes(n) / spent / top["bytes_per_s"],
            "flops_per_s": case.num_flops(n) / spent,
            "of_matmul": case.num_flops(n) / spent / top["flops_per_s"],
        }
        if with_rival:
            record["rivals"] = measure_others(case.rivals, sets, spent, device)
            record["bounds"] = measure_others(case.bounds, sets, spent, device)
        yield record


def fastest(others: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The record of the rival that took the least time, if any could run."""
    able = [other for other in others if "rival_seconds" in other]
    return min(able, key=lambda other: other["rival_seconds"], default=None)


def results(case: KernelCase, function: Callable[..., Any], args: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What the operator returns, or the records that it writes."""
    args = args | {name: args[name].clone() for name in case.written}
    result = function(**args)
    if case.written:
        return tuple(args[name].flatten(0, 1)[args["slots"]] for name in case.written)
    return result if isinstance(result, tuple) else (result,)


def check(case: KernelCase, provider: str, device: torch.device) -> dict[str, Any]:
    """Whether a row's bits are its own, and the distance from the definition."""
    function = provider_of(case.op, provider)
    assert function is not None, f"{case.op} has no provider {provider}"
    most = min(max(SIZES), case.most_tokens)
    args = case.make(most, Draw(device))

    def call(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        some = {
            name: value[rows] if name in case.rows and value is not None else value
            for name, value in args.items()
        }
        return results(case, function, some)

    order = torch.arange(most, device=device)
    together = call(order)
    shifted = torch.Generator().manual_seed(1)
    compared, wrong = 0, []
    for size in SIZES:
        if size > most:
            continue
        # Every row once for the larger sizes; for the smaller, rows from all over the batch.
        starts = (
            range(0, most, size)
            if size >= 64
            else torch.randint(0, most - size, (64,), generator=shifted).tolist()
        )
        batches = [order[start : start + size] for start in starts]
        batches += [order.roll(int(by))[:size] for by in torch.randint(1, most, (8,), generator=shifted)]
        batches.append(torch.randperm(most, generator=shifted)[:size].to(device))
        for rows in batches:
            compared += len(rows)
            for got, want in zip(call(rows), together, strict=True):
                found, expected = (
                    one.contiguous().view(torch.uint8).reshape(len(rows), -1) for one in (got, want[rows])
                )
                differ = found != expected
                if bool(differ.any()):
                    wrong.append({"size": len(rows), "rows": int(differ.any(1).sum())})
    record: dict[str, Any] = {
        "op": case.op,
        "name": case.name,
        "shape": case.shape,
        "provider": provider,
        "rows_compared": compared,
        "same_bits": not wrong,
        "batches_that_differ": len(wrong),
        "examples": wrong[:4],
        "without_nan": not any(bool(result.float().isnan().any()) for result in together),
    }
    reference = getattr(importlib.import_module(f"deepinfer_plugins.kernels.{case.op}.reference"), case.op)
    few = 4
    some = {
        name: value[:few] if name in case.rows and value is not None else value
        for name, value in args.items()
    }
    want = results(case, reference, some)
    errors = []
    for got, exact in zip(together, want, strict=True):
        got, exact = got[:few].double(), exact.double()
        if not exact.numel():
            continue
        # What both bar is minus infinity, and no difference.
        off = torch.where(got == exact, 0.0, (got - exact).abs())
        largest = exact.nan_to_num(posinf=0.0, neginf=0.0).abs().max()
        errors.append(float(off.max() / largest.clamp(min=1e-30)))
    return record | {"error_over_largest": errors}


def print_table(records: list[dict[str, Any]]) -> None:
    lines = [
        ["op", "name", "shape", "tokens", "provider", "us", "TB/s", "of copy", "TFLOP/s", "of matmul"]
        + ["rival/ours", "bound/ours", "fastest rival"]
    ]
    for record in records:
        rival, bound = (fastest(record.get(others, [])) for others in ("rivals", "bounds"))
        lines.append(
            [
                record["op"],
                record["name"],
                record["shape"],
                str(record["tokens"]),
                record["provider"],
                f"{record['seconds'] * 1e6:.1f}",
                f"{record['bytes_per_s'] / 1e12:.2f}",
                f"{record['of_copy']:.2f}",
                f"{record['flops_per_s'] / 1e12:.1f}",
                f"{record['of_matmul']:.2f}",
                *("-" if other is None else f"{other['rival_over_ours']:.2f}" for other in (rival, bound)),
                "-" if rival is None else rival["rival"],
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ops", default="", help="operators or cases (op/name), separated by commas; default: all"
    )
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--provider", default="", help="default: what invariant mode chooses here")
    parser.add_argument("--preset", default="release")
    parser.add_argument("--rows", action="store_true", help="check bits instead of measuring time")
    parser.add_argument("--no-rival", action="store_true")
    parser.add_argument("--ahead", action="store_true", help="compile in several processes first")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = set(filter(None, arguments.ops.split(",")))
    chosen = [
        case
        for case in all_cases(preset(arguments.preset))
        if not wanted or case.op in wanted or f"{case.op}/{case.name}" in wanted
    ]
    if not chosen:
        parser.error(f"no case is called {arguments.ops}")
    tokens = [int(n) for n in arguments.tokens.split(",")]
    names = chosen_providers({case.op for case in chosen}, arguments.provider)
    chosen = [case for case in chosen if case.op in names]
    report: dict[str, Any] = {
        "what": "bits of rows" if arguments.rows else "time of operators",
        "preset": arguments.preset,
        "providers": names,
        "chip": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": versions(),
        "commit": arguments.commit,
    }
    if arguments.ahead:
        sizes = SIZES if arguments.rows else tokens
        jobs = [
            (f"{case.op}/{case.name}", n, None) for case in chosen for n in sizes if n <= case.most_tokens
        ]
        compile_ahead(jobs, arguments.preset, names=names)
    top = {} if arguments.rows else ceilings(device)
    report |= {"ceilings": top, "results": [], "failed": []}
    with torch.inference_mode():
        for case in chosen:
            start = time.perf_counter()
            try:
                if arguments.rows:
                    checked = check(case, names[case.op], device)
                    report["results"].append(checked)
                    print(json.dumps(checked), flush=True)
                else:
                    report["results"] += measure(
                        case, tokens, names[case.op], not arguments.no_rival, top, device
                    )
            except Exception as error:  # one operator's failure is reported, and the others still run
                traceback.print_exc()
                report["failed"].append({"op": case.op, "name": case.name, "error": f"{error!r}"[:2000]})
            print(
                f"# {case.op}/{case.name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True
            )
            if arguments.out:
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if not arguments.rows:
        print(json.dumps(top))
        print_table(report["results"])
    for failure in report["failed"]:
        print(f"FAILED {failure['op']}/{failure['name']}: {failure['error']}")
    return bool(report["failed"]) or any(not result.get("same_bits", True) for result in report["results"])


if __name__ == "__main__":
    sys.exit(main())
