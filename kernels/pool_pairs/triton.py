"""``pool_pairs`` in one pass, in float64 as in the definition."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_formats import to_bfloat16

BLOCK = 512


def pool_pairs(gates: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    n, _, d = gates.shape
    pooled = torch.empty(n, d, dtype=torch.bfloat16, device=gates.device)
    if n:
        _pool_pairs[(n, triton.cdiv(d, BLOCK))](
            pooled, gates.contiguous(), latents.contiguous(), d, BLOCK=BLOCK, num_warps=4
        )
    return pooled


@triton.jit
def _pool_pairs(pooled, gates, latents, d, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < d
    first = row * 2 * d + column
    second = first + d
    earlier_gate = tl.load(gates + first, mask=in_row, other=0.0).to(tl.float64)
    later_gate = tl.load(gates + second, mask=in_row, other=0.0).to(tl.float64)
    share = 1.0 / (1.0 + tl.exp(earlier_gate - later_gate))
    earlier = tl.load(latents + first, mask=in_row, other=0.0).to(tl.float64)
    later = tl.load(latents + second, mask=in_row, other=0.0).to(tl.float64)
    mean = (1.0 - share) * earlier + share * later
    tl.store(pooled + row * d + column, to_bfloat16(mean), mask=in_row)
