"""``linear`` by DeepGEMM; not run on hardware.

Sums are in float32 and run up ``k``: tiles follow from the number of rows, ``k`` is never split.
"""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels.vendors import UnsupportedShape, deep_gemm

# What the tensor memory accelerator wants rows to begin at multiples of.
_ALIGNED_BYTES = 16


def linear(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """As the reference, but for the precision of sums. Rows of the result may be apart.

    Raises:
        UnsupportedShape: If ``k`` is not a multiple of 8.
    """
    (n, k), m = x.shape, weight.shape[0]
    if k * x.itemsize % _ALIGNED_BYTES:
        raise UnsupportedShape("linear", "DeepGEMM's bf16_gemm_nt", "a k that is a multiple of 8", f"{k}")
    step = _ALIGNED_BYTES // out_dtype.itemsize
    out = torch.empty(n, -(-m // step) * step, dtype=out_dtype, device=x.device)[:, :m]
    if n:
        deep_gemm().bf16_gemm_nt(x.contiguous(), weight, out)
    return out
