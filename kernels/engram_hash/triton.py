"""``engram_hash`` by blocks of tokens."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 32


def engram_hash(
    context: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """As the reference."""
    n, ngram = context.shape
    num_heads = primes.shape[1]
    rows = torch.empty(n, (ngram - 1) * num_heads, dtype=torch.int64, device=context.device)
    if n:
        _engram_hash[(triton.cdiv(n, ROWS),)](
            rows,
            *(part.contiguous() for part in (context, multipliers, primes, offsets)),
            n,
            NGRAM=ngram,
            NUM_HEADS=num_heads,
            HEADS=triton.next_power_of_2(num_heads),
            ROWS=ROWS,
            num_warps=4,
        )
    return rows


@triton.jit(do_not_specialize=["n"])
def _engram_hash(
    rows,
    context,
    multipliers,
    primes,
    offsets,
    n,
    NGRAM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, HEADS)
    in_rows, in_heads = row < n, head < NUM_HEADS
    mixed = tl.load(context + row * NGRAM, mask=in_rows, other=0) * tl.load(multipliers)
    for place in tl.static_range(1, NGRAM):
        token = tl.load(context + row * NGRAM + place, mask=in_rows, other=0)
        mixed = mixed ^ (token * tl.load(multipliers + place))
        column = (place - 1) * NUM_HEADS + head
        prime = tl.load(primes + column, mask=in_heads, other=1)
        offset = tl.load(offsets + column, mask=in_heads, other=0)
        # Neither is negative, so the remainder's sign is no question.
        found = mixed[:, None] % prime[None, :] + offset[None, :]
        out = rows + row[:, None] * ((NGRAM - 1) * NUM_HEADS) + column[None, :]
        tl.store(out, found, mask=in_rows[:, None] & in_heads[None, :])
