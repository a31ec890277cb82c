"""The cost curve of our model on this machine's accelerator: the time of a decode step by its rows.

One layer of every kind at the release's shapes, with random weights, as in ``release_layers.py``; no
engine, no graphs. Up to 512 requests of some hundred tokens each, one row for each; larger steps have several rows of
each, as when drafts are verified. ``schedule_sweep.py --curve NAME=FILE`` reads the result.

Usage: python benchmarks/cost_curve.py --out curve.json [--sizes 1 8 64 512] [--experts 384]
       python benchmarks/cost_curve.py --shape small --out curve.json     the small checkpoint's shapes, whole
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from release_layers import PAGE, fill, make_caches, shapes, step_of, timed

from deepinfer_plugins.core.target import Want
from deepinfer_plugins.features.cost_curve import CostCurve, measure
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model import presets
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.platforms.detect import detect

REQUESTS = 512
SIZES = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 3072)


def curve(arguments: argparse.Namespace) -> CostCurve:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = shapes(arguments.experts) if arguments.shape == "release" else presets.preset(arguments.shape)
    vocabulary = CompressedVocabulary(
        np.arange(config.vocab_size, dtype=np.int64) % config.engram_compressed_vocab_size,
        config.engram_compressed_vocab_size,
    )
    length = arguments.context + max(arguments.sizes) // REQUESTS + 1
    model = DeepseekV41(
        config, load_ops(Want(detect().arch)), device=device, max_positions=4096, vocabulary=vocabulary
    )
    fill(model, seed=0)
    requests = min(REQUESTS, max(arguments.sizes))
    caches = make_caches(config, -(-length // PAGE), requests, device)
    for kind in (caches.window, caches.compressed, caches.index_key, caches.compressor):
        for paged in kind.values():
            paged.pages.zero_()  # keys of zero in place of a prompt: they take as long to read
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, config.vocab_size - 100, (requests, length), generator=generator).to(device)

    def run(rows: int) -> float:
        each = max(1, rows // requests)
        step = step_of(config, tokens, arguments.context, each, list(range(min(rows, requests))))
        _, seconds = timed(device, lambda: model.logits(model(step, caches)))
        print(f"{rows} rows: {1000 * seconds:.2f} ms", flush=True)
        return 1000 * seconds

    facts = {
        "what": f"a decode step of {config.num_hidden_layers} layers, {arguments.shape} shapes, without an engine",
        "context": arguments.context,
        "experts": config.n_routed_experts,
        "chip": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "commit": arguments.commit,
    }
    with torch.inference_mode():
        return measure(run, arguments.sizes, padded=False, **facts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["release", "small", "tiny"], default="release")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    curve(arguments).save(arguments.out)


if __name__ == "__main__":
    main()
