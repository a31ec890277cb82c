"""The definition of ``store_compressed``."""

import torch

from deepinfer_plugins.kernels.formats import encode_compressed
from deepinfer_plugins.kernels.records import write_records


def store_compressed(x: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Encode each row as a compressed-key record and write it to its slot, in place.

    Args:
        x: ``[n, d]``, bfloat16.
        pages: ``[num_pages, page_size, compressed_bytes(d)]``, uint8, any strides.
        slots: ``[n]``, int64, ``page * page_size + offset``; -1 writes nothing. No slot occurs twice.

    Raises:
        ValueError: If ``pages`` holds records of another size.
    """
    write_records(encode_compressed(x), pages, slots)
