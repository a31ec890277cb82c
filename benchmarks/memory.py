"""Memory that operators need beside their arguments and results, at the release's shapes with a large batch.

16,384 tokens in one call; in attention and selection they are one request's, with 1,048,576 entries behind it. What an
operator may need is a constant: tests hold the same bounds without memory, on the meta device
(``tests/kernels/test_triton_dense.py`` and ``test_triton_attention.py``).

Usage: PYTHONPATH=. python benchmarks/memory.py [--ops experts,index_select/all] [--tokens 16384] --out FILE
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))
import attention_cases  # noqa: E402
from compile_ahead import compile_ahead, provider_of  # noqa: E402
from kernel_cases import Draw, KernelCase, all_cases  # noqa: E402

from deepinfer_plugins.model.presets import preset  # noqa: E402

# The program beside this one; its name is also that of a package.
MEASURE = importlib.import_module("kernels")

# MiB beside arguments and results; any other operator has none to speak of.
BOUNDS = {
    "linear": 64,
    "mxfp8_linear": 192,
    "mxfp8_grouped_linear": 192,
    "experts": 1024,
    "sparse_attention": 80,
    "index_select": 160,
    "hc_mix": 64,
}
OTHERS_BOUND = 1


def tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def measure(case: KernelCase, provider: str, n: int, device: torch.device) -> dict[str, Any]:
    """Bytes of arguments and results, and those beside them at the peak of a second call: the first loads kernels."""
    function = provider_of(case.op, provider)
    assert function is not None, f"{case.op} has no provider {provider}"
    args = case.make(n, Draw(device))
    before = allocated(device)
    function(**args)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
    result = function(**args)
    if device.type == "cuda":
        torch.cuda.synchronize()
    of_results = sum(one.nbytes for one in tensors(result if isinstance(result, tuple) else (result,)))
    return {
        "argument_bytes": sum(one.nbytes for one in tensors(args.values())),
        "result_bytes": of_results,
        "workspace_bytes": max(0, peak(device) - before - of_results) if device.type == "cuda" else None,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ops", default="", help="operators or cases (op/name), separated by commas; default: all"
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=1 << 20)
    parser.add_argument("--provider", default="", help="default: what invariant mode chooses here")
    parser.add_argument("--preset", default="release")
    parser.add_argument("--ahead", action="store_true", help="compile in several processes first")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = set(filter(None, arguments.ops.split(",")))
    with mock.patch.multiple(attention_cases, CONTEXT=arguments.context, REQUESTS=1):
        cases = [
            case
            for case in all_cases(preset(arguments.preset))
            if not wanted or case.op in wanted or f"{case.op}/{case.name}" in wanted
        ]
        if not cases:
            parser.error(f"no case is called {arguments.ops}")
        names = MEASURE.chosen_providers({case.op for case in cases}, arguments.provider)
        cases = [case for case in cases if case.op in names]
        if arguments.ahead:
            compile_ahead(
                [(f"{case.op}/{case.name}", 4096, None) for case in cases], arguments.preset, names=names
            )
        report: dict[str, Any] = {
            "what": "memory of operators beside arguments and results",
            "chip": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "versions": MEASURE.versions(),
            "commit": arguments.commit,
            "preset": arguments.preset,
            "tokens": arguments.tokens,
            "context": arguments.context,
            "results": [],
        }
        with torch.inference_mode():
            for case in cases:
                start = time.perf_counter()
                record = {"op": case.op, "name": case.name, "shape": case.shape, "provider": names[case.op]}
                record["bound_bytes"] = BOUNDS.get(case.op, OTHERS_BOUND) << 20
                try:
                    record |= measure(case, names[case.op], arguments.tokens, device)
                except (
                    Exception
                ) as error:  # out of memory, say: this operator's failure, and the others still run
                    record["error"] = f"{error!r}"[:1000]
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                record["bounded"] = (record.get("workspace_bytes") or 0) <= record["bound_bytes"]
                record["seconds"] = round(time.perf_counter() - start, 2)
                report["results"].append(record)
                print(line(record), flush=True)
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return any("error" in record or not record["bounded"] for record in report["results"])


def line(record: dict[str, Any]) -> str:
    """A row of the table: MiB of arguments, results and workspace, and the workspace's bound."""
    head = f"{record['op'] + '/' + record['name']:34} {record['provider']:8}"
    if "error" in record:
        return f"{head} FAILED {record['error'][:200]}"

    def mib(name: str) -> str:
        value = record[name]
        return f"{'-' if value is None else format(value / 2**20, '.1f'):>10}"

    mark = "" if record["bounded"] else "  MORE THAN ITS BOUND"
    columns = ("argument_bytes", "result_bytes", "workspace_bytes", "bound_bytes")
    return " ".join([head, *map(mib, columns)]) + mark


if __name__ == "__main__":
    sys.exit(main())
