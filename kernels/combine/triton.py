"""``combine`` in float64, in order, rounded once."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_formats import to_bfloat16

_BLOCK = 1024


def combine(chosen: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    n, topk, d = chosen.shape
    out = torch.empty(n, d, dtype=torch.bfloat16, device=shared.device)
    if n * d:
        _combine[(triton.cdiv(n * d, _BLOCK),)](
            out, chosen.contiguous(), shared.contiguous(), n * d, d, TOPK=topk, BLOCK=_BLOCK
        )
    return out


@triton.jit(do_not_specialize=["size"])
def _combine(out, chosen, shared, size, d, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    present = place < size
    total = tl.load(shared + place, mask=present, other=0.0).to(tl.float32).to(tl.float64)
    first = chosen + place // d * d * TOPK + place % d
    for one in tl.static_range(TOPK):
        total += tl.load(first + one * d, mask=present, other=0.0).to(tl.float32).to(tl.float64)
    tl.store(out + place, to_bfloat16(total), mask=present)
