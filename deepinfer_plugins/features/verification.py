"""Which drafts a request keeps, and the token after them.

Coupling: a draft is kept iff it is the token that the model itself samples at that position. So the output is what it
would be without drafts, whatever was drafted and however many drafts were verified.

Rejection: a draft is kept with probability ``min(1, target / draft)``, and a rejected one replaced by a sample of
what the draft's distribution lacks (``kernels/accept_or_resample``). So the output has the model's distribution, but
is another sample than without drafts. It keeps more drafts than coupling does when sampling is hot.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepinfer_plugins.features.sampling import DraftRecord, Rows, SamplingState


class Verified(NamedTuple):
    """What each request of a step generated; ``w`` is one more than the width of the rows' prefixes.

    Args:
        tokens: ``[B, w]``, int64: the drafts kept and one token more, padded with -1. All -1 for a request without
            rows.
        num_accepted: ``[B]``, int64: drafts kept.
        row_of_token: ``[B, w]``, int64: the row that each token was sampled from, padded with -1.
        logits: ``[n, vocab_size]``, fp32: processed, as in ``Sampled``.
        overlap: ``[n]``, float64: how probable acceptance was before the draft was drawn, of rows verified by
            rejection; nan for all others.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    row_of_token: torch.Tensor
    logits: torch.Tensor
    overlap: torch.Tensor


def verify(
    state: SamplingState,
    logits: torch.Tensor,
    rows: Rows,
    offsets: torch.Tensor,
    drafted: DraftRecord | None = None,
) -> Verified:
    """Verify the drafts of each request, and sample the token after those kept.

    A request's rows stand together: row ``i`` has its first ``i`` drafts as prefix, so that its last row has all of
    them. A draft of -1 is never kept.

    Args:
        state: Parameters and history of the requests.
        logits: ``[n, vocab_size]``, fp32.
        rows: The same rows.
        offsets: ``[B + 1]``, int64: where each request's rows start; a request may have none.
        drafted: What drafts verified by rejection were sampled from; None: what the state recorded. A draft that is
            not the one recorded for its position is not kept.
    """
    n, depth = rows.prefix.shape
    num_requests = offsets.shape[0] - 1
    sampled = state.sample(logits, rows)
    overlap = torch.full_like(rows.position, torch.nan, dtype=torch.float64)
    if n == 0:
        nothing = offsets.new_full((num_requests, depth + 1), -1)
        return Verified(nothing, torch.zeros_like(offsets[1:]), nothing, sampled.logits, overlap)
    # By request and place in its window; where it has no row that far, another's, which does not count.
    index = torch.arange(depth + 1, device=logits.device)
    row = offsets[:-1, None] + index
    is_row = row < offsets[1:, None]
    row = row.clamp_(max=n - 1)
    # A request's last row has all of its drafts, of which row i judges the i-th. No token is -1.
    drafts = rows.prefix[offsets[1:] - 1]
    tokens = sampled.tokens[row]
    accepted = (drafts == tokens[:, :depth]) & is_row[:, :depth]
    drafted = state.record if drafted is None else drafted
    if state.uses("rejection"):
        by_rejection = (state.by_rejection(rows.slot)[row] & is_row)[:, :depth] & (drafts >= 0)
        accepted &= ~by_rejection
        if drafted is not None:
            # By row, as the operator wants it; the last one takes what is no draft of rejection's.
            draft = drafts.new_full((n + 1,), -1)
            draft[torch.where(by_rejection, row[:, :depth], n)] = drafts
            draft = draft[:-1]
            slots, width = drafted.tokens.shape
            place = (drafted.position[rows.slot] == rows.position[:, None]) & (
                drafted.tokens[rows.slot] == draft[:, None]
            )
            known = (draft >= 0) & place.any(dim=1)
            draft_row = rows.slot % slots * width + place.int().argmax(dim=1)
            kept, token, probability = state.ops.accept_or_resample(
                sampled.logits,
                *state.filters(rows.slot),
                state.seeds(rows.slot),
                rows.position,
                draft,
                torch.where(known, draft_row, -1),
                drafted.log_probs.flatten(0, 1),
            )
            accepted |= kept[row][:, :depth] & by_rejection
            tokens = torch.where(known, token, sampled.tokens)[row]
            overlap = torch.where(known, probability, overlap)
    num_accepted = accepted.cumprod(dim=1).sum(dim=1)
    counts = is_row & (index <= num_accepted[:, None])
    return Verified(
        torch.where(counts, tokens, -1), num_accepted, torch.where(counts, row, -1), sampled.logits, overlap
    )
