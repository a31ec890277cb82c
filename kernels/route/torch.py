"""``route`` over whole vectors, so that no row gets another exponential than its neighbours."""

import torch

from deepinfer_plugins.kernels.route import reference
from deepinfer_plugins.kernels.row_blocks import WHOLE_VECTORS, pad_rows


def route(
    logits: torch.Tensor, bias: torch.Tensor, topk: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    n = logits.shape[0]
    bias = pad_rows(bias, WHOLE_VECTORS) if bias.dim() == 2 else bias
    ids, weights = reference.route(pad_rows(logits, WHOLE_VECTORS), bias, topk, scaling)
    return ids[:n], weights[:n]
