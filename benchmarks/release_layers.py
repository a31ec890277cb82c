"""One layer of every kind at the release's shapes, with random weights, on this machine's accelerator.

Prefills a prompt and decodes after it, and checks on the way what must hold at any size: nothing is NaN, a row
has the same bits alone and in a batch, and the logits are those of the whole-model reference. The Engram
tables are small here; ``--engram`` runs one table of the release's own 384 million rows instead.

Usage: python benchmarks/release_layers.py [--prompt 192] [--decode 8] [--experts 384] [--out results.json]
       python benchmarks/release_layers.py --engram [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer_plugins.core.target import Want
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.caches import cache_specs
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.engram import CompressedVocabulary, engram_tables
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.model.oracle import Oracle
from deepinfer_plugins.model.presets import release
from deepinfer_plugins.model.step import NO_TOKEN, Caches, Paged, Step
from deepinfer_plugins.platforms.detect import detect

PAGE = 64


def shapes(experts: int) -> ModelConfig:
    """The release with one layer of every kind and small Engram tables."""
    return replace(
        release(),
        num_hidden_layers=6,
        compress_ratios=(0, 2, 2, 1, 1, 1) + (0,) * 3,
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 4),
        index_k_source_layer_ids=(1, 3),
        candidate_source_layer_id=3,
        n_routed_experts=experts,
        engram_layer_ids=(1,),
        engram_vocab_size=16_000,
        dspark_target_layer_ids=(3, 4, 5),
        max_position_embeddings=65536,
    )


KINDS = {
    0: "sliding window",
    1: "Engram, ratio 2, source",
    2: "ratio 2, consumer",
    3: "ratio 1, source of keys and candidates",
    4: "ratio 1, rescoring within candidates",
    5: "ratio 1, consumer",
}


@torch.no_grad()
def fill(model: DeepseekV41, seed: int) -> None:
    """Random weights whose outputs are of the size of their inputs."""
    for index, (name, target) in enumerate(model.targets()):
        tensor = target.tensor
        generator = torch.Generator(tensor.device).manual_seed(seed * 1_000_003 + index)
        if tensor.dtype is torch.float8_e4m3fn:
            for rows in tensor.split(8192):
                rows.copy_(torch.randn(rows.shape, generator=generator, device=tensor.device))
        elif tensor.dtype is torch.uint8 and name.endswith("scale"):
            # One over the square root of the number of inputs, 32 to a scale; experts' values are twice as large.
            inputs = 32 * tensor.shape[-1]
            tensor.fill_(127 - round(np.log2(inputs) / 2) - (".experts." in name))
        elif tensor.dtype is torch.uint8:
            tensor.random_(0, 256, generator=generator)
        elif "norm" in name or name.endswith(("q_weight", "k_weight")):
            tensor.copy_(1 + 0.1 * torch.randn(tensor.shape, generator=generator, device=tensor.device))
        elif name.endswith(("hc_attn_scale", "hc_ffn_scale")):
            tensor.fill_(0.3)
        elif name.endswith(("base", "bias", "bias_vl", "attn_sink")):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator, device=tensor.device))
        else:
            std = 1.0 if name == "embed.weight" else tensor.shape[-1] ** -0.5
            tensor.copy_(std * torch.randn(tensor.shape, generator=generator, device=tensor.device))
    model.loaded()


def make_caches(config: ModelConfig, pages: int, requests: int, device: torch.device) -> Caches:
    """Caches full of NaN, each request with its own consecutive pages."""
    table = torch.arange(requests * pages, device=device).view(requests, pages)
    kinds: dict[str, dict[int, Paged]] = {
        kind: {} for kind in ("window", "compressed", "index_key", "compressor")
    }
    for spec in cache_specs(config):
        memory = torch.full(
            (requests * pages, PAGE, spec.record_bytes), 0xFF, dtype=torch.uint8, device=device
        )
        kinds[spec.kind][spec.layer] = Paged(memory, table)
    return Caches(**kinds)


def step_of(config: ModelConfig, tokens: torch.Tensor, first: int, count: int, requests: list[int]) -> Step:
    """Rows ``first .. first+count-1`` of some requests; ``tokens`` is ``[num_requests, length]``."""
    rows = tokens[requests, first : first + count]
    size = config.engram_max_ngram_size - 1
    context = torch.full((tokens.shape[0], size), NO_TOKEN, device=tokens.device)
    for distance in range(1, min(size, first) + 1):
        context[:, distance - 1] = tokens[:, first - distance]
    return Step(
        token_ids=rows.flatten(),
        positions=torch.arange(first, first + count, device=tokens.device).repeat(len(requests)),
        request=torch.tensor(requests, device=tokens.device).repeat_interleave(count),
        context_ids=context,
    )


def timed(device: torch.device, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """A result and the seconds it took."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def release_layers(arguments: argparse.Namespace) -> dict[str, Any]:
    chip = detect()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = shapes(arguments.experts)
    vocabulary = CompressedVocabulary(
        np.arange(config.vocab_size, dtype=np.int64) % config.engram_compressed_vocab_size,
        config.engram_compressed_vocab_size,
    )
    ops = load_ops(Want(chip.arch))
    model = DeepseekV41(config, ops, device=device, max_positions=4096, vocabulary=vocabulary)
    fill(model, seed=0)
    requests, length = 4, arguments.prompt + arguments.decode
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 120_000, (requests, length), generator=generator).to(device)
    everyone = list(range(requests))

    caches = make_caches(config, -(-length // PAGE), requests, device)
    layer_seconds = time_layers(model, device)
    hidden, prefill = timed(
        device, lambda: model(step_of(config, tokens, 0, arguments.prompt, everyone), caches)
    )
    together = [hidden.view(requests, arguments.prompt, -1)]
    decode_times = []
    for position in range(arguments.prompt, length):
        step = step_of(config, tokens, position, 1, everyone)
        hidden, seconds = timed(device, lambda step=step: model(step, caches))
        decode_times.append(seconds)
        together.append(hidden.view(requests, 1, -1))
    batch = torch.cat(together, dim=1)
    per_layer = {KINDS[index]: seconds for index, seconds in layer_seconds().items()}

    # The same tokens alone, in one prefill: other chunks, other batch, no decode.
    alone_caches = make_caches(config, -(-length // PAGE), requests, device)
    alone = model(step_of(config, tokens, 0, length, [2]), alone_caches)
    logits = model.logits(alone)
    tensors = {name: target.tensor for name, target in model.targets()}
    want = Oracle(config, tensors, torch.from_numpy(vocabulary.map).to(device)).logits(tokens[2])
    return {
        "what": "one layer of every kind at release shapes",
        "layers": KINDS,
        "experts": arguments.experts,
        "prompt": arguments.prompt,
        "requests": requests,
        "finite": bool(torch.isfinite(batch).all()),
        "same bits alone and in a batch": bool(
            torch.equal(batch[2].view(torch.int16), alone.view(torch.int16))
        ),
        "largest difference from the reference's logits": float((logits - want).abs().max()),
        "largest logit": float(want.abs().max()),
        "greedy tokens equal the reference's": bool(torch.equal(logits.argmax(-1), want.argmax(-1))),
        "prefill_s": prefill,
        "decode_s": min(decode_times),
        "decode_layer_s": per_layer,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "operators": functions(ops),
    }


def functions(ops: Any) -> dict[str, str]:
    """The function behind each operator."""
    return {
        name: f"{getattr(ops, name).__module__}:{getattr(ops, name).__qualname__}" for name in ops.__slots__
    }


def time_layers(model: DeepseekV41, device: torch.device) -> Callable[[], dict[int, float]]:
    """Time every layer from now on; the result gives each layer's shortest attention and feed-forward together."""
    spans: dict[int, list[float]] = {index: [] for index in range(len(model.layers))}

    def watch(index: int, module: torch.nn.Module) -> None:
        def before(*_: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            spans[index].append(-time.perf_counter())

        def after(*_: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            spans[index][-1] += time.perf_counter()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    for index, layer in enumerate(model.layers):
        watch(index, layer.attn)
        watch(index, layer.ffn)
    return lambda: {
        index: min(a + b for a, b in zip(times[::2], times[1::2], strict=True))
        for index, times in spans.items()
    }


def release_engram(arguments: argparse.Namespace) -> dict[str, Any]:
    """One Engram table of the release's own size: hash, gather, and the rows found are the rows meant."""
    chip = detect()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = release()
    layer = config.engram_layer_ids[0]
    table = engram_tables(config, config.engram_compressed_vocab_size)[layer]
    ops = load_ops(Want(chip.arch))
    width = config.engram_head_dim
    values = torch.empty((table.num_rows, width), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.full((table.num_rows, width // 32), 127, dtype=torch.uint8, device=device)
    # Every row holds its own number: five bytes of seven bits, none of them NaN.
    number = torch.arange(table.num_rows, device=device)
    for byte in range(5):
        values.view(torch.uint8)[:, byte] = (
            number >> (7 * byte) & 0x3F | (number >> (7 * byte) & 0x40) << 1
        ).byte()
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(0, config.engram_compressed_vocab_size, (4096, 4), generator=generator).to(device)
    index = ops.engram_hash(
        context,
        torch.tensor(table.multipliers, device=device),
        torch.tensor(table.primes, device=device),
        torch.tensor(table.offsets, device=device),
    )
    ops.engram_gather(values, scales, index[:1])
    (found, _), seconds = timed(device, lambda: ops.engram_gather(values, scales, index))  # type: ignore[arg-type,misc]
    bytes_found = found.view(torch.uint8).view(4096, -1, width).long()
    read = sum(
        ((bytes_found[..., byte] & 0x3F) | (bytes_found[..., byte] >> 1 & 0x40)) << (7 * byte)
        for byte in range(5)
    )
    return {
        "what": "one Engram table of the release's size",
        "rows": table.num_rows,
        "highest_row_read": int(index.max()),
        "rows_right": bool(torch.equal(read, index)),
        "gather_4096_tokens_s": seconds,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--engram", action="store_true")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = release_engram(arguments) if arguments.engram else release_layers(arguments)
    result["chip"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result["versions"] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    result["commit"] = arguments.commit
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
