"""``hc_mix`` in two steps: products with the weight, split over the width; then the mixes of each row.

The streams are bfloat16, which TF32 holds exactly, and the weight is split in two TF32 numbers, so a product is off
by ``2^-22``. The width is cut in ``SPLIT`` columns to a program, whatever the number of rows is, and the parts are
added in their order. Workspace: ``num_mixes + 1`` numbers per row and part. What follows ``z`` is in float64, as in
the definition.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_formats import dot

# Rows of a product, columns of one step of it, columns of a part.
ROWS = 64
BLOCK = 64
SPLIT = 640
# Rows whose mixes a program works out.
MIX_ROWS = 4


def hc_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference, but for sums in float32 before ``z`` is rounded."""
    n, num_streams, d = streams.shape
    width, num_mixes = num_streams * d, len(base)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=streams.device)

    pre, post, comb = empty(n, num_streams), empty(n, num_streams), empty(n, num_streams, num_streams)
    if not n:
        return pre, post, comb
    num_parts = triton.cdiv(width, SPLIT)
    products = empty(num_parts, n, num_mixes)
    squares = empty(num_parts, n)
    _products[(triton.cdiv(n, ROWS), num_parts)](
        products,
        squares,
        streams.contiguous(),
        fn.contiguous(),
        n,
        width,
        NUM_MIXES=num_mixes,
        MIXES=max(triton.next_power_of_2(num_mixes), 16),
        ROWS=ROWS,
        BLOCK=BLOCK,
        SPLIT=SPLIT,
        num_warps=4,
    )
    _mixes[(triton.cdiv(n, MIX_ROWS),)](
        pre,
        post,
        comb,
        products,
        squares,
        base.contiguous(),
        scale.contiguous(),
        n,
        width,
        iters,
        NORM_EPS=norm_eps,
        HC_EPS=hc_eps,
        NUM_PARTS=num_parts,
        NUM_STREAMS=num_streams,
        STREAMS=triton.next_power_of_2(num_streams),
        ROWS=MIX_ROWS,
        num_warps=1,
    )
    return pre, post, comb


@triton.jit(do_not_specialize=["n"])
def _products(
    products,
    squares,
    streams,
    fn,
    n,
    width,
    NUM_MIXES: tl.constexpr,
    MIXES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One part of the products ``[num_parts, n, NUM_MIXES]`` and of the sums of squares ``[num_parts, n]``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1).to(tl.int64)
    mix = tl.arange(0, MIXES)
    in_rows, in_mixes = row < n, mix < NUM_MIXES
    total = tl.zeros((ROWS, MIXES), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for start in range(0, SPLIT, BLOCK):
        column = part * SPLIT + start + tl.arange(0, BLOCK)
        in_width = column < width
        x = tl.load(
            streams + row[:, None] * width + column[None, :],
            mask=in_rows[:, None] & in_width[None, :],
            other=0.0,
        ).to(tl.float32)
        weight = tl.load(
            fn + mix[:, None] * width + column[None, :],
            mask=in_mixes[:, None] & in_width[None, :],
            other=0.0,
        )
        total = dot(x, tl.trans(weight), total, "tf32x3")
        square += tl.sum(x * x, axis=1)
    place = (part * n + row)[:, None] * NUM_MIXES + mix[None, :]
    tl.store(products + place, total, mask=in_rows[:, None] & in_mixes[None, :])
    tl.store(squares + part * n + row, square, mask=in_rows)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["n", "iters"])
def _mixes(
    pre,
    post,
    comb,
    products,
    squares,
    base,
    scale,
    n,
    width,
    iters,
    NORM_EPS: tl.constexpr,
    HC_EPS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_STREAMS: tl.constexpr,
    STREAMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    stream = tl.arange(0, STREAMS)
    in_rows, in_streams = row < n, stream < NUM_STREAMS
    vector = in_rows[:, None] & in_streams[None, :]
    matrix = vector[:, :, None] & in_streams[None, None, :]
    num_mixes: tl.constexpr = NUM_STREAMS * (2 + NUM_STREAMS)
    pair = 2 * NUM_STREAMS + stream[:, None] * NUM_STREAMS + stream[None, :]

    square = tl.zeros((ROWS,), tl.float64)
    z_pre = tl.zeros((ROWS, STREAMS), tl.float64)
    z_post = tl.zeros((ROWS, STREAMS), tl.float64)
    z_comb = tl.zeros((ROWS, STREAMS, STREAMS), tl.float64)
    for part in range(NUM_PARTS):
        square += tl.load(squares + part * n + row, mask=in_rows, other=0.0).to(tl.float64)
        place = products + (part * n + row) * num_mixes
        z_pre += tl.load(place[:, None] + stream[None, :], mask=vector, other=0.0).to(tl.float64)
        z_post += tl.load(place[:, None] + NUM_STREAMS + stream[None, :], mask=vector, other=0.0).to(
            tl.float64
        )
        z_comb += tl.load(place[:, None, None] + pair[None, :, :], mask=matrix, other=0.0).to(tl.float64)
    norm = 1.0 / tl.sqrt(square / width + NORM_EPS)
    z_pre = (z_pre * norm[:, None]).to(tl.float32).to(tl.float64)
    z_post = (z_post * norm[:, None]).to(tl.float32).to(tl.float64)
    z_comb = (z_comb * norm[:, None, None]).to(tl.float32).to(tl.float64)

    base_pre = tl.load(base + stream, mask=in_streams, other=0.0).to(tl.float64)
    base_post = tl.load(base + NUM_STREAMS + stream, mask=in_streams, other=0.0).to(tl.float64)
    is_pair = in_streams[:, None] & in_streams[None, :]
    base_comb = tl.load(base + pair, mask=is_pair, other=0.0).to(tl.float64)
    gate = _sigmoid(z_pre * tl.load(scale).to(tl.float64) + base_pre[None, :]) + HC_EPS
    tl.store(pre + row[:, None] * NUM_STREAMS + stream[None, :], gate.to(tl.float32), mask=vector)
    gate = 2.0 * _sigmoid(z_post * tl.load(scale + 1).to(tl.float64) + base_post[None, :])
    tl.store(post + row[:, None] * NUM_STREAMS + stream[None, :], gate.to(tl.float32), mask=vector)

    logits = z_comb * tl.load(scale + 2).to(tl.float64) + base_comb[None, :, :]
    # What pads the streams weighs nothing, in sums of rows and of columns.
    logits = tl.where(is_pair[None, :, :], logits, -float("inf"))
    top = tl.max(logits, axis=2)
    top = tl.where(in_streams[None, :], top, 0.0)
    mixes = tl.exp(logits - top[:, :, None])
    mixes = mixes / tl.where(in_streams[None, :], tl.sum(mixes, axis=2), 1.0)[:, :, None]
    mixes = tl.where(is_pair[None, :, :], mixes + HC_EPS, 0.0)
    mixes = mixes / (tl.sum(mixes, axis=1) + HC_EPS)[:, None, :]
    for _ in range(iters - 1):
        mixes = mixes / (tl.sum(mixes, axis=2) + HC_EPS)[:, :, None]
        mixes = mixes / (tl.sum(mixes, axis=1) + HC_EPS)[:, None, :]
    place = comb + row[:, None, None] * (NUM_STREAMS * NUM_STREAMS) + (pair - 2 * NUM_STREAMS)[None, :, :]
    tl.store(place, mixes.to(tl.float32), mask=matrix)
