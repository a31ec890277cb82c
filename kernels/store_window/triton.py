"""``store_window``: a row to a program, with the definition's bytes."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.cache_layout import MXFP8_GROUP, window_bytes
from deepinfer_plugins.kernels.triton_formats import (
    encode_e4m3,
    magnitude_bits,
    reciprocal_ue8m0,
    scale_of_e4m3,
)
from deepinfer_plugins.kernels.triton_records import check_record_bytes, slot_offset, store_groups


def store_window(x: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """As the reference."""
    n, d = x.shape
    check_record_bytes(window_bytes(d), pages)
    if n:
        _store_window[(n,)](
            x,
            pages,
            slots,
            *x.stride(),
            pages.shape[1],
            *pages.stride(),
            NUM_GROUPS=d // MXFP8_GROUP,
            GROUPS=triton.next_power_of_2(d // MXFP8_GROUP),
            GROUP=MXFP8_GROUP,
            num_warps=1,
        )


@triton.jit
def _store_window(
    x,
    pages,
    slots,
    row_stride,
    column_stride,
    page_size,
    page_stride,
    entry_stride,
    byte_stride,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        group = tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        present = (group < NUM_GROUPS)[:, None]
        value = tl.load(x + row * row_stride + column * column_stride, mask=present, other=0.0).to(tl.float32)
        scale = scale_of_e4m3(tl.max(magnitude_bits(value), axis=1))
        code = encode_e4m3(value * reciprocal_ue8m0(scale)[:, None])
        record = pages + slot_offset(slot, page_size, page_stride, entry_stride)
        store_groups(record, code, scale, byte_stride, NUM_GROUPS, GROUPS, GROUP)
