"""The definition of ``pool_pairs``."""

import torch


def pool_pairs(gates: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Average the two latents of a pair, channel by channel, with the softmax of their gates as weights.

    Args:
        gates: ``[n, 2, d]``, float32.
        latents: ``[n, 2, d]``, float32.

    Returns:
        ``[n, d]``, bfloat16. Computed in float64, rounded once.
    """
    first, second = gates.double().unbind(1)
    # Of two logits, the softmax is the logistic function of their difference.
    share = (second - first).sigmoid()
    earlier, later = latents.double().unbind(1)
    return ((1 - share) * earlier + share * later).bfloat16()
