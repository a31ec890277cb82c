"""The definition of ``filter_log_probs``."""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels import filtering


def filter_log_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> torch.Tensor:
    """Log-probabilities of what the filters keep, renormalised.

    Args:
        logits: ``[n, vocab_size]``, float32; -inf for what is barred.
        temperature: ``[n]``, float64; 0: greedy.
        min_p: ``[n]``, float64, 0 for off; None: off for all. Filters: ``filtering.filtered``.
        top_k: ``[n]``, int64, 0 for off; None: off for all.
        top_p: ``[n]``, float64, 1 for off; None: off for all.

    Returns:
        ``[n, vocab_size]``, float32; -inf for what was removed. Computed in float64, rounded once. The probabilities
        are normalised by a sum of masses, each rounded to 2^-40 of the most probable entry's.
    """
    return filtering.log_probs(*filtering.filtered(logits, temperature, min_p, top_k, top_p)).float()
