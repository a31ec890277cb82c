"""The model's steps captured in CUDA graphs: the same bits as without, and how long both take.

Decode steps of one row per request, steps that verify drafts, and drafts, of several numbers of requests, with the
shipped checkpoint. Each is captured once and replayed with its own inputs, with others, and with rows of padding;
results and every byte of the caches must be those of the same step without a graph.

Usage: PYTHONPATH=. python benchmarks/graphs.py --out results.json [--kinds decode draft] [--requests 1 8 64]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from deepinfer_plugins.core import shipped
from deepinfer_plugins.core.target import Want
from deepinfer_plugins.features.graphs import Graphs
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.caches import cache_specs
from deepinfer_plugins.model.loading import open_model
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.model.step import NO_POSITION, NO_TOKEN, Caches, Paged, Step
from deepinfer_plugins.platforms.detect import detect

PAGE = 64
# Tokens before a request's step: so many, and up to as many more.
CONTEXT = 150
DEPTH = 5
LENGTH = 2 * CONTEXT + 64

Result = tuple[torch.Tensor, ...]


@dataclass
class Bench:
    """A model, its caches, and what each request has so far."""

    model: DeepseekV41
    caches: Caches
    tokens: torch.Tensor
    lengths: torch.Tensor

    def step(self, requests: int, rows: int, later: int = 0) -> Step:
        """The next rows of the first requests, or those ``later`` tokens further on."""
        device = self.tokens.device
        request = torch.arange(requests, device=device).repeat_interleave(rows)
        first = self.lengths[:requests] + later
        positions = first.repeat_interleave(rows) + torch.arange(rows, device=device).repeat(requests)
        width = self.model.config.engram_max_ngram_size - 1
        before = first[:, None] - 1 - torch.arange(width, device=device)
        context = torch.where(before < 0, NO_TOKEN, self.tokens[:requests].gather(1, before.clamp(min=0)))
        return Step(self.tokens[request, positions], positions, request, context)

    def run(self, kind: str, step: Step) -> Result:
        if kind == "draft":
            drafted = self.model.draft(step, self.caches, DEPTH, lambda logits, _: logits.argmax(-1))
            return drafted.tokens, drafted.logits, drafted.confidence_logits
        hidden = self.model(step, self.caches)
        return hidden, self.model.logits(hidden)

    def memory(self) -> Iterator[torch.Tensor]:
        for field in fields(Caches):
            yield from (cache.pages for cache in getattr(self.caches, field.name).values())


def make(folder: Path, requests: int) -> Bench:
    """Load the model and compute what comes before the steps."""
    chip = detect().chip
    device = torch.device(chip.torch_device)
    model = open_model(folder, load_ops(Want(chip.arch)), device, LENGTH + DEPTH)
    config = model.config
    pages = -(-LENGTH // PAGE)
    table = torch.arange(requests * pages, device=device).view(requests, pages)
    kinds: dict[str, dict[int, Paged]] = {field.name: {} for field in fields(Caches)}
    for spec in cache_specs(config, draft=True):
        shape = (requests * pages, PAGE, spec.record_bytes)
        memory = torch.full(shape, 0xFF, dtype=torch.uint8, device=device)
        kinds[spec.kind][spec.layer] = Paged(memory, table)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, config.vocab_size, (requests, LENGTH), generator=generator).to(device)
    lengths = torch.randint(CONTEXT, 2 * CONTEXT, (requests,), generator=generator).to(device)
    bench = Bench(model, Caches(**kinds), tokens, torch.zeros_like(lengths))
    for first in range(0, LENGTH - 50, 50):
        bench.lengths.fill_(first)
        bench.run("prompt", bench.step(requests, 50))
    bench.lengths = lengths
    return bench


def milliseconds(run: Callable[[], Any], repeat: int) -> float:
    """Median wall time of one call, each waited for."""
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[repeat // 2]


def differing(got: Result, want: Result) -> int:
    """Bytes of the first rows of ``got`` that are not those of ``want``."""
    pairs = [
        (one[: len(other)].contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(got, want, strict=True)
    ]
    return sum(int((one != other).sum()) for one, other in pairs)


def measure(bench: Bench, kind: str, requests: int, repeat: int) -> dict[str, Any]:
    rows = 1 + DEPTH if kind == "verify" else 1
    started = time.monotonic()
    static = bench.step(requests, rows)
    own = replace(static, **{name: getattr(static, name).clone() for name in ("token_ids", "positions")})
    before = [pages.clone() for pages in bench.memory()]

    def restore() -> None:
        for pages, old in zip(bench.memory(), before):
            pages.copy_(old)

    def compare(inputs: Step, eager: Step) -> dict[str, int]:
        """Bytes that differ when ``inputs`` are replayed and ``eager`` is run without a graph."""
        restore()
        want = tuple(each.clone() for each in bench.run(kind, eager))
        after = [pages.clone() for pages in bench.memory()]
        restore()
        for name in ("token_ids", "positions", "request", "context_ids"):
            getattr(static, name).copy_(getattr(inputs, name))
        got = graphs.replay(static.num_rows)
        torch.cuda.synchronize()
        return {
            "results": differing(got, want),
            "caches": sum(int((one != other).sum()) for one, other in zip(bench.memory(), after)),
        }

    graphs = Graphs(lambda _: bench.run(kind, static), [static.num_rows])
    graphs.capture()
    record: dict[str, Any] = {"kind": kind, "requests": requests, "rows": static.num_rows}
    record["first_run_and_capture_s"] = round(time.monotonic() - started, 2)
    record["same"] = compare(own, own)
    record["other"] = compare(later := bench.step(requests, rows, 7), later)
    if requests > 1:
        kept = own.num_rows * 5 // 8
        real = replace(own, **{n: getattr(own, n)[:kept] for n in ("token_ids", "positions", "request")})
        padding = torch.arange(own.num_rows, device=own.positions.device) >= kept
        record["padded"] = compare(
            replace(own, positions=own.positions.masked_fill(padding, NO_POSITION)), real
        )
    restore()
    record["eager_ms"] = round(milliseconds(lambda: bench.run(kind, own), repeat), 3)
    record["graph_ms"] = round(milliseconds(lambda: graphs.replay(static.num_rows), repeat), 3)
    restore()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--kinds", nargs="+", default=["decode", "verify", "draft"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--repeat", type=int, default=21)
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "chip": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "steps": [],
    }
    with torch.inference_mode():
        bench = make(arguments.model or shipped.default_checkpoint(), max(arguments.requests))
        for requests in arguments.requests:
            for kind in arguments.kinds:
                record["steps"].append(measure(bench, kind, requests, arguments.repeat))
                print(json.dumps(record["steps"][-1]), flush=True)
                arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    different = [
        step
        for step in record["steps"]
        for way in ("same", "other", "padded")
        if any(step.get(way, {}).values())
    ]
    if different:
        raise SystemExit(f"{len(different)} comparisons found other bits with a graph than without")


if __name__ == "__main__":
    main()
