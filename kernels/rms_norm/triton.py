"""``rms_norm`` in float64: the sum is so near that the order of its terms does not show in bfloat16."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_formats import to_bfloat16

# Elements that a program holds at a time.
_TILE = 4096


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference."""
    n, d = x.shape
    out = torch.empty(n, d, dtype=torch.bfloat16, device=x.device)
    block = min(triton.next_power_of_2(d), _TILE)
    rows = _TILE // block
    if n:
        x = x if x.stride(1) == 1 else x.contiguous()
        _rms_norm[(triton.cdiv(n, rows),)](
            out, x, weight.contiguous(), n, d, x.stride(0), float(eps), ROWS=rows, BLOCK=block, num_warps=8
        )
    return out


@triton.jit(do_not_specialize=["n"])
def _rms_norm(out, x, weight, n, d, stride, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    squares = tl.zeros((ROWS, BLOCK), tl.float64)
    for start in range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        present = (row < n) & (column < d)
        wide = tl.load(x + row * stride + column, mask=present, other=0.0).to(tl.float32).to(tl.float64)
        squares += wide * wide
    factor = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / d + EPS)
    for start in range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        present = (row < n) & (column < d)
        wide = tl.load(x + row * stride + column, mask=present, other=0.0).to(tl.float32).to(tl.float64)
        scale = tl.load(weight + column, mask=column < d, other=0.0).to(tl.float32).to(tl.float64)
        tl.store(out + row * d + column, to_bfloat16(wide * factor[:, None] * scale), mask=present)
