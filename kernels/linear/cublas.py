"""``linear`` by cuBLAS, which chooses its algorithm, and with it the order of sums, by the number of rows too.

Sums are in float32. Where cuBLAS cuts a row into parts, those of a bfloat16 result are added in bfloat16 unless
``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`` is off.
"""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """As the reference, but for the precision of sums; the bits of a row depend on how many rows there are."""
    if out_dtype == x.dtype:
        return torch.mm(x, weight.T)
    return torch.mm(x, weight.T, out_dtype=out_dtype)
