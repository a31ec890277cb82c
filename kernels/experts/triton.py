"""``experts``: rows grouped by expert in blocks, then two products, with sums in float32.

Decoded operands are bfloat16, which holds e2m1 and e4m3 times a power of two exactly. A byte of a weight has two
columns: the even ones of a step are multiplied first, then the odd ones, and rows have their even columns in front.
A row's sums run from the first step to the last whatever block it is in, so its bits are its own; the weighted,
clamped SwiGLU and its cast to MXFP8 are done where the first product ends.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.mxfp8_cast.triton import quantise_mxfp8
from deepinfer_plugins.kernels.swiglu_and_cast.triton import swiglu
from deepinfer_plugins.kernels.triton_formats import (
    INTERPRETED,
    decode_e4m3,
    decode_ue8m0,
    dot,
    to_bfloat16,
)

# Rows at a time: what bounds the workspace.
_AT_ONCE = 8192

# Bytes of a weight's row in a step: two columns each. It sets the order of sums, so it is one for blocks of any size.
_STEP = 64

# Rows are multiplied by it and weights divided, so that a weight's factor, 2^126 included, is a bfloat16 for every
# scale up to 2^41. No value that a checkpoint has comes near what then overflows.
SHIFT = tl.constexpr(2.0**40)

# Pairs of row and place that are looked at together.
_PAIRS = 2048


def experts(
    values: torch.Tensor,
    scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scales: torch.Tensor,
    w2: torch.Tensor,
    w2_scales: torch.Tensor,
    first_expert: int,
    limit: float,
) -> torch.Tensor:
    """As the reference, but for the precision of sums."""
    n, topk = ids.shape
    out = torch.empty(n, topk, values.shape[1], dtype=torch.bfloat16, device=values.device)
    for start in range(0, n, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        rows = (tensor[part].contiguous() for tensor in (values.view(torch.uint8), scales, ids, weights))
        _experts(out[part], *rows, w13, w13_scales, w2, w2_scales, first_expert, limit)
    return out


def block_size(num_pairs: int, num_experts: int) -> int:
    """Rows of a block: about as many as an expert gets. Changes no bit of the result."""
    mean = triton.cdiv(num_pairs, num_experts)
    return min(max(triton.next_power_of_2(mean), 16), 128)


# The fastest for blocks of every size, of those that `benchmarks/tilings.py` tries, on an H200.
_LAUNCH = {"OUTPUTS": 64, "num_warps": 4, "num_stages": 3}


def place_pairs(
    ids: torch.Tensor, num_experts: int, first_expert: int
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Blocks of slots, each for pairs of one expert.

    Args:
        ids: ``[n, topk]``, int64, contiguous; not empty. Pair ``i`` is ``ids.flatten()[i]``.
        num_experts: That live here.
        first_expert: Id of the first of them.

    Returns:
        Slots of a block; the pair of each slot, int32, -1 for none; and the expert of each block, counted from
        ``first_expert``, int32, -1 for none. What the slots of a block without an expert hold is not defined.
    """
    num_pairs, device = ids.numel(), ids.device
    rows = block_size(num_pairs, num_experts)
    # Every expert that has a pair may leave all but one slot of its last block empty.
    num_blocks = (num_pairs + (rows - 1) * min(num_pairs, num_experts)) // rows
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    owners = torch.empty(num_blocks, dtype=torch.int32, device=device)
    pairs = torch.empty(num_blocks * rows, dtype=torch.int32, device=device)
    block = min(_PAIRS, triton.next_power_of_2(num_pairs))
    _count[(num_experts,)](counts, ids, num_pairs, first_expert, BLOCK=block)
    _place[(num_experts,)](
        pairs,
        owners,
        counts,
        ids,
        num_pairs,
        num_experts,
        num_blocks,
        first_expert,
        ROWS=rows,
        BLOCK=block,
        EXPERTS=triton.next_power_of_2(num_experts),
    )
    return rows, pairs, owners


def _experts(out, values, scales, ids, weights, w13, w13_scales, w2, w2_scales, first_expert, limit) -> None:
    n, topk = ids.shape
    num_experts, k, d = w2.shape[0], w2.shape[1], w2.shape[2] * 2
    rows, pairs, owners = place_pairs(ids, num_experts, first_expert)
    num_blocks, device = len(owners), out.device
    x = torch.empty(n, k, dtype=torch.bfloat16, device=device)
    size = n * k // 32
    _decode_halves[(triton.cdiv(size, 64),)](x, values, scales, size, k, BLOCK=64)
    hidden = torch.empty(num_blocks * rows, d, dtype=torch.bfloat16, device=device)
    launch = {"ROWS": rows, "STEP": _STEP, **_LAUNCH}
    outputs, step = launch["OUTPUTS"], launch["STEP"]
    _gate_up[(triton.cdiv(d, outputs), num_blocks)](
        hidden,
        x,
        weights,
        *_words(w13, w13_scales, k, step),
        pairs,
        owners,
        k,
        d,
        topk,
        LIMIT=float(limit),
        WHOLE=k % (2 * step) == 0,
        **launch,
    )
    _down[(triton.cdiv(k, outputs), num_blocks)](
        out, hidden, *_words(w2, w2_scales, d, step), pairs, owners, k, d, WHOLE=d % (2 * step) == 0, **launch
    )
    _clear[(n * topk,)](out, ids, k, first_expert, num_experts, BLOCK=1024)


def _words(weight, scales, width, step):
    """A weight and its scales, in words of four if a row has whole steps."""
    weight, scales = weight.contiguous(), scales.contiguous()
    return weight, scales.view(torch.int32) if width % (2 * step) == 0 else scales


@triton.jit(do_not_specialize=["num_pairs"])
def _count(counts, ids, num_pairs, first_expert, BLOCK: tl.constexpr):
    """Pairs of each expert."""
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        local = tl.load(ids + pair, mask=pair < num_pairs, other=-1) - first_expert
        found += ((local == expert) & (pair < num_pairs)).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place(
    pairs,
    owners,
    counts,
    ids,
    num_pairs,
    num_experts,
    num_blocks,
    first_expert,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Fill the blocks of an expert with its pairs, in order; -1 where a block has none, or a slot."""
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS)
    needed = (tl.load(counts + other, mask=other < num_experts, other=0) + (ROWS - 1)) // ROWS
    first = tl.sum(tl.where(other < expert, needed, 0), axis=0)
    own = tl.sum(tl.where(other == expert, needed, 0), axis=0)
    for start in range(0, own, 64):
        block = start + tl.arange(0, 64)
        tl.store(owners + first + block, tl.zeros((64,), tl.int32) + expert, mask=block < own)
    if expert == 0:
        for start in range(tl.sum(needed, axis=0), num_blocks, 64):
            block = start + tl.arange(0, 64)
            tl.store(owners + block, tl.full((64,), -1, tl.int32), mask=block < num_blocks)
    before = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        local = tl.load(ids + pair, mask=pair < num_pairs, other=-1) - first_expert
        mine = ((local == expert) & (pair < num_pairs)).to(tl.int32)
        slot = first * ROWS + before + tl.cumsum(mine, axis=0) - mine
        tl.store(pairs + slot, pair, mask=mine > 0)
        before += tl.sum(mine, axis=0)
    rest = before + tl.arange(0, ROWS)
    tl.store(pairs + first * ROWS + rest, tl.full((ROWS,), -1, tl.int32), mask=rest < own * ROWS)


@triton.jit(do_not_specialize=["size"])
def _decode_halves(out, values, scales, size, k, BLOCK: tl.constexpr):
    """Decode ``size`` groups of 32 of MXFP8 rows of ``k``, times ``SHIFT``; a row's even columns come first."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    present = group < size
    lane = tl.arange(0, 32)[None, :]
    codes = tl.load(values + group * 32 + lane, mask=present, other=0)
    wide = decode_e4m3(codes) * decode_ue8m0(tl.load(scales + group, mask=present, other=0))
    row = group // (k // 32)
    place = row * k + (group % (k // 32)) * 16 + lane // 2 + lane % 2 * (k // 2)
    tl.store(out + place, to_bfloat16(wide * SHIFT), mask=present)


@triton.jit
def _scale_e2m1(codes, factor):
    """Bfloat16 numbers of the e2m1 codes in the low and in the high halves of bytes, times ``2^-126 * factor``.

    A code's bits in their places of a bfloat16 are the number times 2^-126: the bias of e2m1 is 1, bfloat16's 127. On a
    chip this is two instructions a number, of two at a time; written in Triton it would be five, and the weight's
    decoding, not the memory, would set the pace.
    """
    if INTERPRETED:
        low, high = codes.to(tl.int32) & 15, codes.to(tl.int32) >> 4
        wide = factor.to(tl.float32)
        even = ((low & 7) << 22 | (low & 8) << 28).to(tl.float32, bitcast=True) * wide
        odd = ((high & 7) << 22 | (high & 8) << 28).to(tl.float32, bitcast=True) * wide
        return to_bfloat16(even), to_bfloat16(odd)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t;
            prmt.b32 a, $4, 0, 0x1404;
            prmt.b32 b, $4, 0, 0x3424;
            shl.b32 s, a, 4;
            shr.u32 t, a, 2;
            and.b32 t, t, 0x01C001C0;
            lop3.b32 t, s, 0x80008000, t, 0xEA;
            mul.rn.bf16x2 $0, t, $5;
            shl.b32 s, b, 4;
            shr.u32 t, b, 2;
            and.b32 t, t, 0x01C001C0;
            lop3.b32 t, s, 0x80008000, t, 0xEA;
            mul.rn.bf16x2 $1, t, $6;
            shr.u32 t, a, 6;
            and.b32 t, t, 0x01C001C0;
            lop3.b32 t, a, 0x80008000, t, 0xEA;
            mul.rn.bf16x2 $2, t, $5;
            shr.u32 t, b, 6;
            and.b32 t, t, 0x01C001C0;
            lop3.b32 t, b, 0x80008000, t, 0xEA;
            mul.rn.bf16x2 $3, t, $6;
            }""",
            "=r,=r,=r,=r,r,r,r",
            [codes, factor],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _load_mxfp4(weight, scales, start, width, WHOLE: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr):
    """Even and odd columns, bfloat16 ``[OUTPUTS, STEP]`` each, of MXFP4 rows from byte ``start`` on, over ``SHIFT``.

    Args:
        weight: Pointers to the rows, ``[OUTPUTS, 1]``.
        scales: Pointers to the rows' scales, ``[OUTPUTS, 1]``; if ``WHOLE``, to words of four.
        start: A multiple of ``STEP``.
        width: Bytes of a row.
        WHOLE: Whether ``width`` is a multiple of ``STEP``.
        OUTPUTS: Rows.
        STEP: Bytes, a power of two of at least 64.
    """
    byte = start + tl.arange(0, STEP)[None, :]
    if WHOLE:
        codes = tl.load(weight + byte)
        words = tl.load(scales + (start // 64 + tl.arange(0, STEP // 64))[None, :])
        shifts = (tl.arange(0, 4) * 8)[None, None, :]
        powers = tl.reshape(words[:, :, None] >> shifts & 0xFF, (OUTPUTS, STEP // 16))
    else:
        codes = tl.load(weight + byte, mask=byte < width, other=0)
        group = start // 16 + tl.arange(0, STEP // 16)[None, :]
        powers = tl.load(scales + group, mask=group * 16 < width, other=0).to(tl.int32)
    # 2^(power - 127) * 2^126 / SHIFT. Where that exceeds bfloat16, infinity.
    exponent = tl.where(powers == 255, 0x7FC0, tl.minimum(powers + 86, 255) << 7)
    factor = tl.broadcast_to(exponent[:, :, None], (OUTPUTS, STEP // 16, 16))
    factor = tl.reshape(factor, (OUTPUTS, STEP)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return _scale_e2m1(codes, factor)


@triton.jit
def _load_half(x, start, half, WHOLE: tl.constexpr, STEP: tl.constexpr):
    column = start + tl.arange(0, STEP)[None, :]
    if WHOLE:
        return tl.load(x + column)
    else:
        return tl.load(x + column, mask=column < half, other=0.0)


@triton.jit
def _gate_up(
    hidden,
    x,
    weights,
    w13,
    w13_scales,
    pairs,
    owners,
    k,
    d,
    topk,
    LIMIT: tl.constexpr,
    WHOLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """``cast(swiglu(w13 x) * weight) * SHIFT``, bfloat16, even columns first, for a block of one expert's rows."""
    expert = tl.load(owners + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    slot = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # Empty slots compute with the first row, and nobody reads their result.
    pair = tl.maximum(tl.load(pairs + slot), 0)
    half = k // 2
    gate_row = expert * 2 * d + tl.minimum(output, d - 1)
    scale_stride = k // (128 if WHOLE else 32)
    gate_weight = w13 + gate_row[:, None] * half
    gate_scales = w13_scales + gate_row[:, None] * scale_stride
    up_weight = gate_weight + d.to(tl.int64) * half
    up_scales = gate_scales + d * scale_stride
    x += (pair // topk).to(tl.int64)[:, None] * k

    gate = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, half, STEP):
        x_even = tl.trans(_load_half(x, start, half, WHOLE, STEP))
        x_odd = tl.trans(_load_half(x + half, start, half, WHOLE, STEP))
        gate_even, gate_odd = _load_mxfp4(gate_weight, gate_scales, start, half, WHOLE, OUTPUTS, STEP)
        gate = dot(gate_even, x_even, gate)
        gate = dot(gate_odd, x_odd, gate)
        up_even, up_odd = _load_mxfp4(up_weight, up_scales, start, half, WHOLE, OUTPUTS, STEP)
        up = dot(up_even, x_even, up)
        up = dot(up_odd, x_odd, up)
    inner = swiglu(to_bfloat16(gate).to(tl.float32), to_bfloat16(up).to(tl.float32), LIMIT)
    inner = inner * tl.load(weights + pair).to(tl.float64)[None, :]
    by_group = tl.reshape(tl.trans(inner.to(tl.float32)), (ROWS * OUTPUTS // 32, 32))
    codes, powers = quantise_mxfp8(by_group)
    values = decode_e4m3(codes.to(tl.uint8)) * decode_ue8m0(powers)[:, None] * SHIFT
    place = hidden + slot[:, None] * d + (output // 2 + output % 2 * (d // 2))[None, :]
    tl.store(place, to_bfloat16(tl.reshape(values, (ROWS, OUTPUTS))), mask=(output < d)[None, :])


@triton.jit
def _down(
    out,
    hidden,
    w2,
    w2_scales,
    pairs,
    owners,
    k,
    d,
    WHOLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """``w2`` times the rows of a block, written to where their pairs are."""
    expert = tl.load(owners + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    slot = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pairs + slot)
    half = d // 2
    weight_row = expert * k + tl.minimum(output, k - 1)
    weight = w2 + weight_row[:, None] * half
    scales = w2_scales + weight_row[:, None] * (d // (128 if WHOLE else 32))
    hidden += slot[:, None] * d

    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, half, STEP):
        even, odd = _load_mxfp4(weight, scales, start, half, WHOLE, OUTPUTS, STEP)
        total = dot(even, tl.trans(_load_half(hidden, start, half, WHOLE, STEP)), total)
        total = dot(odd, tl.trans(_load_half(hidden + half, start, half, WHOLE, STEP)), total)
    place = out + pair.to(tl.int64)[None, :] * k + output[:, None]
    tl.store(place, to_bfloat16(total), mask=(output < k)[:, None] & (pair >= 0)[None, :])


@triton.jit
def _clear(out, ids, k, first_expert, num_experts, BLOCK: tl.constexpr):
    """Zeros for a pair whose expert does not live here."""
    pair = tl.program_id(0).to(tl.int64)
    local = tl.load(ids + pair) - first_expert
    if (local >= 0) & (local < num_experts):
        return
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(out + pair * k + column, tl.zeros((BLOCK,), tl.bfloat16), mask=column < k)
