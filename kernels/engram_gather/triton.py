"""``engram_gather``: a block of table rows to a program, values and scales in one pass."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.formats import UNIT_SCALE

ROWS = 16


def engram_gather(
    table: torch.Tensor, table_scales: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    n, c = index.shape
    d, num_scales = table.shape[1], table_scales.shape[1]
    values = torch.empty(n, c * d, dtype=torch.uint8, device=index.device)
    scales = torch.empty(n, c * num_scales, dtype=torch.uint8, device=index.device)
    if index.numel():
        _engram_gather[(triton.cdiv(n * c, ROWS),)](
            values,
            scales,
            table.view(torch.uint8),
            table_scales,
            index.contiguous(),
            n * c,
            *table.stride(),
            *table_scales.stride(),
            d,
            num_scales,
            UNIT=UNIT_SCALE,
            VALUES=triton.next_power_of_2(d),
            SCALES=triton.next_power_of_2(num_scales),
            ROWS=ROWS,
            num_warps=4,
        )
    return values.view(table.dtype), scales


@triton.jit(do_not_specialize=["num_rows"])
def _engram_gather(
    values,
    scales,
    table,
    table_scales,
    index,
    num_rows,
    row_stride,
    value_stride,
    scale_row_stride,
    scale_stride,
    d,
    num_scales,
    UNIT: tl.constexpr,
    VALUES: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < num_rows
    source = tl.load(index + row, mask=in_rows, other=-1).to(tl.int64)
    found = source >= 0
    column = tl.arange(0, VALUES)
    wanted = in_rows[:, None] & (column < d)[None, :]
    read = wanted & found[:, None]
    value = tl.load(table + source[:, None] * row_stride + column[None, :] * value_stride, mask=read, other=0)
    tl.store(values + row[:, None] * d + column[None, :], value, mask=wanted)
    column = tl.arange(0, SCALES)
    wanted = in_rows[:, None] & (column < num_scales)[None, :]
    read = wanted & found[:, None]
    place = table_scales + source[:, None] * scale_row_stride + column[None, :] * scale_stride
    scale = tl.load(place, mask=read, other=UNIT)
    tl.store(scales + row[:, None] * num_scales + column[None, :], scale, mask=wanted)
