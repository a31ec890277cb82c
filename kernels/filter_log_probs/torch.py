"""``filter_log_probs``, a bounded number of entries at a time."""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels import filtering
from deepinfer_plugins.kernels.filter_log_probs import reference


def filter_log_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference."""
    out = torch.empty_like(logits)
    for part in filtering.parts(logits):
        args = (logits, temperature, min_p, top_k, top_p)
        out[part] = reference.filter_log_probs(*filtering.take(args, part))
    return out
