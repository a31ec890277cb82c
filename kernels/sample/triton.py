"""``sample`` in one pass after the thresholds; with the definition's bits (``triton_sampling.py``)."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_sampling import (
    INFINITY,
    LAUNCH,
    find_best,
    grid,
    gumbel,
    is_kept,
    load_block,
    parameters,
    prepare,
    shift,
)


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
    """As the reference."""
    n, num_entries = logits.shape
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    key = (column.contiguous() for column in (seed, position, stream))
    args = (logits.contiguous(), *parameters(temperature, min_p, top_k, top_p), *key)
    if n:
        _sample[grid(n)](tokens, *args, n, num_entries, **LAUNCH)
    return tokens


@triton.jit(do_not_specialize=["n"])
def _sample(
    tokens,
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    seed,
    position,
    stream,
    n,
    num_entries,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < n
    present = is_row[:, None]
    logits += row[:, None] * num_entries
    if temperature is None:
        _, best = find_best(logits, present, num_entries, ROWS, BLOCK)
        tl.store(tokens + row, best.to(tl.int64), mask=is_row)
    else:
        hot = tl.load(temperature + row, mask=is_row, other=0.0)
        key = tl.load(seed + row, mask=is_row, other=0)
        place = tl.load(position + row, mask=is_row, other=0)
        tag = tl.load(stream + row, mask=is_row, other=0)
        if min_p is not None:
            min_p = tl.load(min_p + row, mask=is_row, other=0.0)
        if top_k is not None:
            top_k = tl.load(top_k + row, mask=is_row, other=0)
        if top_p is not None:
            top_p = tl.load(top_p + row, mask=is_row, other=1.0)
        if tl.max(hot, axis=0) == 0:
            top_only, first = find_best(logits, present, num_entries, ROWS, BLOCK)
            tl.store(tokens + row, first.to(tl.int64), mask=is_row)
        else:
            top, best, k_value, k_id, p_value, p_id, mass = prepare(
                logits, hot, min_p, top_k, top_p, present, num_entries, False, ROWS, BLOCK
            )
            highest = tl.full((ROWS,), -INFINITY, tl.float64)
            token = best
            for start in range(0, num_entries, BLOCK):
                x, ids = load_block(logits, start, present, num_entries, BLOCK)
                shifted = shift(x, ids, hot, top, best)
                keep = is_kept(x, ids, shifted, best, min_p, k_value, k_id, p_value, p_id, present)
                scores = tl.where(keep, shifted + gumbel(key, place, tag, start, BLOCK), -INFINITY)
                score = tl.max(scores, axis=1)
                where = start + tl.argmax(scores, axis=1)
                token = tl.where(score > highest, where.to(tl.int32), token)
                highest = tl.maximum(score, highest)
            tl.store(tokens + row, token.to(tl.int64), mask=is_row)
