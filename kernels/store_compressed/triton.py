"""``store_compressed``: a row to a program, with the definition's bytes."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.cache_layout import FP4_GROUP, compressed_bytes
from deepinfer_plugins.kernels.formats import E4M3_MAX, FP4_AMAX_FLOOR
from deepinfer_plugins.kernels.triton_formats import decode_e4m3, encode_e2m1, encode_e4m3, magnitude_bits
from deepinfer_plugins.kernels.triton_records import check_record_bytes, load_pairs, slot_offset, store_groups


def store_compressed(x: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """As the reference."""
    n, d = x.shape
    check_record_bytes(compressed_bytes(d), pages)
    if n:
        _store_compressed[(n,)](
            x,
            pages,
            slots,
            *x.stride(),
            pages.shape[1],
            *pages.stride(),
            SIXTH=1 / 6,
            FLOOR=FP4_AMAX_FLOOR,
            CEILING=E4M3_MAX,
            NUM_GROUPS=d // FP4_GROUP,
            GROUPS=triton.next_power_of_2(d // FP4_GROUP),
            PAIRS=FP4_GROUP // 2,
            num_warps=1,
        )


@triton.jit
def _store_compressed(
    x,
    pages,
    slots,
    row_stride,
    column_stride,
    page_size,
    page_stride,
    entry_stride,
    byte_stride,
    SIXTH: tl.constexpr,
    FLOOR: tl.constexpr,
    CEILING: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        low, high = load_pairs(x + row * row_stride, column_stride, NUM_GROUPS, GROUPS, PAIRS)
        amax_bits = tl.max(tl.maximum(magnitude_bits(low), magnitude_bits(high)), axis=1)
        amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), FLOOR)
        scale = encode_e4m3(tl.minimum(amax * SIXTH, CEILING)).to(tl.uint8)
        reciprocal = tl.div_rn(tl.full((GROUPS,), 1.0, tl.float32), decode_e4m3(scale))[:, None]
        packed = encode_e2m1(low * reciprocal) | (encode_e2m1(high * reciprocal) << 4)
        record = pages + slot_offset(slot, page_size, page_stride, entry_stride)
        store_groups(record, packed, scale, byte_stride, NUM_GROUPS, GROUPS, PAIRS)
