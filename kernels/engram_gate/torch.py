"""``engram_gate`` over whole vectors, so that no row gets another exponential than its neighbours."""

import torch

from deepinfer_plugins.kernels.engram_gate import reference
from deepinfer_plugins.kernels.row_blocks import WHOLE_VECTORS, pad_rows


def engram_gate(
    streams: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference."""
    n = streams.shape[0]
    streams, keys, value = (pad_rows(part, WHOLE_VECTORS) for part in (streams, keys, value))
    skip = None if skip is None else pad_rows(skip, WHOLE_VECTORS)
    return reference.engram_gate(streams, keys, value, weight, eps, skip)[:n]
