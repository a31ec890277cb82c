"""The definition of ``load_compressor``."""

import torch

from deepinfer_plugins.kernels.records import read_slots


def load_compressor(pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read what ``store_compressor`` wrote.

    Args:
        pages: ``[num_pages, page_size, compressor_bytes(d)]``, uint8, any strides.
        slots: ``[n]``, int64, ``page * page_size + offset``; -1 reads zeros.

    Returns:
        gates: ``[n, d]``, float32.
        latents: ``[n, d]``, float32.
    """
    gates, latents = read_slots(pages, slots).view(torch.float32).chunk(2, -1)
    return gates, latents
