"""The definition of ``route``."""

import torch


def route(
    logits: torch.Tensor, bias: torch.Tensor, topk: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by ``s + bias`` with ``s = sqrt(softplus(logits))``, and weigh them by ``s``.

    Args:
        logits: ``[n, num_experts]``, float32.
        bias: ``[num_experts]`` or ``[n, num_experts]``, float32; decides what is chosen, not how it is weighed.
        topk: Experts per row.
        scaling: Sum of a row's weights.

    Returns:
        ids: ``[n, topk]``, int64, by falling ``s + bias``. Ties: the lower id first.
        weights: ``[n, topk]``, float32, ``s / (sum of the chosen s + 1e-20) * scaling``. ``s`` and ``s + bias`` are
            rounded to float32; the weights are computed from ``s`` in float64 and rounded once.
    """
    wide = logits.double()
    scores = torch.logaddexp(wide, wide.new_zeros(())).sqrt().float()
    ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    chosen = scores.gather(1, ids).double()
    total = chosen[:, :1]
    for column in chosen[:, 1:].split(1, 1):
        total = total + column
    return ids, (chosen / (total + 1e-20) * scaling).float()
