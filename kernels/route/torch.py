"""``route`` over whole blocks of rows."""

import torch

from deepinfer_plugins.kernels.route import reference
from deepinfer_plugins.kernels.row_blocks import ROWS, pad_rows


def route(
    logits: torch.Tensor, bias: torch.Tensor, topk: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference. Whole blocks keep every row in torch's vectorised exponentials: the scalar ones, which get
    what is left past the last whole vector, differ in the last bit."""
    n = logits.shape[0]
    bias = pad_rows(bias, ROWS) if bias.dim() == 2 else bias
    ids, weights = reference.route(pad_rows(logits, ROWS), bias, topk, scaling)
    return ids[:n], weights[:n]
