"""``load_compressor``, byte by byte: a record need not begin where a float32 may."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_records import slot_offset


def load_compressor(pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    n, d = len(slots), pages.shape[2] // 8
    gates, latents = (torch.empty(n, d, dtype=torch.float32, device=pages.device) for _ in range(2))
    if n:
        _load_compressor[(n, 2)](
            gates.view(torch.int32),
            latents.view(torch.int32),
            pages,
            slots,
            pages.shape[1],
            *pages.stride(),
            d,
            BLOCK=triton.next_power_of_2(d),
            num_warps=4,
        )
    return gates, latents


@triton.jit
def _load_compressor(
    gates,
    latents,
    pages,
    slots,
    page_size,
    page_stride,
    entry_stride,
    byte_stride,
    d,
    BLOCK: tl.constexpr,
):
    row, is_latent = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    column = tl.arange(0, BLOCK)
    present = column < d
    record = pages + slot_offset(slot, page_size, page_stride, entry_stride) + is_latent * 4 * d * byte_stride
    byte = tl.arange(0, 4)[None, :]
    place = record + (4 * column[:, None] + byte) * byte_stride
    value = tl.load(place, mask=present[:, None] & (slot >= 0), other=0).to(tl.int32)
    # The bytes share no bit.
    word = tl.sum(value << (8 * byte), axis=1)
    if is_latent == 0:
        tl.store(gates + row * d + column, word, mask=present)
    else:
        tl.store(latents + row * d + column, word, mask=present)
