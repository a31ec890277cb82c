"""Cases of ``kernels.py``: attention, selection, caches, hyper-connections, Engram.

Up to ``REQUESTS`` tokens are a decode step, one token to a request; more are chunks of that many prompts. Every request
has ``CONTEXT`` entries behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import Draw, KernelCase

from deepinfer_plugins.kernels import formats
from deepinfer_plugins.kernels.cache_layout import (
    compressed_bytes,
    compressor_bytes,
    index_key_bytes,
    window_bytes,
)
from deepinfer_plugins.model.config import ModelConfig

REQUESTS = 64
CONTEXT = 32768
PAGE_SIZE = 64
# Of the table of n-gram embeddings: far more than a cache holds, far less than the release's.
ENGRAM_ROWS = 1 << 20


def cases(config: ModelConfig) -> list[KernelCase]:
    """Every case at the sizes of ``config``."""
    streams, hidden, head_dim = config.hc_mult, config.hidden_size, config.head_dim
    return [
        _attention("window", config, 0),
        _attention("compressed", config, config.index_topk),
        _selection("all", config, False, 0),
        _selection("publish", config, False, config.candidate_topk_blocks),
        _selection("candidates", config, True, 0),
        _hc_merge(streams, hidden),
        _hc_collapse(streams, hidden),
        _hc_mix(config),
        _engram_hash(config),
        _engram_gather(config),
        _engram_gate(streams, hidden),
        _pool_pairs(head_dim),
        _store("store_window", head_dim, window_bytes(head_dim)),
        _store("store_compressed", head_dim, compressed_bytes(head_dim)),
        _store("store_index_key", config.index_head_dim, index_key_bytes(config.index_head_dim)),
        _store_compressor(head_dim),
        _load_compressor(head_dim),
    ]


def _num_requests(n: int) -> int:
    return min(n, REQUESTS)


def _requests(n: int, draw: Draw) -> torch.Tensor:
    return torch.arange(n, device=draw.device) * _num_requests(n) // n


def _positions(n: int, draw: Draw) -> torch.Tensor:
    """The last positions of each request's context, one for each of its rows."""
    request = _requests(n, draw)
    last_row = torch.searchsorted(request, request, right=True) - 1
    return CONTEXT - 1 - (last_row - torch.arange(n, device=draw.device))


def _cache(draw: Draw, encode: Callable[..., torch.Tensor], d: int, requests: int) -> dict[str, torch.Tensor]:
    """Pages, all of them written, and a table of each request's, in no order."""
    per_request = CONTEXT // PAGE_SIZE
    table = torch.randperm(requests * per_request, generator=draw.generator, device=draw.device)
    # A few thousand keys many times over: the kernels do not know, and to encode all of them takes minutes.
    some = encode(draw.normal(4096, d))
    repeated = some.repeat(-(-requests * CONTEXT // 4096), 1)[: requests * CONTEXT]
    pages = repeated.view(requests * per_request, PAGE_SIZE, some.shape[1])
    return {"pages": pages, "table": table.view(requests, per_request).int()}


def _attention(name: str, config: ModelConfig, topk: int) -> KernelCase:
    heads, d, window = config.num_attention_heads, config.head_dim, config.sliding_window

    def make(n: int, draw: Draw) -> dict[str, Any]:
        requests = _num_requests(n)
        recent = _cache(draw, formats.encode_window, d, requests)
        position = _positions(n, draw)
        args: dict[str, Any] = {
            "q": draw.normal(n, heads, d),
            "window_pages": recent["pages"],
            "window_table": recent["table"],
            "compressed_pages": None,
            "compressed_table": None,
            "indices": None,
            "request": _requests(n, draw),
            "window_start": position - (window - 1),
            "window_end": position,
            "sinks": draw.normal(heads, dtype=torch.float32),
            "scale": d**-0.5,
        }
        if topk:
            compressed = _cache(draw, formats.encode_compressed, d, requests)
            args |= {"compressed_pages": compressed["pages"], "compressed_table": compressed["table"]}
            starts = draw.integers(0, CONTEXT // topk, n, topk)
            every = torch.arange(topk, device=draw.device) * (CONTEXT // topk)
            args["indices"] = (starts + every).int()
        return args

    def num_bytes(n: int) -> int:
        recent = min(n * window, _num_requests(n) * (window + n // _num_requests(n))) * window_bytes(d)
        chosen = min(n * topk, _num_requests(n) * CONTEXT) * compressed_bytes(d)
        return recent + chosen + 2 * n * heads * d * 2

    def bound(args: dict[str, Any]) -> Callable[[], Any]:
        """The same products over keys that were gathered and decoded before, by cuBLAS."""
        q = args["q"]
        keys = torch.empty(len(q), window + topk, d, dtype=torch.bfloat16, device=q.device).normal_()
        scale = args["scale"]
        return lambda: torch.bmm(torch.bmm(q, keys.mT).mul_(scale).softmax(-1), keys)

    return KernelCase(
        "sparse_attention",
        name,
        f"{heads} heads, {window} + {topk} keys of {d}, context {CONTEXT}",
        make,
        ("q", "indices", "request", "window_start", "window_end"),
        num_bytes,
        lambda n: 4 * n * heads * (window + topk) * d,
        bounds=(("bmm, softmax, bmm over decoded keys", bound),),
        most_tokens=4096,
    )


def _selection(name: str, config: ModelConfig, use: bool, publish: int) -> KernelCase:
    heads, d, topk = config.index_n_heads, config.index_head_dim, config.index_topk
    block, num_blocks = config.candidate_block_size, config.candidate_topk_blocks
    scored = num_blocks * block if use else CONTEXT

    def make(n: int, draw: Draw) -> dict[str, Any]:
        cache = _cache(draw, formats.encode_index_key, d, _num_requests(n))
        args: dict[str, Any] = {
            "q": draw.normal(n, heads, d),
            "head_weights": draw.normal(n, heads),
            "pages": cache["pages"],
            "table": cache["table"],
            "request": _requests(n, draw),
            "lengths": _positions(n, draw) + 1,
            "topk": topk,
            "candidates": None,
            "publish_blocks": publish,
            "block_size": block,
        }
        if use:
            args["candidates"] = draw.choices(n, num_blocks, CONTEXT // block).sort(1).values.int()
        return args

    def bound(args: dict[str, Any]) -> Callable[[], Any]:
        """The same products over keys that were gathered and decoded before, and torch's selection."""
        q, weights = args["q"], args["head_weights"]
        keys = torch.empty(len(q), scored, d, dtype=torch.bfloat16, device=q.device).normal_()
        return lambda: (
            torch.bmm(weights[:, None], torch.bmm(q, keys.mT).relu_())[:, 0].topk(topk, dim=1).indices
        )

    return KernelCase(
        "index_select",
        name,
        f"{heads} heads, {topk} of {scored} keys of {d}, context {CONTEXT}",
        make,
        ("q", "head_weights", "request", "lengths", "candidates"),
        lambda n: (
            min(n * scored, _num_requests(n) * CONTEXT) * index_key_bytes(d)
            + n * (heads * (d + 1) * 2 + (topk + publish) * 4)
        ),
        lambda n: 2 * n * scored * heads * (d + 1),
        bounds=(("bmm over decoded keys, topk", bound),) if publish == 0 else (),
        # The bound has a decoded copy of every row's keys.
        most_tokens=1024,
    )


def _hc_merge(streams: int, d: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        return {
            "x": draw.normal(n, d),
            "streams": draw.normal(n, streams, d),
            "post": draw.normal(n, streams, dtype=torch.float32),
            "comb": draw.normal(n, streams, streams, dtype=torch.float32),
        }

    def rival(args: dict[str, Any]) -> Callable[[], Any]:
        x, before, post, comb = args.values()
        return lambda: torch.baddbmm(post[:, :, None] * x[:, None], comb.mT, before.float()).bfloat16()

    return KernelCase(
        "hc_merge",
        "hidden",
        f"{streams} x {d}",
        make,
        ("x", "streams", "post", "comb"),
        lambda n: n * (2 * (1 + 2 * streams) * d + 4 * streams * (1 + streams)),
        lambda n: 2 * n * streams * (1 + streams) * d,
        rivals=(("torch in float32", rival),),
    )


def _hc_collapse(streams: int, d: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        return {"streams": draw.normal(n, streams, d), "pre": draw.normal(n, streams, dtype=torch.float32)}

    def rival(args: dict[str, Any]) -> Callable[[], Any]:
        before, pre = args.values()
        return lambda: torch.bmm(pre[:, None], before.float())[:, 0].bfloat16()

    return KernelCase(
        "hc_collapse",
        "hidden",
        f"{streams} x {d}",
        make,
        ("streams", "pre"),
        lambda n: n * (2 * (streams + 1) * d + 4 * streams),
        lambda n: 2 * n * streams * d,
        rivals=(("torch in float32", rival),),
    )


def _hc_mix(config: ModelConfig) -> KernelCase:
    streams, d = config.hc_mult, config.hidden_size
    mixes = streams * (2 + streams)

    def make(n: int, draw: Draw) -> dict[str, Any]:
        return {
            "streams": draw.normal(n, streams, d),
            "fn": draw.normal(mixes, streams * d, dtype=torch.float32, scale=0.01),
            "base": draw.normal(mixes, dtype=torch.float32),
            "scale": draw.normal(3, dtype=torch.float32),
            "norm_eps": config.rms_norm_eps,
            "hc_eps": config.hc_eps,
            "iters": config.hc_sinkhorn_iters,
        }

    def bound(args: dict[str, Any]) -> Callable[[], Any]:
        """The products alone, without what follows them."""
        before, fn = args["streams"].flatten(1), args["fn"].mT.contiguous()
        return lambda: before.float() @ fn

    return KernelCase(
        "hc_mix",
        "hidden",
        f"{mixes} x {streams * d}",
        make,
        ("streams",),
        lambda n: n * (2 * streams * d + 4 * mixes) + 4 * mixes * streams * d,
        lambda n: 2 * n * mixes * streams * d,
        bounds=(("product by cuBLAS in float32", bound),),
    )


def _engram_hash(config: ModelConfig) -> KernelCase:
    ngram, heads = config.engram_max_ngram_size, config.engram_n_heads

    def make(n: int, draw: Draw) -> dict[str, Any]:
        vocabulary = config.engram_compressed_vocab_size
        return {
            "context": draw.integers(0, vocabulary, n, ngram),
            "multipliers": draw.integers(0, (2**63 - 1) // vocabulary // 2, ngram) * 2 + 1,
            "primes": draw.integers(config.engram_vocab_size, 2 * config.engram_vocab_size, ngram - 1, heads),
            "offsets": draw.integers(0, 1 << 30, ngram - 1, heads),
        }

    return KernelCase(
        "engram_hash",
        "tokens",
        f"{heads} heads of {ngram - 1} n-grams",
        make,
        ("context",),
        lambda n: 8 * n * (ngram + (ngram - 1) * heads),
        lambda n: 2 * n * (ngram - 1) * heads,
    )


def _engram_gather(config: ModelConfig) -> KernelCase:
    d, rows = config.engram_head_dim, (config.engram_max_ngram_size - 1) * config.engram_n_heads

    def make(n: int, draw: Draw) -> dict[str, Any]:
        values = draw.integers(0, 120, ENGRAM_ROWS, d, dtype=torch.uint8)
        return {
            "table": values.view(torch.float8_e4m3fn),
            "table_scales": draw.integers(118, 132, ENGRAM_ROWS, d // 32, dtype=torch.uint8),
            "index": draw.integers(0, ENGRAM_ROWS, n, rows),
        }

    def rival(args: dict[str, Any]) -> Callable[[], Any]:
        table, index = args["table"].view(torch.uint8), args["index"].flatten()
        return lambda: (table.index_select(0, index), args["table_scales"].index_select(0, index))

    return KernelCase(
        "engram_gather",
        "rows",
        f"{rows} of {d}",
        make,
        ("index",),
        lambda n: n * rows * (2 * (d + d // 32) + 8),
        lambda n: 1,
        rivals=(("torch.index_select", rival),),
    )


def _engram_gate(streams: int, d: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        return {
            "streams": draw.normal(n, streams, d),
            "keys": draw.normal(n, streams, d),
            "value": draw.normal(n, d),
            "weight": draw.normal(streams, d, dtype=torch.float32),
            "eps": 1e-20,
            "skip": None,
        }

    return KernelCase(
        "engram_gate",
        "hidden",
        f"{streams} x {d}",
        make,
        ("streams", "keys", "value", "skip"),
        lambda n: 2 * n * (3 * streams + 1) * d + 4 * streams * d,
        lambda n: 9 * n * streams * d,
    )


def _pool_pairs(d: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        return {name: draw.normal(n, 2, d, dtype=torch.float32) for name in ("gates", "latents")}

    return KernelCase(
        "pool_pairs",
        "latents",
        f"2 x {d}",
        make,
        ("gates", "latents"),
        lambda n: n * d * 18,
        lambda n: 6 * n * d,
    )


def _slots(draw: Draw, n: int, record_bytes: int) -> dict[str, torch.Tensor]:
    num_pages = 256
    slots = torch.randperm(num_pages * PAGE_SIZE, generator=draw.generator, device=draw.device)[:n]
    return {
        "pages": draw.integers(0, 120, num_pages, PAGE_SIZE, record_bytes, dtype=torch.uint8),
        "slots": slots,
    }


def _store(op: str, d: int, record_bytes: int) -> KernelCase:
    return KernelCase(
        op,
        "keys",
        f"{d} in {record_bytes} bytes",
        lambda n, draw: {"x": draw.normal(n, d), **_slots(draw, n, record_bytes)},
        ("x", "slots"),
        lambda n: n * (2 * d + record_bytes + 8),
        lambda n: 4 * n * d,
        written=("pages",),
    )


def _store_compressor(d: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        rows = {name: draw.normal(n, d, dtype=torch.float32) for name in ("gates", "latents")}
        return rows | _slots(draw, n, compressor_bytes(d))

    return KernelCase(
        "store_compressor",
        "rows",
        f"2 x {d}",
        make,
        ("gates", "latents", "slots"),
        lambda n: n * (2 * compressor_bytes(d) + 8),
        lambda n: 1,
        written=("pages",),
    )


def _load_compressor(d: int) -> KernelCase:
    return KernelCase(
        "load_compressor",
        "rows",
        f"2 x {d}",
        lambda n, draw: _slots(draw, n, compressor_bytes(d)),
        ("slots",),
        lambda n: n * (2 * compressor_bytes(d) + 8),
        lambda n: 1,
    )
