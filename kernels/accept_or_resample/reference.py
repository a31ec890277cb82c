"""The definition of ``accept_or_resample``."""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels import elementary, filtering, noise

# Taken from the draft's log-probabilities: it keeps a residual from vanishing by rounding where draft and target agree.
# It moves the distribution of the output by at most 1 - exp(-5e-5).
MARGIN = 5e-5


def accept_or_resample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
    draft_token: torch.Tensor,
    draft_row: torch.Tensor,
    draft_log_probs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token-level rejection sampling against the draft's whole distribution.

    With the target's log-probabilities ``t`` (those of ``filter_log_probs``, in float64) and the draft's ``d``, the
    draft token ``v`` is accepted iff ``u < exp(min(0, t[v] - d[v]))``, ``u`` being the uniform of stream
    ``noise.COIN`` and entry 0. In place of a rejected one stands the entry with the highest ``log(max(exp(t) - exp(d
    - 5e-5), 0)) + gumbel``, with noise of stream ``noise.TARGET``; ties: the lower id. If nothing is left of any
      entry, the highest logit.

    Args:
        logits: ``[n, vocab_size]``, float32; -inf for what is barred.
        temperature: ``[n]``, float64; 0: greedy.
        min_p: ``[n]``, float64, 0 for off; None: off for all. Filters: ``filtering.filtered``.
        top_k: ``[n]``, int64, 0 for off; None: off for all.
        top_p: ``[n]``, float64, 1 for off; None: off for all.
        seed: ``[n]``, int64; the bits of an unsigned number.
        position: ``[n]``, int64: the absolute position of the draft token.
        draft_token: ``[n]``, int64, from 0 on.
        draft_row: ``[n]``, int64: the row of ``draft_log_probs`` that it was sampled from; -1: this row holds no
            draft.
        draft_log_probs: ``[m, vocab_size]``, float32; -inf for what the draft could not sample.

    Returns:
        accepted: ``[n]``, bool; False where there is no draft. A draft that the target's filters remove is rejected.
        token: ``[n]``, int64: the draft's if accepted, else the one in its place; -1 where there is no draft.
        overlap: ``[n]``, float64: how probable acceptance was before the draft token was drawn, less the margin: one
            minus the residual's sum in steps of 2^-40, but not below 0; 0 where there is no draft.
    """
    present = draft_row >= 0
    n = logits.shape[0]
    if not draft_log_probs.shape[0]:
        return torch.zeros_like(present), draft_row.new_full((n,), -1), temperature.new_zeros(n)
    target = filtering.log_probs(*filtering.filtered(logits, temperature, min_p, top_k, top_p))
    draft = draft_log_probs[draft_row.clamp(min=0)].double()
    token = draft_token.clamp(min=0)[:, None]
    ratio = elementary.exp((target.gather(1, token) - draft.gather(1, token)).clamp(max=0.0))[:, 0]
    coin = noise.uniform(seed, position, torch.full_like(seed, noise.COIN), 1)[:, 0]
    accepted = present & (coin < ratio)
    residual = (elementary.exp(target) - elementary.exp(draft - MARGIN)).clamp(min=0.0)
    scores = elementary.log(residual)
    scores += noise.gumbel(seed, position, torch.full_like(seed, noise.TARGET), logits.shape[1])
    best = torch.where(residual.amax(dim=1) > 0, scores.argmax(dim=1), logits.argmax(dim=1))
    chosen = torch.where(accepted, draft_token, best)
    left = (residual * float(filtering.ONE)).add_(0.5).floor_().to(torch.int64).sum(dim=1)
    overlap = (1.0 - left.double() * (1.0 / filtering.ONE)).clamp_(min=0.0)
    return accepted, torch.where(present, chosen, -1), torch.where(present, overlap, 0.0)
