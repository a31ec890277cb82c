"""``hc_merge`` in one pass over the streams, with the definition's bits: the same sums in the same order."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_formats import to_bfloat16

BLOCK = 1024


def hc_merge(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    n, num_streams, d = streams.shape
    merged = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if n:
        _hc_merge[(n, triton.cdiv(d, BLOCK))](
            merged,
            *(part.contiguous() for part in (x, streams, post, comb)),
            d,
            NUM_STREAMS=num_streams,
            STREAMS=triton.next_power_of_2(num_streams),
            BLOCK=BLOCK,
            num_warps=4,
        )
    return merged


@triton.jit
def _hc_merge(
    merged,
    x,
    streams,
    post,
    comb,
    d,
    NUM_STREAMS: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.arange(0, STREAMS)
    in_row, in_streams = column < d, target < NUM_STREAMS
    streams += row * NUM_STREAMS * d
    comb += row * NUM_STREAMS * NUM_STREAMS
    output = tl.load(x + row * d + column, mask=in_row, other=0.0).to(tl.float64)
    share = tl.load(post + row * NUM_STREAMS + target, mask=in_streams, other=0.0).to(tl.float64)
    total = share[:, None] * output[None, :]
    for source in tl.static_range(NUM_STREAMS):
        stream = tl.load(streams + source * d + column, mask=in_row, other=0.0).to(tl.float64)
        share = tl.load(comb + source * NUM_STREAMS + target, mask=in_streams, other=0.0).to(tl.float64)
        total += share[:, None] * stream[None, :]
    place = merged + row * NUM_STREAMS * d + target[:, None] * d + column[None, :]
    tl.store(place, to_bfloat16(total), mask=in_streams[:, None] & in_row[None, :])
