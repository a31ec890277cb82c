"""``accept_or_resample``, with the definition's bits (``triton_sampling.py``)."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels import noise
from deepinfer_plugins.kernels.accept_or_resample import reference
from deepinfer_plugins.kernels.triton_sampling import (
    INFINITY,
    LAUNCH,
    ONE,
    PER_ONE,
    exp64,
    grid,
    gumbel,
    is_kept,
    load_block,
    log64,
    parameters,
    prepare,
    shift,
    to_uniform,
    words,
)

MARGIN = tl.constexpr(reference.MARGIN)
TARGET = tl.constexpr(noise.TARGET)
COIN = tl.constexpr(noise.COIN)


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
    """As the reference."""
    n, num_entries = logits.shape
    accepted = torch.empty(n, dtype=torch.bool, device=logits.device)
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    overlap = torch.empty(n, dtype=torch.float64, device=logits.device)
    key = (column.contiguous() for column in (seed, position, draft_token, draft_row))
    args = (logits.contiguous(), *parameters(temperature, min_p, top_k, top_p), *key)
    if n:
        results = (accepted, tokens, overlap)
        _accept_or_resample[grid(n)](*results, *args, draft_log_probs.contiguous(), n, num_entries, **LAUNCH)
    return accepted, tokens, overlap


@triton.jit(do_not_specialize=["n"])
def _accept_or_resample(
    accepted,
    tokens,
    overlap,
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    seed,
    position,
    draft_token,
    draft_row,
    draft_log_probs,
    n,
    num_entries,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < n
    drafted = tl.load(draft_row + row, mask=is_row, other=-1)
    has_draft = drafted >= 0
    if min_p is not None:
        min_p = tl.load(min_p + row, mask=is_row, other=0.0)
    if top_k is not None:
        top_k = tl.load(top_k + row, mask=is_row, other=0)
    if top_p is not None:
        top_p = tl.load(top_p + row, mask=is_row, other=1.0)
    logits += row[:, None] * num_entries
    draft_log_probs += tl.maximum(drafted, 0)[:, None] * num_entries
    if tl.max(drafted, axis=0) < 0:
        tl.store(accepted + row, has_draft, mask=is_row)
        tl.store(tokens + row, drafted * 0 - 1, mask=is_row)
        tl.store(overlap + row, tl.zeros((ROWS,), tl.float64), mask=is_row)
    else:
        present = has_draft[:, None]
        hot = tl.load(temperature + row, mask=is_row, other=0.0)
        top, best, k_value, k_id, p_value, p_id, mass = prepare(
            logits, hot, min_p, top_k, top_p, present, num_entries, True, ROWS, BLOCK
        )
        total = log64(mass.to(tl.float64) * PER_ONE)
        key = tl.load(seed + row, mask=is_row, other=0)
        place = tl.load(position + row, mask=is_row, other=0)
        draft = tl.load(draft_token + row, mask=is_row, other=0)

        highest = tl.full((ROWS,), -INFINITY, tl.float64)
        token = best
        left = tl.zeros((ROWS,), tl.int64)
        ratio = tl.zeros((ROWS,), tl.float64)
        for start in range(0, num_entries, BLOCK):
            x, ids = load_block(logits, start, present, num_entries, BLOCK)
            inside = present & (ids < num_entries)
            shifted = shift(x, ids, hot, top, best)
            keep = is_kept(x, ids, shifted, best, min_p, k_value, k_id, p_value, p_id, present)
            target = tl.where(keep, shifted - total[:, None], -INFINITY)
            proposed = tl.load(draft_log_probs + ids, mask=inside, other=-INFINITY).to(tl.float64)
            # What neither could sample has no ratio, and is not accepted.
            odds = tl.where(target == -INFINITY, 0.0, exp64(tl.minimum(target - proposed, 0.0)))
            ratio += tl.sum(tl.where(ids == draft[:, None], odds, 0.0), axis=1)
            residual = tl.maximum(exp64(target) - exp64(proposed - MARGIN), 0.0)
            residual = tl.where(inside, residual, 0.0)
            left += tl.sum(tl.floor(residual * ONE + 0.5).to(tl.int64), axis=1)
            tag = tl.full((ROWS,), TARGET, tl.int64)
            scores = log64(residual) + gumbel(key, place, tag, start, BLOCK)
            score = tl.max(scores, axis=1)
            where = start + tl.argmax(scores, axis=1)
            token = tl.where(score > highest, where.to(tl.int32), token)
            highest = tl.maximum(score, highest)
        zero = tl.zeros((ROWS,), tl.int64)
        w0, w1, _, _ = words(key, place, zero + COIN, zero)
        kept = has_draft & (to_uniform(w0, w1) < ratio)
        chosen = tl.where(kept, draft, token.to(tl.int64))
        probability = tl.maximum(1.0 - left.to(tl.float64) * PER_ONE, 0.0)
        tl.store(accepted + row, kept, mask=is_row)
        tl.store(tokens + row, tl.where(has_draft, chosen, -1), mask=is_row)
        tl.store(overlap + row, tl.where(has_draft, probability, 0.0), mask=is_row)
