"""``engram_gate`` over whole blocks of rows."""

import torch

from deepinfer_plugins.kernels.engram_gate import reference
from deepinfer_plugins.kernels.row_blocks import ROWS, pad_rows


def engram_gate(
    streams: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference. Whole blocks keep every row in torch's vectorised exponentials: the scalar ones, which get
    what is left past the last whole vector, differ in the last bit."""
    n = streams.shape[0]
    streams, keys, value = (pad_rows(part, ROWS) for part in (streams, keys, value))
    skip = None if skip is None else pad_rows(skip, ROWS)
    return reference.engram_gate(streams, keys, value, weight, eps, skip)[:n]
