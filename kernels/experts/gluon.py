"""``experts`` on an SM90: two grouped products that decode a weight's words in registers, and kernels around them.

The rows of an expert are decoded side by side, in blocks, in the order of columns of ``_source``; the products take
them from there (``gluon_words.py``); between these a kernel of its own computes the SwiGLU and casts. Decoded operands
are bfloat16, which holds e2m1 and e4m3 times a power of two exactly. Sums are in float32 and run from the first step of
128 columns to the last, whatever block a row is in and however many there are: a row's bits are its own. They are
not the Triton provider's, which multiplies the columns of a step in another order.

What is decoded exactly is what the Triton provider decodes so: scales of weights from 2^-86 to 2^41 and scales of rows
up to 2^78. A scale of 255 gives NaN, a greater one infinity or NaN; of a smaller one of a weight bfloat16 keeps what
it can.

Weights of other widths than multiples of 128, or not contiguous and aligned to 16 bytes, are for the Triton provider,
which is called instead. That depends on the weights alone, so it is the same for every row of every batch.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from deepinfer_plugins.kernels.experts import triton as by_triton
from deepinfer_plugins.kernels.gluon_words import (
    WORDS,
    blocks_of,
    fetch,
    new_barriers,
    stores_layout,
    sums_layout,
    twice_power,
    wait_for,
    words_layout,
)
from deepinfer_plugins.kernels.mxfp8_cast.triton import quantise_mxfp8
from deepinfer_plugins.kernels.swiglu_and_cast.triton import swiglu
from deepinfer_plugins.kernels.triton_formats import decode_e4m3, decode_ue8m0, to_bfloat16

# Rows at a time: what bounds the workspace.
_AT_ONCE = 4096

# Columns of a step: those of 16 words.
_STEP = 128

# Outputs of a program, its warps and its stages, by the rows of a block. No bit of the result depends on them. Measured
# on an H200: the best of some for 16 and 64 rows, near it for the others. All keep sums and weights in registers.
_TILES = {16: (128, 4, 4), 32: (128, 4, 4), 64: (128, 4, 3), 128: (128, 8, 4)}

# Rows are multiplied by it and weights divided, so that a weight's factor is a bfloat16: see the Triton provider.
SHIFT = by_triton.SHIFT


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
    stored = (w13, w13_scales, w2, w2_scales)
    if not _fits(*stored):
        return by_triton.experts(values, scales, ids, weights, *stored, first_expert, limit)
    n, topk = ids.shape
    out = torch.empty(n, topk, values.shape[1], dtype=torch.bfloat16, device=values.device)
    for start in range(0, n, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        rows = (tensor[part].contiguous() for tensor in (values.view(torch.uint8), scales, ids, weights))
        _experts(out[part], *rows, *stored, first_expert, limit)
    return out


def _fits(*stored: torch.Tensor) -> bool:
    """Whether rows of both weights are whole steps, and the chip's copying unit can read them."""
    w13, _, w2, _ = stored
    return (w13.shape[2] * 2) % _STEP == (w2.shape[2] * 2) % _STEP == 0 and all(
        tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in stored
    )


def _experts(out, values, scales, ids, weights, w13, w13_scales, w2, w2_scales, first_expert, limit) -> None:
    n, topk = ids.shape
    num_experts, k, d = w2.shape[0], w2.shape[1], w2.shape[2] * 2
    device = out.device
    rows, pairs, owners = by_triton.place_pairs(ids, num_experts, first_expert)
    slots = pairs.shape[0]
    x = torch.empty(slots, k, dtype=torch.bfloat16, device=device)
    _gather[(slots,)](x, values, scales, pairs, owners, topk, K=k, ROWS=rows, BLOCK=1024)
    gate_up = torch.empty(slots, 2 * d, dtype=torch.bfloat16, device=device)
    _multiply(gate_up, x, w13, w13_scales, pairs, owners, rows, scatter=False)
    del x
    hidden = torch.empty(slots, d, dtype=torch.bfloat16, device=device)
    groups = 16
    _swiglu[(slots, triton.cdiv(d, 32 * groups))](
        hidden, gate_up, weights, pairs, owners, D=d, LIMIT=float(limit), ROWS=rows, GROUPS=groups
    )
    del gate_up
    _multiply(out.view(n * topk, k), hidden, w2, w2_scales, pairs, owners, rows, scatter=True)
    by_triton._clear[(n * topk,)](out, ids, k, first_expert, num_experts, BLOCK=1024)


def _multiply(out, x, weight, scales, pairs, owners, rows, scatter) -> None:
    """Blocks of ``rows`` rows of ``x`` times the weights of their experts."""
    num_experts, m, width = weight.shape
    outputs, warps, stages = _TILES[rows]
    words = weight.view(torch.int32).view(num_experts * m, width // 4)
    _grouped[(triton.cdiv(m, outputs), owners.shape[0])](
        out,
        blocks_of(x, rows, _STEP),
        blocks_of(words, outputs, WORDS),
        scales.view(torch.int32),
        pairs,
        owners,
        m,
        K=2 * width,
        SCATTER=scatter,
        OUTPUTS=outputs,
        ROWS=rows,
        STAGES=stages,
        num_warps=warps,
    )


@triton.jit
def _source(column):
    """The column that is multiplied at place ``column``: of every 32, in the order in which words are decoded."""
    return column // 32 * 32 + column % 8 // 2 * 8 + column % 32 // 16 * 2 + column % 16 // 8 + column % 2 * 4


@triton.jit
def _gather(
    out, values, scales, pairs, owners, topk, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Decode the row of a slot, times ``SHIFT``, in the order of ``_source``; zeros where a block has no more rows."""
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(owners + slot // ROWS) < 0:
        return
    pair = tl.load(pairs + slot)
    row = (tl.maximum(pair, 0) // topk).to(tl.int64)
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)
        codes = tl.load(values + row * K + _source(column), mask=(column < K) & (pair >= 0), other=0)
        group = start // 32 + tl.arange(0, BLOCK // 32)
        powers = tl.load(scales + row * (K // 32) + group, mask=(group * 32 < K) & (pair >= 0), other=0)
        wide = tl.reshape(decode_e4m3(codes), (BLOCK // 32, 32)) * (decode_ue8m0(powers) * SHIFT)[:, None]
        tl.store(out + slot * K + column, to_bfloat16(tl.reshape(wide, (BLOCK,))), mask=column < K)


@triton.jit
def _swiglu(
    hidden,
    gate_up,
    weights,
    pairs,
    owners,
    D: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """``cast(swiglu(gate, up) * weight)`` of a slot, decoded, times ``SHIFT``, in the order of ``_source``.

    The cast is by groups of 32, within which the order exchanges columns, so it sees the same numbers.
    """
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(owners + slot // ROWS) < 0:
        return
    pair = tl.load(pairs + slot)
    if pair < 0:
        return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    source = gate_up + slot * 2 * D + _source(place)
    present = (group * 32 < D)[:, None]
    gate = tl.load(source, mask=present, other=0.0).to(tl.float32)
    up = tl.load(source + D, mask=present, other=0.0).to(tl.float32)
    inner = swiglu(gate, up, LIMIT) * tl.load(weights + pair).to(tl.float64)
    codes, powers = quantise_mxfp8(inner.to(tl.float32))
    numbers = decode_e4m3(codes.to(tl.uint8)) * (decode_ue8m0(powers) * SHIFT)[:, None]
    tl.store(hidden + slot * D + place, to_bfloat16(numbers), mask=present)


@gluon.jit
def _decode_words(words, factor, OUTPUTS: gl.constexpr, LEFT: gl.constexpr):
    """The left operand, bfloat16 ``[OUTPUTS, 64]``, of words of eight e2m1 codes, times ``2^-126`` times a factor.

    A code's bits in their places of a bfloat16 are the number times 2^-126: the bias of e2m1 is 1, bfloat16's 127.
    Codes four apart lie 16 bits apart: a mask takes both, a multiplication puts their signs and the rest in place.

    Args:
        words: int32 ``[OUTPUTS, 8]``, in the registers of ``words_layout``.
        factor: Of ``twice_power``, the shape of ``words``.
        OUTPUTS: Rows of the weight.
        LEFT: Registers of the result: those in which the codes are.
    """
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        """{
            .reg .b32 s, t;
            and.b32 t, $8, 0x000F000F;
            mul.lo.u32 t, t, 0x1040;
            and.b32 t, t, 0x81C081C0;
            mul.rn.bf16x2 t, t, $9;
            mov.b32 {$0, $1}, t;
            and.b32 t, $8, 0x00F000F0;
            mul.lo.u32 t, t, 0x104;
            and.b32 t, t, 0x81C081C0;
            mul.rn.bf16x2 t, t, $9;
            mov.b32 {$2, $3}, t;
            shr.u32 s, $8, 8;
            and.b32 t, s, 0x000F000F;
            mul.lo.u32 t, t, 0x1040;
            and.b32 t, t, 0x81C081C0;
            mul.rn.bf16x2 t, t, $9;
            mov.b32 {$4, $5}, t;
            shr.u32 t, $8, 6;
            and.b32 t, t, 0x01C001C0;
            lop3.b32 t, $8, 0x80008000, t, 0xEA;
            mul.rn.bf16x2 t, t, $9;
            mov.b32 {$6, $7}, t;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, factor],
        dtype=(
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )
    # Codes 0 and 4 of a word, 1 and 5, 2 and 6, 3 and 7: the two pairs of one product of 16 columns, then of the next.
    low = gl.join(gl.join(a, e), gl.join(c, g))
    high = gl.join(gl.join(b, f), gl.join(d, h))
    numbers = gl.reshape(gl.join(low, high), [OUTPUTS, 2, 4, 2, 2, 2])
    numbers = gl.permute(numbers, [0, 1, 3, 4, 2, 5])
    return gl.convert_layout(gl.reshape(numbers, [OUTPUTS, 64]), LEFT, assert_trivial=True)


@gluon.jit
def _grouped(
    out,
    x,
    weight,
    scales,
    pairs,
    owners,
    m,
    K: gl.constexpr,
    SCATTER: gl.constexpr,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Rows of a block times ``OUTPUTS`` outputs of its expert, bfloat16.

    Args:
        out: ``[slots, m]``, or, if ``SCATTER``, ``[pairs, m]``. What belongs to no pair is not written.
        x: Descriptor of ``[slots, K]``, decoded.
        weight: Descriptor of the words, ``[num_experts * m, K / 8]``.
        scales: Words of four UE8M0 bytes, ``[num_experts * m, K / 128]``.
        pairs: Of the slots, -1 for none.
        owners: Experts of the blocks, -1 for none.
        m: Outputs of an expert, a multiple of ``OUTPUTS``.
        K: Columns, a multiple of 128.
        SCATTER: Whether results go to where their pairs are, not to their slots.
        OUTPUTS: 64 or 128, at least 16 a warp.
        ROWS: Of a block.
        STAGES: Steps that are there or on their way.
        num_warps: 4 or 8.
    """
    block = gl.program_id(1)
    expert = gl.load(owners + block)
    if expert < 0:
        return
    first_output = gl.program_id(0) * OUTPUTS
    weight_row = expert * m + first_output

    SUMS: gl.constexpr = sums_layout(ROWS, num_warps)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    LAYOUT: gl.constexpr = words_layout(OUTPUTS, num_warps)
    HALF: gl.constexpr = words_layout(OUTPUTS, num_warps, 8)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, OUTPUTS, 16], weight.layout)
    columns = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 128], x.layout)
    barriers = new_barriers(STAGES)
    # Known to the compiler, which otherwise waits for every product since there might be none.
    STEPS: gl.constexpr = K // 128
    row = block * ROWS
    for i in gl.static_range(STAGES - 1):
        fetch(weight, weight_row, i * 16, words, x, row, i * 128, columns, barriers, i, i < STEPS, STAGES)

    output = gl.arange(0, OUTPUTS, gl.SliceLayout(1, HALF))
    scale_place = scales + (weight_row + output).to(gl.int64) * STEPS
    scale = gl.load(scale_place)
    shift = gl.arange(0, 8, gl.SliceLayout(0, HALF)) // 4 * 8
    sums = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    for step in range(0, STEPS):
        # Of the next step; past the end the last is read again.
        scale_place += gl.where(step + 1 < STEPS, 1, 0)
        next_scale = gl.load(scale_place)
        wait_for(barriers, step, STAGES)
        stage = step % STAGES
        both = gl.reshape(words.index(stage).load(LAYOUT), [OUTPUTS, 2, 8])
        halves = gl.split(gl.permute(both, [0, 2, 1]))
        # The matrix unit reads its left operand from registers until it is waited for, and nothing keeps a loop from
        # writing the next one there: so a step has two operands, and each is written when the one before it is done.
        for half in gl.static_range(2):
            # 2^(power - 127) * 2^126 / SHIFT.
            factor = twice_power((scale[:, None] >> (shift + 16 * half)[None, :]) & 0xFF, 86)
            of_half = gl.convert_layout(halves[half], HALF, assert_trivial=True)
            left = _decode_words(of_half, factor, OUTPUTS, LEFT)
            right = columns.index(stage).slice(64 * half, 64, dim=1).permute((1, 0))
            sums = warpgroup_mma(left, right, sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            if half == 0:
                # The step before is done: its stage is free.
                ahead = step + STAGES - 1
                fetch(
                    weight, weight_row, ahead * 16, words,
                    x, row, ahead * 128, columns,
                    barriers, ahead, ahead < STEPS, STAGES,
                )  # fmt: skip
        scale = next_scale
    sums = warpgroup_mma_wait(0, deps=[sums])

    STORES: gl.constexpr = stores_layout(OUTPUTS, num_warps, 16)
    result = gl.convert_layout(sums.to(gl.bfloat16), STORES)
    slot = row + gl.arange(0, ROWS, gl.SliceLayout(0, STORES))
    pair = gl.load(pairs + slot)
    target = (pair if SCATTER else slot).to(gl.int64)
    output = first_output + gl.arange(0, OUTPUTS, gl.SliceLayout(1, STORES))
    gl.store(out + target[None, :] * m + output[:, None], result, mask=(pair >= 0)[None, :])
