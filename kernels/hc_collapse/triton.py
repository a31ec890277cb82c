"""``hc_collapse`` in one pass over the streams, with the definition's bits: the same sums in the same order."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_formats import to_bfloat16

BLOCK = 1024


def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    n, num_streams, d = streams.shape
    collapsed = torch.empty(n, d, dtype=torch.bfloat16, device=streams.device)
    if n:
        _hc_collapse[(n, triton.cdiv(d, BLOCK))](
            collapsed,
            streams.contiguous(),
            pre.contiguous(),
            d,
            NUM_STREAMS=num_streams,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return collapsed


@triton.jit
def _hc_collapse(collapsed, streams, pre, d, NUM_STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < d
    streams += row * NUM_STREAMS * d
    total = tl.zeros((BLOCK,), tl.float64)
    for source in tl.static_range(NUM_STREAMS):
        stream = tl.load(streams + source * d + column, mask=in_row, other=0.0).to(tl.float64)
        total += tl.load(pre + row * NUM_STREAMS + source).to(tl.float64) * stream
    tl.store(collapsed + row * d + column, to_bfloat16(total), mask=in_row)
