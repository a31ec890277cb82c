"""The definition of ``store_compressor``."""

import torch

from deepinfer_plugins.kernels.records import write_records


def store_compressor(
    gates: torch.Tensor, latents: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write each row's gates and latents, unrounded, to its slot, in place.

    Args:
        gates: ``[n, d]``, float32.
        latents: ``[n, d]``, float32.
        pages: ``[num_pages, page_size, compressor_bytes(d)]``, uint8, any strides.
        slots: ``[n]``, int64, ``page * page_size + offset``; -1 writes nothing. No slot occurs twice.

    Raises:
        ValueError: If ``pages`` holds records of another size.
    """
    write_records(torch.cat([gates, latents], -1).view(torch.uint8), pages, slots)
