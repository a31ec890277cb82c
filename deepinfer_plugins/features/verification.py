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
    starts, counts = offsets[:-1, None], offsets.diff()[:, None]
    index = torch.arange(depth + 1, device=logits.device)
    row_of_token = torch.where(index < counts, starts + index, -1)
    request = torch.searchsorted(offsets, torch.arange(n, device=logits.device), right=True) - 1
    # The draft that a row judges is the next token of the longest prefix of its request.
    step = torch.arange(n, device=logits.device) - offsets[request]
    all_drafts = torch.nn.functional.pad(rows.prefix[offsets[request + 1] - 1], (0, 1), value=-1)
    draft = all_drafts.gather(1, step[:, None])[:, 0]

    sampled = state.sample(logits, rows)
    tokens, accepted = sampled.tokens, (draft >= 0) & (draft == sampled.tokens)
    overlap = torch.full_like(rows.position, torch.nan, dtype=torch.float64)
    drafted = state.record if drafted is None else drafted
    if state.uses("rejection"):
        by_rejection = state.by_rejection(rows.slot) & (draft >= 0)
        accepted &= ~by_rejection
        if drafted is not None:
            slots, width = drafted.tokens.shape
            place = (drafted.position[rows.slot] == rows.position[:, None]) & (
                drafted.tokens[rows.slot] == draft[:, None]
            )
            known = by_rejection & place.any(dim=1)
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
            accepted |= kept
            tokens = torch.where(known, token, tokens)
            overlap = torch.where(known, probability, overlap)

    # Row -1 stands for no row.
    accepted = torch.nn.functional.pad(accepted, (0, 1), value=False)
    tokens = torch.nn.functional.pad(tokens, (0, 1), value=-1)
    num_accepted = accepted[row_of_token].long().cumprod(dim=1).sum(dim=1)
    row_of_token = torch.where(index <= num_accepted[:, None], row_of_token, -1)
    return Verified(tokens[row_of_token], num_accepted, row_of_token, sampled.logits, overlap)
