"""The definition of ``combine``."""

import torch


def combine(chosen: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Sum the outputs of the experts chosen and of the shared expert.

    Args:
        chosen: ``[n, topk, d]``, bfloat16.
        shared: ``[n, d]``, bfloat16.

    Returns:
        ``[n, d]``, bfloat16. Summed in float64, in order, rounded once.
    """
    total = shared.double()
    for output in chosen.unbind(1):
        total = total + output.double()
    return total.bfloat16()
