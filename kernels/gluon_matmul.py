"""Products of MXFP8 rows with an MXFP8 weight in Gluon, for SM90: what the ``gluon`` providers share.

The bits are those of ``triton_matmul.py``: exact products, sums in float32 in steps of the matrix unit from the start
of a part of the row to its end, and then the parts one after the other. What differs is how the weight gets there:
as words of four e4m3 bytes, some steps ahead, which are decoded in registers, in the layout in which the matrix unit
wants its left operand (``gluon_words.py``), the next step while this one is multiplied. Triton decodes into one layout
and passes the numbers through shared memory to the other, which costs more than the product itself.

A word holds what the matrix unit wants of a thread if the columns of every 16 are taken in the order ``COLUMNS``, in
the weight by reading it so and in the rows by decoding them so. The unit adds up 16 columns at once, and the order
within them is not part of the sum.

Scales are folded in as powers of two: rows are multiplied by 2^40 and weights divided by it, so that a weight's
factor, 2^120 to put e4m3 bits right included, is a bfloat16. Exact for scales of weights from 2^-71 to 2^47 and for
scales of rows up to 2^78, a thousand million times beyond what either is in a model. A scale that is NaN gives NaN;
a weight's code that is NaN (0x7F, 0xFF), which no checkpoint has, reads as 480.
"""

# mypy: ignore-errors

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer_plugins.kernels import triton_matmul
from deepinfer_plugins.kernels.gluon_words import (
    WORDS,
    blocks_of,
    fetch,
    load_block,
    new_barriers,
    stores_layout,
    sums_layout,
    twice_power,
    wait_for,
    words_layout,
)
from deepinfer_plugins.kernels.triton_formats import decode_e4m3, decode_ue8m0, to_bfloat16

# Words and columns of a step.
_WORDS = tl.constexpr(WORDS)
_STEP = tl.constexpr(4 * WORDS)

# What column of every 16 stands at each place of the operands.
COLUMNS = (0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)

_SHIFT = tl.constexpr(2.0**40)

# Programs that run at a time where one, two or three fit a multiprocessor. Constants, not the chip's own.
_WAVE, _PAIRS, _TRIPLES = 132, 264, 396
# So many numbers are decoded by less than a program for each multiprocessor.
_QUICK = 1 << 17


class Tiling(NamedTuple):
    """How a product is cut into programs. None of it changes a bit of the result."""

    outputs: int
    rows: int
    num_warps: int
    num_stages: int


_FEW = {16: Tiling(64, 16, 4, 5), 32: Tiling(64, 32, 4, 6), 64: Tiling(64, 64, 4, 6)}
_SOME = Tiling(64, 128, 4, 4)
_SOME_TALL = Tiling(128, 128, 4, 4)
# One sum fits the registers of this tile; two, that of a part and that of those before it, do not.
_MANY = Tiling(128, 256, 8, 4)


def tiling(n: int, m: int, groups: int, splits: int) -> tuple[Tiling, bool]:
    """The tiling for ``n`` rows and ``m`` outputs in each group, and whether each part gets its own program.

    From what was measured on an H200 (``benchmarks/README.md``): up to 128 rows what counts is that all multiprocessors
    have a share of the weight; then, that a tile of rows is not read by too many programs.
    """

    def programs(tile: Tiling) -> int:
        return groups * triton.cdiv(m, tile.outputs) * triton.cdiv(n, tile.rows)

    if n <= 64:
        tile = _FEW[max(16, triton.next_power_of_2(n))]
        if programs(tile) >= 2 * _PAIRS:
            tile = tile._replace(num_stages=min(tile.num_stages, 4 if tile.rows == 64 else 5))
        return tile, splits > 1 and programs(tile) < _PAIRS
    if splits == 1:
        if n > 256 or (n > 128 and programs(_MANY) >= _WAVE):
            return _MANY, False
        return (_SOME_TALL if n <= 128 and programs(_SOME_TALL) >= _WAVE else _SOME), False
    if n <= 256:
        separate = programs(_SOME) < _PAIRS
        # With four stages two programs fit a multiprocessor, with three stages three.
        one_wave = _PAIRS < programs(_SOME) * (splits if separate else 1) <= _TRIPLES
        return (_SOME._replace(num_stages=3) if one_wave else _SOME), separate
    # Sums of parts are a workspace, of 64 MiB at most.
    return (_MANY, True) if n <= 512 and programs(_MANY) <= 128 else (_SOME, False)


def can_serve(weight: torch.Tensor, weight_scales: torch.Tensor, groups: int) -> bool:
    """Whether this weight, whatever the number of rows, lies so that the kernels here can read it."""
    m, k = weight.shape[0] // groups, weight.shape[1]
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    aligned = aligned and weight_scales.is_contiguous() and weight_scales.data_ptr() % 4 == 0
    return m > 0 and k > 0 and k % (128 * triton_matmul.num_splits(k, m)) == 0 and aligned


def mxfp8_matmul(
    values: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    out: torch.Tensor,
    groups: int = 1,
) -> None:
    """As :func:`triton_matmul.mxfp8_matmul`, with its bits; a weight that is not ``can_serve`` is left to it.

    Workspace: bfloat16 rows, at most 128 MiB, and the sums of parts where these are programs of their own.
    """
    if not can_serve(weight, weight_scales, groups):
        triton_matmul.mxfp8_matmul(values, scales, weight, weight_scales, out, groups)
        return
    n, width = values.shape
    values, weight = values.view(torch.uint8), weight.view(torch.uint8)
    at_once = max(1, triton_matmul._ROW_ELEMENTS // width)
    for start in range(0, n, at_once):
        rows = slice(start, start + at_once)
        _multiply(values[rows], scales[rows], weight, weight_scales, out[rows], groups)


def decode_rows(values: torch.Tensor, scales: torch.Tensor, overlap: bool = False) -> torch.Tensor:
    """Bfloat16 ``[n, d]`` of e4m3 bytes ``values [n, d]``, times 2^40, columns in the order ``COLUMNS``.

    With ``overlap`` a kernel that waits for this one may start before it ends.
    """
    n, d = values.shape
    out = torch.empty(n, d, dtype=torch.bfloat16, device=values.device)
    rows, columns = (2, 512) if n <= 64 else (8, 512)
    _decode_rows[(triton.cdiv(n, rows), triton.cdiv(d, columns))](
        out, values, scales, n, d, values.stride(0), scales.stride(0), rows, columns, overlap
    )
    return out


def _multiply(values, scales, weight, weight_scales, out, groups) -> None:
    n, m, k = values.shape[0], weight.shape[0] // groups, weight.shape[1]
    splits = triton_matmul.num_splits(k, m)
    tile, separate = tiling(n, m, groups, splits)
    tiles = triton.cdiv(m, tile.outputs) * triton.cdiv(n, tile.rows)
    grid = (tiles, splits if separate else 1, groups)
    # Programs that start early, and fetch their share of the weight, go where there is room: several of them to one
    # multiprocessor and none to others. That costs more than it saves where there is less than one for each, unless the
    # rows are decoded in no time.
    overlap = values.numel() <= _QUICK or math.prod(grid) >= _PAIRS
    x = decode_rows(values, scales, overlap)
    sums = torch.empty(splits, n, groups * m, dtype=torch.float32, device=out.device) if separate else out
    stored = weight_scales.view(torch.int32)
    _matmul[grid](
        sums,
        blocks_of(x, tile.rows, _STEP.value),
        blocks_of(weight.view(torch.int32), tile.outputs, WORDS),
        stored,
        n,
        m,
        sums.stride(-2),
        stored.stride(0),
        K=k,
        SPLITS=splits,
        SEPARATE=separate,
        OUTPUTS=tile.outputs,
        ROWS=tile.rows,
        STAGES=tile.num_stages,
        OVERLAP=overlap,
        num_warps=tile.num_warps,
        launch_pdl=overlap,
    )
    if separate:
        triton_matmul.add_parts(sums, out)


@triton.jit(do_not_specialize=["n"])
def _decode_rows(
    out,
    values,
    scales,
    n,
    d,
    stride,
    scales_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 * 2 + column % 2
    present = (row < n)[:, None] & (column < d)[None, :]
    codes = tl.load(values + row[:, None] * stride + source[None, :], mask=present, other=0)
    group = tl.program_id(1) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)[None, :]
    place = scales + row[:, None] * scales_stride + group
    factor = decode_ue8m0(tl.load(place, mask=(row < n)[:, None] & (group * 32 < d), other=0)) * _SHIFT
    wide = tl.reshape(decode_e4m3(codes), (ROWS, COLUMNS // 32, 32)) * factor[:, :, None]
    numbers = to_bfloat16(tl.reshape(wide, (ROWS, COLUMNS)))
    tl.store(out + row[:, None] * d + column[None, :], numbers, mask=present)


@gluon.jit
def _decode_words(words, factor, OUTPUTS: gl.constexpr, LEFT: gl.constexpr):
    """The left operand ``[OUTPUTS, 64]`` of words ``[OUTPUTS, 16]``: each e4m3 number times its factor and 2^-120.

    Two bytes at a time become the upper bytes of two bfloat16; shifted by four, exponent and fraction are where
    bfloat16 has them, and the sign is put back.
    """
    a, b, c, d = gl.inline_asm_elementwise(
        """{
            .reg .b32 v, t;
            prmt.b32 v, $4, 0, 0x1404;
            shr.u32 t, v, 4;
            and.b32 t, t, 0x07F007F0;
            lop3.b32 t, v, 0x80008000, t, 0xEA;
            mul.rn.bf16x2 t, t, $5;
            mov.b32 {$0, $1}, t;
            prmt.b32 v, $4, 0, 0x3424;
            shr.u32 t, v, 4;
            and.b32 t, t, 0x07F007F0;
            lop3.b32 t, v, 0x80008000, t, 0xEA;
            mul.rn.bf16x2 t, t, $5;
            mov.b32 {$2, $3}, t;
        }""",
        "=h,=h,=h,=h,r,r",
        [words, factor],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    numbers = gl.join(gl.join(a, b), gl.join(c, d))
    numbers = gl.permute(gl.reshape(numbers, [OUTPUTS, 4, 4, 2, 2]), [0, 1, 4, 2, 3])
    # A layout that is not the operand's would be a mistake in the order of columns: an error, not a conversion.
    return gl.convert_layout(gl.reshape(numbers, [OUTPUTS, 64]), LEFT, assert_trivial=True)


@gluon.jit(do_not_specialize=["n"])
def _matmul(
    out,
    x,
    weight,
    scales,
    n,
    m,
    out_stride,
    scales_stride,
    K: gl.constexpr,
    SPLITS: gl.constexpr,
    SEPARATE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
):
    # Which tile: eight of the weight go side by side, so that what they read of the rows is still in the cache.
    tiles_n, tiles_m = gl.cdiv(n, ROWS), gl.cdiv(m, OUTPUTS)
    tile = gl.program_id(0)
    band = tile // (8 * tiles_n)
    height = gl.minimum(tiles_m - band * 8, 8)
    within = tile % (8 * tiles_n)
    first_row = within // height * ROWS
    first_output = (band * 8 + within % height) * OUTPUTS
    part, group = gl.program_id(1), gl.program_id(2)

    SUMS: gl.constexpr = sums_layout(ROWS, num_warps)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    OF_WORDS: gl.constexpr = words_layout(OUTPUTS, num_warps)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, OUTPUTS, _WORDS], weight.layout)
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, _STEP], x.layout)
    barriers = new_barriers(STAGES)

    # Known to the compiler, which otherwise waits for every product since there might be none.
    LENGTH: gl.constexpr = K // SPLITS
    STEPS: gl.constexpr = LENGTH // _STEP if SEPARATE else K // _STEP
    begin = part * LENGTH
    weight_row = group * m + first_output
    for i in gl.static_range(STAGES - 1):
        mbarrier.expect(barriers.index(i), weight.block_type.nbytes + x.block_type.nbytes, pred=i < STEPS)
        place = [weight_row, begin // 4 + i * _WORDS]
        load_block(weight, place, barriers.index(i), words.index(i), pred=i < STEPS)
    # The weight was there before; the rows are what the kernel before this one decodes.
    if OVERLAP:
        gdc_wait()
    for i in gl.static_range(STAGES - 1):
        place = [first_row, group * K + begin + i * _STEP]
        load_block(x, place, barriers.index(i), rows.index(i), pred=i < STEPS)

    scale_row = (weight_row + gl.arange(0, OUTPUTS, gl.SliceLayout(1, OF_WORDS))) // 32
    scale_row = gl.minimum(scale_row, (group * m + m - 1) // 32)
    scale_place = scales + scale_row * scales_stride + begin // 128
    scale = gl.load(scale_place)
    word = gl.arange(0, _WORDS, gl.SliceLayout(0, OF_WORDS))
    total = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    step = 0
    for _ in range(1 if SEPARATE else SPLITS):
        sums = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
        for _start in range(0, LENGTH, 2 * _STEP):
            # The word of scales of the two steps after these; past the end the last is read again.
            scale_place += gl.where(step + 2 < STEPS, 1, 0)
            next_scale = gl.load(scale_place)
            # Two steps with left operands of their own: the matrix unit reads one from registers until it is waited
            # for, and nothing keeps a loop from writing the next one there.
            for half in gl.static_range(2):
                wait_for(barriers, step, STAGES)
                stage = step % STAGES
                powers = (scale[:, None] >> (16 * half + word // 8 * 8)[None, :]) & 0xFF
                # 2^120 puts the codes' exponents right, 2^-40 is the rows' factor.
                left = _decode_words(
                    words.index(stage).load(OF_WORDS), twice_power(powers, 80), OUTPUTS, LEFT
                )
                sums = warpgroup_mma(left, rows.index(stage).permute((1, 0)), sums, is_async=True)
                # The product before has read its stage, which is free for what comes STAGES - 1 steps later.
                sums = warpgroup_mma_wait(1, deps=[sums])
                ahead = step + STAGES - 1
                fetch(
                    weight, weight_row, begin // 4 + ahead * _WORDS, words,
                    x, first_row, group * K + begin + ahead * _STEP, rows,
                    barriers, ahead, ahead < STEPS, STAGES,
                )  # fmt: skip
                step += 1
            scale = next_scale
        total += warpgroup_mma_wait(0, deps=[sums])

    STORES: gl.constexpr = stores_layout(OUTPUTS, num_warps, out.dtype.element_ty.primitive_bitwidth)
    result = gl.convert_layout(total.to(out.dtype.element_ty), STORES)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, STORES))
    output = first_output + gl.arange(0, OUTPUTS, gl.SliceLayout(1, STORES))
    if SEPARATE:
        out += part.to(gl.int64) * n * out_stride
    place = out + row.to(gl.int64)[None, :] * out_stride + (group * m + output)[:, None]
    gl.store(place, result, mask=(output < m)[:, None] & (row < n)[None, :])
