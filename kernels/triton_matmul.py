"""Products of rows with a weight in Triton: what ``linear``, ``mxfp8_linear`` and ``mxfp8_grouped_linear`` share.

MXFP8 operands are decoded to bfloat16, which holds e4m3 times a power of two exactly; products are exact and sums are
in float32. Their order depends on the length of a row alone: the row is cut into ``num_splits(k)`` parts, each part is
summed in steps of the matrix unit from its start to its end, and then the parts are added one after the other. Neither
the number of rows nor the number of outputs has a say in it, so a fused projection has the bits of its parts.

What may vary with the number of rows is where this is done. A few rows give each part a program of its own, so that
every multiprocessor reads a share of the weight; many give all parts of a tile to one program. The weight is the
left operand, so that the instruction's shape changes with the rows only along them. Many rows in bfloat16 are the left
operand themselves, and descriptors read both: on an H200 all of these tiles have the same bits.
"""

# mypy: ignore-errors

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from deepinfer_plugins.kernels.triton_formats import (
    INTERPRETED,
    decode_e4m3,
    decode_ue8m0,
    dot,
    to_bfloat16,
)

# Parts of a row of some length; 1 of any other. Rows as long as the release's hidden size are those of its narrow
# weights (latent query and key, gate, compressor), whose few outputs alone would leave most of a chip idle.
# Those of the attention's output, at 8192, are cut for the sake of decoding: from 1,024 rows on it costs a quarter.
_SPLITS = {5120: 4, 8192: 4}

# A weight with this many outputs, like the head, also a rank's share of it, fills a chip without parts.
_TALL = 1 << 13

# From this many programs on a chip counts as filled. A constant, not the chip's own number.
_FULL = 100

# From this many rows on a weight is decoded once, to bfloat16, and not by every program that reads it.
_MANY_ROWS = 512

# Elements decoded to bfloat16 at a time: of a weight (32 MiB), and of rows (128 MiB).
_WEIGHT_ELEMENTS = 1 << 24
_ROW_ELEMENTS = 1 << 26


class Tiling(NamedTuple):
    """How a product is cut into programs. None of it changes a bit of the result."""

    outputs: int
    rows: int
    step: int
    num_warps: int
    num_stages: int


_FEW = {
    16: Tiling(64, 16, 128, 4, 6),
    32: Tiling(64, 32, 128, 4, 5),
    64: Tiling(64, 64, 128, 4, 4),
}
# Of a weight that alone has enough of them.
_FEW_TALL = Tiling(128, 16, 128, 4, 3)
_MORE = (
    Tiling(128, 256, 64, 8, 4),
    Tiling(128, 128, 64, 8, 4),
    Tiling(64, 128, 64, 4, 4),
    Tiling(64, 64, 64, 4, 4),
)
# Of operands that are read by descriptors, with the time of a wave, measured on an H200, relative to the others'.
_DESCRIBED = (
    (Tiling(256, 128, 64, 8, 4), 2.4),
    (Tiling(128, 128, 64, 4, 3), 2.05),
    (Tiling(128, 64, 64, 4, 4), 1.0),
    (Tiling(64, 64, 64, 4, 5), 0.7),
)
# What it costs to add up parts in the program itself, for the tiles whose registers hold two sums.
_TWO_SUMS = 1.3
# More sums of a part than this are too many to go through memory.
_SEPARATE_SUMS = 1 << 20
# Of so few steps that most of a program is its start and its end: then several on a multiprocessor hide each other's.
_SHORT = 256
_DESCRIBED_SHORT = Tiling(128, 64, 64, 4, 3)
# Programs of a wave: multiprocessors of a chip. A constant, not the chip's own number.
_WAVE = 132


def num_splits(k: int, m: int) -> int:
    """Parts into which a row of ``k`` elements is cut, of a weight of ``m`` outputs in each group."""
    return 1 if m >= _TALL else _SPLITS.get(k, 1)


def tiling(n: int, m: int, groups: int, splits: int) -> tuple[Tiling, bool]:
    """The tiling for ``n`` rows and ``m`` outputs in each group, and whether each part gets its own program.

    The interpreter rounds once per step, where a matrix unit does whatever the step is: there all have the same.
    """
    tile, separate = _tiling(n, m, groups, splits)
    return tile._replace(step=128) if INTERPRETED.value else tile, separate


def _tiling(n: int, m: int, groups: int, splits: int) -> tuple[Tiling, bool]:
    if n <= 64:
        tile = _FEW[max(16, triton.next_power_of_2(n))]
        if n <= 16 and splits == 1 and groups * triton.cdiv(m, _FEW_TALL.outputs) >= _FULL:
            tile = _FEW_TALL
        return tile, splits > 1 and groups * triton.cdiv(m, tile.outputs) < 2 * _FULL
    for tile in _MORE:
        if tile.rows >= 2 * n or (splits > 1 and tile.rows > 128):
            continue
        programs = groups * triton.cdiv(m, tile.outputs) * triton.cdiv(n, tile.rows)
        separate = splits > 1 and programs < _FULL
        if programs * (splits if separate else 1) >= _FULL:
            break
    return tile, separate


def matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: int = 1) -> None:
    """Write ``x @ weight.T`` to ``out``.

    Args:
        x: ``[n, groups * k]``, bfloat16.
        weight: ``[groups * m, k]``, bfloat16. Group ``g`` of its rows meets group ``g`` of ``x``.
        out: ``[n, groups * m]``, bfloat16 or float32; its rows may be parts of longer ones.
    """
    splits = num_splits(weight.shape[1], weight.shape[0] // groups)
    _launch(x, None, weight, None, out, groups, splits)


def mxfp8_matmul(
    values: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    out: torch.Tensor,
    groups: int = 1,
) -> None:
    """Write the product of MXFP8 rows with an MXFP8 weight to ``out``.

    Args:
        values: ``[n, groups * k]``, e4m3.
        scales: ``[n, groups * k / 32]``, uint8, UE8M0.
        weight: ``[groups * m, k]``, e4m3; ``m`` a multiple of 32 if there are several groups.
        weight_scales: ``[ceil(groups * m / 32), k / 32]``, uint8, UE8M0.
        out: ``[n, groups * m]``, bfloat16.
    """
    # Triton loads bytes with masks, but not e4m3 numbers.
    values, weight = values.view(torch.uint8), weight.view(torch.uint8)
    n, width = values.shape
    splits = num_splits(weight.shape[1], weight.shape[0] // groups)
    if n <= 32:
        _launch(values, scales, weight, weight_scales, out, groups, splits)
        return
    at_once = max(1, _ROW_ELEMENTS // max(width, 1))
    multiply = _launch if n < _MANY_ROWS else _by_parts_of_weight
    for start in range(0, n, at_once):
        part = slice(start, start + at_once)
        # Rows are passed on without a name, so that they are freed before the next part is decoded.
        multiply(
            decode_rows(values[part], scales[part]), None, weight, weight_scales, out[part], groups, splits
        )


def decode_rows(values: torch.Tensor, scales: torch.Tensor, rows_per_scale: int = 1) -> torch.Tensor:
    """Bfloat16 ``[n, d]`` of e4m3 bytes ``values [n, d]`` with one scale per ``rows_per_scale`` rows and 32 columns."""
    n, d = values.shape
    out = torch.empty(n, d, dtype=torch.bfloat16, device=values.device)
    if n * d:
        rows, columns = 32, 256
        _decode_rows[(triton.cdiv(n, rows), triton.cdiv(d, columns))](
            out, values, scales, n, d, values.stride(0), scales.stride(0), rows_per_scale, rows, columns
        )
    return out


def _by_parts_of_weight(x, x_scales, weight, weight_scales, out, groups, splits) -> None:
    """As ``_launch``, decoding a bounded part of the weight at a time; ``x_scales`` is None."""
    k = weight.shape[1]
    m = weight.shape[0] // groups
    parts = triton.cdiv(m * k, _WEIGHT_ELEMENTS)
    at_once = triton.cdiv(triton.cdiv(m, parts), 128) * 128
    for group in range(groups):
        rows = x[:, group * k : (group + 1) * k]
        for start in range(group * m, (group + 1) * m, at_once):
            stop = min(start + at_once, (group + 1) * m)
            scales = weight_scales[start // 32 : triton.cdiv(stop, 32)]
            part = decode_rows(weight[start:stop], scales, 32)
            _launch(rows, x_scales, part, None, out[:, start:stop], 1, splits)
            # Freed before the next part is decoded.
            del part


def described_tiling(n: int, m: int, k: int, groups: int, splits: int) -> tuple[Tiling, bool]:
    """As :func:`tiling`, for operands that are read by descriptors: what needs the least time by waves."""

    def separate(tile: Tiling) -> bool:
        return splits > 1 and n * m * groups <= _SEPARATE_SUMS and programs(tile) < _FULL

    def programs(tile: Tiling) -> int:
        return groups * triton.cdiv(m, tile.outputs) * triton.cdiv(n, tile.rows)

    def seconds(choice: tuple[Tiling, float]) -> float:
        tile, relative = choice
        if splits > 1 and tile.outputs == 256:
            return math.inf
        parts = splits if separate(tile) else 1
        if parts < splits:
            # That of a part and that of those before it.
            relative *= math.inf if tile.outputs * tile.rows > 128 * 64 else _TWO_SUMS
        return triton.cdiv(programs(tile) * parts, _WAVE) / parts * relative

    tile = _DESCRIBED_SHORT if k <= _SHORT else min(_DESCRIBED, key=seconds)[0]
    return tile._replace(step=128) if INTERPRETED.value else tile, separate(tile)


def _can_be_described(operand: torch.Tensor, k: int, groups: int) -> bool:
    """Whether rows lie where the chip's units for copying tiles can read them, a group's whole steps at a time."""
    if operand.data_ptr() % 16 or operand.stride(1) != 1 or operand.stride(0) % 8:
        return False
    return groups == 1 or k % 128 == 0


def _launch(x, x_scales, weight, weight_scales, out, groups, splits) -> None:
    n, m, k = x.shape[0], weight.shape[0] // groups, weight.shape[1]
    if not n * m:
        return
    length = triton.cdiv(triton.cdiv(k, splits), 128) * 128
    decoded = x_scales is None and weight_scales is None
    described = (
        n > (16 if k <= _SHORT else 64)
        and decoded
        and all(_can_be_described(part, k, groups) for part in (x, weight))
    )
    if described:
        tile, separate = described_tiling(n, m, k, groups, splits)
    else:
        tile, separate = tiling(n, m, groups, splits)
    sums = torch.empty(splits, n, groups * m, dtype=torch.float32, device=x.device) if separate else out
    tiles = triton.cdiv(m, tile.outputs) * triton.cdiv(n, tile.rows)
    grid = (tiles, splits if separate else 1, groups)
    options = {
        "SPLITS": splits,
        "SEPARATE": separate,
        "OUTPUTS": tile.outputs,
        "ROWS": tile.rows,
        "STEP": tile.step,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    if described:
        x, weight = (
            TensorDescriptor.from_tensor(operand, [size, tile.step])
            for operand, size in ((x, tile.rows), (weight, tile.outputs))
        )
        _matmul_tiles[grid](sums, x, weight, n, m, k, sums.stride(-2), length, **options)
    else:
        whole = k % length == 0
        if whole:
            x_scales, weight_scales = (
                None if scales is None else scales.view(torch.int32) for scales in (x_scales, weight_scales)
            )
        _matmul[grid](
            sums,
            x,
            x_scales,
            weight,
            weight_scales,
            n,
            m,
            k,
            sums.stride(-2),
            x.stride(0),
            0 if x_scales is None else x_scales.stride(0),
            weight.stride(0),
            0 if weight_scales is None else weight_scales.stride(0),
            length,
            WHOLE=whole,
            **options,
        )
    if separate:
        add_parts(sums, out)


def add_parts(sums: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sum of float32 ``sums [parts, n, m]`` over its first dimension, in order, to ``out [n, m]``."""
    splits, n, m = sums.shape
    _add_parts[(triton.cdiv(n * m, 1024),)](out, sums, n * m, m, out.stride(0), splits, 1024)


@triton.jit
def load_mxfp8(values, scales, start, k, WHOLE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Bfloat16 ``[ROWS, STEP]`` of MXFP8 rows from column ``start`` on, zeros past column ``k``.

    Args:
        values: Pointers to the rows' e4m3 bytes, ``[ROWS, 1]``.
        scales: Pointers to the rows' UE8M0 bytes, ``[ROWS]``; if ``WHOLE``, to words of four, for a load of fewer
            bytes is not issued ahead of its use.
        start: A multiple of ``STEP``.
        k: Length of a row.
        WHOLE: Whether ``k`` is a multiple of 128.
        ROWS: Of the result.
        STEP: Columns of the result, a power of two from 32 to 128.
    """
    column = start + tl.arange(0, STEP)[None, :]
    group = start // 32 + tl.arange(0, STEP // 32)[None, :]
    if WHOLE:
        codes = tl.load(values + column)
        powers = tl.load(scales + start // 128)[:, None] >> (group % 4 * 8) & 0xFF
    else:
        codes = tl.load(values + column, mask=column < k, other=0)
        powers = tl.load(scales[:, None] + group, mask=group * 32 < k, other=0)
    wide = tl.reshape(decode_e4m3(codes), (ROWS, STEP // 32, 32)) * decode_ue8m0(powers)[:, :, None]
    return to_bfloat16(tl.reshape(wide, (ROWS, STEP)))


@triton.jit
def _load_bfloat16(values, start, k, WHOLE: tl.constexpr, STEP: tl.constexpr):
    column = start + tl.arange(0, STEP)[None, :]
    if WHOLE:
        return tl.load(values + column)
    else:
        return tl.load(values + column, mask=column < k, other=0.0)


@triton.jit
def _sum_part(
    x,
    x_scales,
    weight,
    weight_scales,
    first,
    last,
    k,
    WHOLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sums ``[OUTPUTS, ROWS]`` over the columns from ``first`` to ``last``; the pointers are at the rows."""
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(first, last, STEP):
        if weight_scales is None:
            left = _load_bfloat16(weight, start, k, WHOLE, STEP)
        else:
            left = load_mxfp8(weight, weight_scales, start, k, WHOLE, OUTPUTS, STEP)
        if x_scales is None:
            right = _load_bfloat16(x, start, k, WHOLE, STEP)
        else:
            right = load_mxfp8(x, x_scales, start, k, WHOLE, ROWS, STEP)
        total = dot(left, tl.trans(right), total)
    return total


@triton.jit
def _sum_tiles(x, weight, row, column, output, first, last, total, STEP: tl.constexpr):
    """``total [ROWS, OUTPUTS]`` and the sums over the columns from ``first`` to ``last``."""
    for start in range(first, last, STEP):
        left, right = x.load([row, column + start]), weight.load([output, start])
        total = dot(left, tl.trans(right), total)
    return total


@triton.jit
def _tile(tiles_n, tiles_m):
    """This program's tile of the rows and of the weight, of so many.

    Eight tiles of the weight go side by side, so that what they read of the rows is still in the cache.
    """
    tile = tl.program_id(0)
    band = tile // (8 * tiles_n)
    height = tl.minimum(tiles_m - band * 8, 8)
    within = tile % (8 * tiles_n)
    return within // height, band * 8 + within % height


@triton.jit(do_not_specialize=["n"])
def _matmul_tiles(
    out,
    x,
    weight,
    n,
    m,
    k,
    out_stride,
    length,
    SPLITS: tl.constexpr,
    SEPARATE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """As ``_matmul``, of bfloat16 operands that are read by descriptors, in tiles of their own."""
    tile_n, tile_m = _tile(tl.cdiv(n, ROWS), tl.cdiv(m, OUTPUTS))
    part = tl.program_id(1)
    group = tl.program_id(2)
    first_output = tile_m * OUTPUTS
    first_row = tile_n * ROWS

    none = tl.zeros((ROWS, OUTPUTS), tl.float32)
    first = part * length
    last = tl.minimum(first + length, k)
    total = _sum_tiles(x, weight, first_row, group * k, group * m + first_output, first, last, none, STEP)
    if SEPARATE:
        out += part.to(tl.int64) * n * out_stride
    else:
        for later in range(1, SPLITS):
            first = later * length
            last = tl.minimum(first + length, k)
            total += _sum_tiles(
                x, weight, first_row, group * k, group * m + first_output, first, last, none, STEP
            )
    if out.dtype.element_ty == tl.bfloat16:
        result = to_bfloat16(total)
    else:
        result = total
    row = first_row.to(tl.int64) + tl.arange(0, ROWS)
    output = first_output + tl.arange(0, OUTPUTS)
    place = out + row[:, None] * out_stride + (group * m + output)[None, :]
    tl.store(place, result, mask=(row < n)[:, None] & (output < m)[None, :])


@triton.jit(do_not_specialize=["n"])
def _matmul(
    out,
    x,
    x_scales,
    weight,
    weight_scales,
    n,
    m,
    k,
    out_stride,
    x_stride,
    x_scales_stride,
    weight_stride,
    weight_scales_stride,
    length,
    SPLITS: tl.constexpr,
    SEPARATE: tl.constexpr,
    WHOLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    tile_n, tile_m = _tile(tl.cdiv(n, ROWS), tl.cdiv(m, OUTPUTS))
    part = tl.program_id(1)
    group = tl.program_id(2)

    output = tile_m * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tile_n.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # Past the end the last one is read again, and not stored.
    weight_row = group.to(tl.int64) * m + tl.minimum(output, m - 1)
    x_row = tl.minimum(row, n - 1)
    weight += weight_row[:, None] * weight_stride
    if weight_scales is not None:
        weight_scales += weight_row // 32 * weight_scales_stride
    x += x_row[:, None] * x_stride + group * k
    if x_scales is not None:
        x_scales += x_row * x_scales_stride + group * (k // (128 if WHOLE else 32))

    first = part * length
    total = _sum_part(
        x,
        x_scales,
        weight,
        weight_scales,
        first,
        tl.minimum(first + length, k),
        k,
        WHOLE,
        OUTPUTS,
        ROWS,
        STEP,
    )
    if SEPARATE:
        out += part.to(tl.int64) * n * out_stride
    else:
        for later in range(1, SPLITS):
            first = later * length
            total += _sum_part(
                x,
                x_scales,
                weight,
                weight_scales,
                first,
                tl.minimum(first + length, k),
                k,
                WHOLE,
                OUTPUTS,
                ROWS,
                STEP,
            )
    if out.dtype.element_ty == tl.bfloat16:
        result = to_bfloat16(total)
    else:
        result = total
    place = out + row[None, :] * out_stride + (group * m + output)[:, None]
    tl.store(place, result, mask=(output < m)[:, None] & (row < n)[None, :])


@triton.jit(do_not_specialize=["size"])
def _add_parts(out, sums, size, width, out_stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum ``sums [SPLITS, n, width]`` over its first dimension, in order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    present = place < size
    total = tl.load(sums + place, mask=present, other=0.0)
    for part in range(1, SPLITS):
        total += tl.load(sums + part * size.to(tl.int64) + place, mask=present, other=0.0)
    if out.dtype.element_ty == tl.bfloat16:
        result = to_bfloat16(total)
    else:
        result = total
    tl.store(out + (place // width) * out_stride + place % width, result, mask=present)


@triton.jit(do_not_specialize=["n"])
def _decode_rows(
    out,
    values,
    scales,
    n,
    d,
    stride,
    scales_stride,
    ROWS_PER_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Decode ``n`` rows of ``d`` numbers, and write them side by side."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    group = tl.program_id(1) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)[None, :]
    present = (row < n)[:, None]
    codes = tl.load(values + row[:, None] * stride + column, mask=present & (column < d), other=0)
    place = scales + (row // ROWS_PER_SCALE)[:, None] * scales_stride + group
    powers = tl.load(place, mask=present & (group * 32 < d), other=0)
    wide = tl.reshape(decode_e4m3(codes), (ROWS, COLUMNS // 32, 32)) * decode_ue8m0(powers)[:, :, None]
    numbers = to_bfloat16(tl.reshape(wide, (ROWS, COLUMNS)))
    tl.store(out + row[:, None] * d + column, numbers, mask=present & (column < d))
