"""The definition of ``sample``."""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels import filtering, noise


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    min_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
    stream: torch.Tensor,
) -> torch.Tensor:
    """The entry with the highest ``x - max x + gumbel``, ``x = logits / temperature``, of those that the filters keep.

    Args:
        logits: ``[n, vocab_size]``, float32; -inf for what is barred.
        temperature: ``[n]``, float64; 0: greedy, the highest logit. None: greedy for all.
        min_p: ``[n]``, float64, 0 for off; None: off for all. Filters: ``filtering.filtered``.
        top_k: ``[n]``, int64, 0 for off; None: off for all.
        top_p: ``[n]``, float64, 1 for off; None: off for all.
        seed: ``[n]``, int64; the bits of an unsigned number.
        position: ``[n]``, int64: the absolute position of the token to be chosen.
        stream: ``[n]``, int64: one of ``noise.TARGET`` and ``noise.DRAFT``.

    Returns:
        ``[n]``, int64. Sums are in float64, the noise is ``noise.gumbel``. Ties: the lower id. A row all of which is
        barred gives 0.
    """
    if temperature is None:
        return logits.argmax(dim=1)
    if min_p is None and top_k is None and top_p is None:
        shifted, _ = filtering.shift(logits, temperature)
    else:
        shifted, _ = filtering.filtered(logits, temperature, min_p, top_k, top_p)
    scores = shifted + noise.gumbel(seed, position, stream, logits.shape[1])
    return torch.where(temperature == 0, logits.argmax(dim=1), scores.argmax(dim=1))
