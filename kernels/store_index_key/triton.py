"""``store_index_key``: a row to a program, with the definition's bytes."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.cache_layout import INDEX_GROUP, index_key_bytes
from deepinfer_plugins.kernels.triton_formats import (
    encode_e2m1,
    magnitude_bits,
    reciprocal_ue8m0,
    scale_of_e2m1,
)
from deepinfer_plugins.kernels.triton_records import check_record_bytes, load_pairs, slot_offset, store_groups


def store_index_key(x: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """As the reference."""
    n, d = x.shape
    check_record_bytes(index_key_bytes(d), pages)
    if n:
        _store_index_key[(n,)](
            x,
            pages,
            slots,
            *x.stride(),
            pages.shape[1],
            *pages.stride(),
            NUM_GROUPS=d // INDEX_GROUP,
            GROUPS=triton.next_power_of_2(d // INDEX_GROUP),
            PAIRS=INDEX_GROUP // 2,
            num_warps=1,
        )


@triton.jit
def _store_index_key(
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
    PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        low, high = load_pairs(x + row * row_stride, column_stride, NUM_GROUPS, GROUPS, PAIRS)
        scale = scale_of_e2m1(tl.max(tl.maximum(magnitude_bits(low), magnitude_bits(high)), axis=1))
        reciprocal = reciprocal_ue8m0(scale)[:, None]
        packed = encode_e2m1(low * reciprocal) | (encode_e2m1(high * reciprocal) << 4)
        record = pages + slot_offset(slot, page_size, page_stride, entry_stride)
        store_groups(record, packed, scale, byte_stride, NUM_GROUPS, GROUPS, PAIRS)
