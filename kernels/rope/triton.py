"""``rope`` in float64, rounded once."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_formats import to_bfloat16

# Elements that a program copies or rotates at a time.
_TILE = 2048


def rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool) -> torch.Tensor:
    """As the reference."""
    n, num_heads, d = x.shape
    out = torch.empty(n, num_heads, d, dtype=x.dtype, device=x.device)
    half = table.shape[1] // 2
    plain = d - 2 * half
    size = n * num_heads
    if size:
        wide_half = triton.next_power_of_2(half)
        wide_plain = triton.next_power_of_2(plain) if plain else 0
        rows = max(1, _TILE // max(wide_half, wide_plain))
        _rope[(triton.cdiv(size, rows),)](
            out,
            x.contiguous(),
            positions.contiguous(),
            table.contiguous(),
            size,
            num_heads,
            d,
            plain,
            half,
            INVERSE=bool(inverse),
            ROWS=rows,
            PLAIN=wide_plain,
            HALF=wide_half,
        )
    return out


@triton.jit(do_not_specialize=["size"])
def _rope(
    out,
    x,
    positions,
    table,
    size,
    num_heads,
    d,
    plain,
    half,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    PLAIN: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < size
    place = (row * d)[:, None]
    if PLAIN > 0:
        column = tl.arange(0, PLAIN)[None, :]
        present = is_row[:, None] & (column < plain)
        tl.store(out + place + column, tl.load(x + place + column, mask=present, other=0.0), mask=present)
    pair = tl.arange(0, HALF)[None, :]
    present = is_row[:, None] & (pair < half)
    angle = tl.load(positions + row // num_heads, mask=is_row, other=0)[:, None] * (2 * half) + pair
    cos = tl.load(table + angle, mask=present, other=0.0).to(tl.float64)
    sin = tl.load(table + angle + half, mask=present, other=0.0).to(tl.float64)
    if INVERSE:
        sin = -sin
    place += plain + 2 * pair
    even = tl.load(x + place, mask=present, other=0.0).to(tl.float32).to(tl.float64)
    odd = tl.load(x + place + 1, mask=present, other=0.0).to(tl.float32).to(tl.float64)
    tl.store(out + place, to_bfloat16(even * cos - odd * sin), mask=present)
    tl.store(out + place + 1, to_bfloat16(even * sin + odd * cos), mask=present)
