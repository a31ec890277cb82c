"""``store_compressor``, byte by byte: a record need not begin where a float32 may."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.cache_layout import compressor_bytes
from deepinfer_plugins.kernels.triton_records import check_record_bytes, slot_offset


def store_compressor(
    gates: torch.Tensor, latents: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """As the reference."""
    n, d = gates.shape
    check_record_bytes(compressor_bytes(d), pages)
    if n:
        _store_compressor[(n, 2)](
            gates.view(torch.int32),
            latents.view(torch.int32),
            pages,
            slots,
            *gates.stride(),
            *latents.stride(),
            pages.shape[1],
            *pages.stride(),
            d,
            BLOCK=triton.next_power_of_2(d),
            num_warps=4,
        )


@triton.jit
def _store_compressor(
    gates,
    latents,
    pages,
    slots,
    gate_row_stride,
    gate_stride,
    latent_row_stride,
    latent_stride,
    page_size,
    page_stride,
    entry_stride,
    byte_stride,
    d,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        present = column < d
        record = pages + slot_offset(slot, page_size, page_stride, entry_stride)
        if tl.program_id(1) == 0:
            word = tl.load(gates + row * gate_row_stride + column * gate_stride, mask=present, other=0)
        else:
            word = tl.load(latents + row * latent_row_stride + column * latent_stride, mask=present, other=0)
            record += 4 * d * byte_stride
        byte = tl.arange(0, 4)[None, :]
        value = (word[:, None] >> (8 * byte)) & 0xFF
        tl.store(
            record + (4 * column[:, None] + byte) * byte_stride, value.to(tl.uint8), mask=present[:, None]
        )
