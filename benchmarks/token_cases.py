"""Cases of ``kernels.py``: tokens from logits.

A rival is what torch makes of it in float32, with noise of its own: a draw from the same distribution, and no draw that
a seed and a position repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import Draw, KernelCase

from deepinfer_plugins.model.config import ModelConfig

TEMPERATURE, MIN_P, TOP_K, TOP_P = 0.7, 0.01, 40, 0.95
_FILTERS = ("min_p", "top_k", "top_p")
_NOISE = ("seed", "position")


def cases(config: ModelConfig) -> list[KernelCase]:
    """Every case at the sizes of ``config``."""
    size = config.vocab_size
    return [_sample("plain", size, False), _sample("filtered", size, True), _filter(size), _accept(size)]


def _parameters(n: int, size: int, draw: Draw, filtered: bool) -> dict[str, Any]:
    def each(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor | None:
        return torch.full((n,), value, dtype=dtype, device=draw.device) if filtered else None

    return {
        "logits": draw.normal(n, size, dtype=torch.float32, scale=3),
        "temperature": torch.full((n,), TEMPERATURE, dtype=torch.float64, device=draw.device),
        "min_p": each(MIN_P),
        "top_k": each(TOP_K, torch.int64),
        "top_p": each(TOP_P),
    }


def _noise(n: int, draw: Draw) -> dict[str, Any]:
    return {name: draw.integers(0, 1 << 20, n) for name in _NOISE}


def _filtered(args: dict[str, Any]) -> torch.Tensor:
    """Probabilities of what the filters keep, by a sort, not normalised."""
    scaled = args["logits"] / TEMPERATURE
    if args["top_k"] is None:
        return scaled.softmax(-1)
    ordered, order = scaled.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    probabilities = probabilities * (probabilities >= MIN_P * probabilities[:, :1])
    probabilities[:, TOP_K:] = 0.0
    through = probabilities.cumsum(-1)
    kept = through - probabilities < TOP_P * through[:, -1:]
    return torch.zeros_like(probabilities).scatter_(1, order, probabilities * kept)


def _sample(name: str, size: int, filtered: bool) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        stream = torch.zeros(n, dtype=torch.int64, device=draw.device)
        return _parameters(n, size, draw, filtered) | _noise(n, draw) | {"stream": stream}

    def rival(args: dict[str, Any]) -> Callable[[], Any]:
        def call() -> torch.Tensor:
            probabilities = _filtered(args)
            return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)

        return call

    return KernelCase(
        "sample",
        name,
        f"1 of {size}",
        make,
        ("logits", "temperature", *_FILTERS, *_NOISE, "stream"),
        num_bytes=lambda n: n * (4 * size + (72 if filtered else 48)),
        num_flops=lambda n: 0,
        rivals=(("torch in float32", rival),),
        most_tokens=4096,
    )


def _filter(size: int) -> KernelCase:
    def rival(args: dict[str, Any]) -> Callable[[], Any]:
        def call() -> torch.Tensor:
            probabilities = _filtered(args)
            return (probabilities / probabilities.sum(-1, keepdim=True)).log()

        return call

    return KernelCase(
        "filter_log_probs",
        "filtered",
        f"{size}",
        lambda n, draw: _parameters(n, size, draw, True),
        ("logits", "temperature", *_FILTERS),
        num_bytes=lambda n: n * (8 * size + 32),
        num_flops=lambda n: 0,
        rivals=(("torch in float32", rival),),
        most_tokens=4096,
    )


def _accept(size: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        args = _parameters(n, size, draw, True) | _noise(n, draw)
        args["draft_token"] = draw.integers(0, size, n)
        args["draft_row"] = torch.arange(n, device=draw.device)
        # One more row than is read.
        drafts = draw.normal(n + 1, size, dtype=torch.float32, scale=3)
        return args | {"draft_log_probs": drafts.log_softmax(-1)}

    return KernelCase(
        "accept_or_resample",
        "filtered",
        f"{size}",
        make,
        ("logits", "temperature", *_FILTERS, *_NOISE, "draft_token", "draft_row"),
        num_bytes=lambda n: n * (8 * size + 81),
        num_flops=lambda n: 0,
        most_tokens=4096,
    )
