"""``route`` with scores in float64, rounded where the definition rounds."""

# mypy: ignore-errors

import os

import torch
import triton
import triton.language as tl

# The interpreter pays per operation, not per element.
_ROWS = 32 if os.environ.get("TRITON_INTERPRET") == "1" else 1


def route(
    logits: torch.Tensor, bias: torch.Tensor, topk: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    n, num_experts = logits.shape
    ids = torch.empty(n, topk, dtype=torch.int64, device=logits.device)
    weights = torch.empty(n, topk, dtype=torch.float32, device=logits.device)
    if n:
        _route[(triton.cdiv(n, _ROWS),)](
            ids,
            weights,
            logits.contiguous(),
            bias.contiguous(),
            n,
            num_experts,
            num_experts if bias.dim() == 2 else 0,
            float(scaling),
            TOPK=topk,
            ROWS=_ROWS,
            PLACES=triton.next_power_of_2(topk),
            BLOCK=triton.next_power_of_2(num_experts),
        )
    return ids, weights


@triton.jit(do_not_specialize=["n"])
def _route(
    ids,
    weights,
    logits,
    bias,
    n,
    num_experts,
    bias_stride,
    SCALING: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, BLOCK)[None, :]
    present = (row < n) & (expert < num_experts)
    x = tl.load(logits + row * num_experts + expert, mask=present, other=0.0).to(tl.float64)
    # log(1 + u) lacks what 1 + u lost of u; the quotient gives it back.
    u = tl.exp(-tl.abs(x))
    more = 1.0 + u
    log1p = tl.where(more == 1.0, u, tl.log(more) * (u / tl.where(more == 1.0, 1.0, more - 1.0)))
    scores = tl.sqrt(tl.where(x < 0.0, 0.0, x) + log1p).to(tl.float32)
    keys = scores + tl.load(bias + row * bias_stride + expert, mask=present, other=0.0)
    # Whole numbers that rise with the rank: by the key, -0 like 0 and a NaN above all, then by the lower id.
    bits = (keys + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(keys == keys, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    rank = (bits.to(tl.int64) + 2147483648) * BLOCK + (BLOCK - 1 - expert)
    rank = tl.where(expert < num_experts, rank, -1)

    place = tl.arange(0, PLACES)[None, :]
    chosen_ids = tl.zeros((ROWS, PLACES), tl.int32)
    chosen = tl.zeros((ROWS, PLACES), tl.float32)
    for one in tl.static_range(TOPK):
        best = tl.max(rank, axis=1)[:, None]
        rank = tl.where(rank == best, -1, rank)
        winner = (BLOCK - 1 - best % BLOCK).to(tl.int32)
        score = tl.sum(tl.where(expert == winner, scores, 0.0), axis=1)[:, None]
        chosen_ids = tl.where(place == one, winner, chosen_ids)
        chosen = tl.where(place == one, score, chosen)
    wide = chosen.to(tl.float64)
    scaled = wide / (tl.sum(wide, axis=1)[:, None] + 1e-20) * SCALING
    out = row * TOPK + place
    stored = (row < n) & (place < TOPK)
    tl.store(ids + out, chosen_ids.to(tl.int64), mask=stored)
    tl.store(weights + out, scaled.to(tl.float32), mask=stored)
