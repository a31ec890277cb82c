"""``filter_log_probs``, with the definition's bits (``triton_sampling.py``)."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_sampling import (
    INFINITY,
    LAUNCH,
    PER_ONE,
    grid,
    is_kept,
    load_block,
    log64,
    parameters,
    prepare,
    shift,
)


def filter_log_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference."""
    n, num_entries = logits.shape
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    args = parameters(temperature, min_p, top_k, top_p)
    if n:
        _filter_log_probs[grid(n)](out, logits, *args, n, num_entries, **LAUNCH)
    return out


@triton.jit(do_not_specialize=["n"])
def _filter_log_probs(
    out,
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    n,
    num_entries,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < n
    present = is_row[:, None]
    logits += row[:, None] * num_entries
    out += row[:, None] * num_entries
    hot = tl.load(temperature + row, mask=is_row, other=0.0)
    if min_p is not None:
        min_p = tl.load(min_p + row, mask=is_row, other=0.0)
    if top_k is not None:
        top_k = tl.load(top_k + row, mask=is_row, other=0)
    if top_p is not None:
        top_p = tl.load(top_p + row, mask=is_row, other=1.0)
    top, best, k_value, k_id, p_value, p_id, mass = prepare(
        logits, hot, min_p, top_k, top_p, present, num_entries, True, ROWS, BLOCK
    )
    total = log64(mass.to(tl.float64) * PER_ONE)
    for start in range(0, num_entries, BLOCK):
        x, ids = load_block(logits, start, present, num_entries, BLOCK)
        shifted = shift(x, ids, hot, top, best)
        keep = is_kept(x, ids, shifted, best, min_p, k_value, k_id, p_value, p_id, present)
        log_probs = tl.where(keep, shifted - total[:, None], -INFINITY)
        tl.store(out + ids, log_probs.to(tl.float32), mask=present & (ids < num_entries))
