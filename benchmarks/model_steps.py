"""CPU time and number of torch calls of the model's steps, without an engine.

Decode steps of 1, 8 and 32 requests after 100 tokens each, and a prefill of 256, of a whole model of a preset's shapes
with random weights. The calls don't depend on who else uses the machine; the times do, so they are minima.

Usage: OMP_NUM_THREADS=1 python benchmarks/model_steps.py [--shape small] [--repeat 10] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from release_layers import PAGE, fill, make_caches, step_of
from torch.profiler import ProfilerActivity, profile

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.model.presets import preset

CONTEXT = 100
BATCHES = (1, 8, 32)
PREFILL = 256


def measure(run: Callable[[], torch.Tensor], repeat: int) -> dict[str, float]:
    """Milliseconds of CPU, and calls of torch operators that are not made by another operator."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    calls = sum(event.name.startswith("aten::") and event.cpu_parent is None for event in recorded.events())
    times = []
    for _ in range(repeat):
        start = time.process_time()
        run()
        times.append(1000 * (time.process_time() - start))
    return {"cpu_ms": min(times), "torch_calls": calls}


@torch.inference_mode()
def measure_all(model: DeepseekV41, repeat: int) -> dict[str, dict[str, float]]:
    config, device = model.config, torch.device("cpu")
    tokens = torch.randint(3, 1000, (max(BATCHES), PREFILL), generator=torch.Generator().manual_seed(1))
    results = {}
    for batch in BATCHES:
        caches = make_caches(config, -(-(CONTEXT + 1) // PAGE), batch, device)
        requests = list(range(batch))
        model(step_of(config, tokens[:batch], 0, CONTEXT, requests), caches)
        step = step_of(config, tokens[:batch], CONTEXT, 1, requests)
        results[f"decode {batch}"] = measure(lambda: model.logits(model(step, caches)), repeat)  # noqa: B023
    caches = make_caches(config, PREFILL // PAGE, 1, device)
    step = step_of(config, tokens[:1], 0, PREFILL, [0])
    results[f"prefill {PREFILL}"] = measure(lambda: model(step, caches), max(1, repeat // 3))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["small", "tiny"], default="small")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = preset(arguments.shape)
    size = config.engram_compressed_vocab_size
    model = DeepseekV41(
        config,
        load_ops(Want(Arch.CPU)),
        device=torch.device("cpu"),
        max_positions=1024,
        vocabulary=CompressedVocabulary(np.arange(config.vocab_size, dtype=np.int64) % size, size),
    )
    fill(model, seed=0)
    record: dict[str, Any] = {
        "shape": arguments.shape,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__},
        "commit": arguments.commit,
        "steps": measure_all(model, arguments.repeat),
    }
    print(json.dumps(record, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
