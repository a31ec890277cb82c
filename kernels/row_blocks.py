"""Sums that don't depend on the batch: the building blocks of the ``torch`` providers.

A BLAS library picks its kernel, and with it the order of a sum, by the shape of the whole product; a
reduction does the same. So a row's result could change with the number of rows beside it. Here every product
has the same number of rows, and every long sum is made of additions whose order the code spells out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Rows of every product. Few, for a decode step of one row computes as many; a long prompt pays with a longer loop.
ROWS = 8

# Rows that fill whole vectors of any CPU whatever the width is. torch's vectorised exponentials and the scalar ones,
# which get what is left past the last whole vector, differ in the last bit.
WHOLE_VECTORS = 16

# Elements of a weight decoded to float64 at a time (32 MiB).
_WEIGHT_ELEMENTS = 1 << 22


def pad_rows(x: torch.Tensor, multiple: int, value: float = 0) -> torch.Tensor:
    """``x [n, ...]`` with rows of ``value`` added until ``n`` is a multiple of ``multiple``."""
    missing = -x.shape[0] % multiple
    if not missing:
        return x
    return torch.cat([x, x.new_full((missing, *x.shape[1:]), value)])


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` by blocks of ``ROWS`` rows.

    Args:
        x: ``[n, k]``, float64.
        weight: ``[m, k]``, float64.

    Returns:
        ``[n, m]``, float64. The bits of a row depend on that row and ``weight`` alone.
    """
    n = x.shape[0]
    blocks = [torch.mm(rows, weight.T) for rows in pad_rows(x, ROWS).split(ROWS)]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:n]


def linear(
    x: torch.Tensor,
    num_out: int,
    weight: Callable[[slice], torch.Tensor],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``x @ weight.T``, rounded once, decoding a bounded part of the weight at a time.

    Args:
        x: ``[n, k]``, float64.
        num_out: Rows ``m`` of the weight.
        weight: Gives the rows of a slice of the weight, ``[rows, k]``, float64. Slices start at multiples of 32.
        out_dtype: Dtype of the result.

    Returns:
        ``[n, m]``.
    """
    at_once = max(32, _WEIGHT_ELEMENTS // max(x.shape[1], 1) // 32 * 32)
    if num_out <= at_once:
        return matmul(x, weight(slice(0, num_out))).to(out_dtype)
    out = torch.empty(x.shape[0], num_out, dtype=out_dtype, device=x.device)
    for start in range(0, num_out, at_once):
        part = slice(start, min(start + at_once, num_out))
        out[:, part] = matmul(x, weight(part))
    return out


def sum_last(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by adding its second half to its first until one value is left.

    Args:
        x: ``[..., d]``, float64.

    Returns:
        ``[...]``. Every step is elementwise, so the order of summing depends on ``d`` alone.
    """
    # The same arithmetic, but a call of numpy's costs a fraction of torch's.
    return torch.from_numpy(_fold(x.numpy())) if x.is_cpu else _fold(x)


def _fold(x: Any) -> Any:
    """``sum_last`` of a tensor or of a numpy array."""
    while (width := x.shape[-1]) > 1:
        half = width // 2
        left_over = x[..., 2 * half :]
        x = x[..., :half] + x[..., half : 2 * half]
        if width % 2:
            x[..., :1] += left_over
    return x[..., 0]
