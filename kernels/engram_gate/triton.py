"""``engram_gate``: one stream of one row to a program, in float64 as in the definition.

Sums run over ``BLOCK`` columns side by side, whatever the number of rows is, and then over those.
Constants are compiled in: as an argument a Python number would be rounded to float32.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_formats import to_bfloat16

BLOCK = 512


def engram_gate(
    streams: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference."""
    n, num_streams, d = streams.shape
    updated = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if n:
        _engram_gate[(n, num_streams)](
            updated,
            *(part.contiguous() for part in (streams, keys, value, weight)),
            None if skip is None else skip.contiguous().view(torch.uint8),
            d,
            num_streams,
            EPS=eps,
            FACTOR=d**-0.5,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return updated


@triton.jit
def _engram_gate(
    updated,
    streams,
    keys,
    value,
    weight,
    skip,
    d,
    num_streams,
    EPS: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = (row * num_streams + stream) * d
    x_square = tl.zeros((BLOCK,), tl.float64)
    k_square = tl.zeros((BLOCK,), tl.float64)
    agreement = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        in_row = column < d
        x = tl.load(streams + first + column, mask=in_row, other=0.0).to(tl.float64)
        k = tl.load(keys + first + column, mask=in_row, other=0.0).to(tl.float64)
        w = tl.load(weight + stream * d + column, mask=in_row, other=0.0).to(tl.float64)
        x_square += x * x
        k_square += k * k
        agreement += x * w * k
    x_mean = tl.sum(x_square, axis=0) / d + EPS
    k_mean = tl.sum(k_square, axis=0) / d + EPS
    a = tl.sum(agreement, axis=0) * (1.0 / tl.sqrt(x_mean)) * (1.0 / tl.sqrt(k_mean)) * FACTOR
    root = tl.sqrt(tl.maximum(tl.abs(a), tl.full((), 1e-6, tl.float64)))
    root = tl.where(a > 0.0, root, tl.where(a < 0.0, -root, 0.0))
    gate = 1.0 / (1.0 + tl.exp(-root))
    if skip is not None:
        # A value that is not finite must not enter a row that is left alone.
        kept = tl.load(skip + row) != 0
    for start in range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        in_row = column < d
        x = tl.load(streams + first + column, mask=in_row, other=0.0).to(tl.float64)
        v = tl.load(value + row * d + column, mask=in_row, other=0.0).to(tl.float64)
        changed = x + gate * v
        if skip is not None:
            changed = tl.where(kept, x, changed)
        tl.store(updated + first + column, to_bfloat16(changed), mask=in_row)
