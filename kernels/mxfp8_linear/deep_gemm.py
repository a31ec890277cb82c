"""``mxfp8_linear`` by DeepGEMM, on an SM100; not run on hardware.

Sums are in float32 and run up ``k``: tiles follow from the number of rows, ``k`` is never split.
"""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels.packed_scales import PACKED_VALUES, pack, pack_weight
from deepinfer_plugins.kernels.vendors import UnsupportedShape, deep_gemm


def mxfp8_linear(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """As the reference, but for the precision of sums.

    Raises:
        UnsupportedShape: If ``k`` is not a multiple of 128, or ``m`` not one of 8.
    """
    (n, k), m = values.shape, weight.shape[0]
    if k % PACKED_VALUES or m % 8:
        raise UnsupportedShape(
            "mxfp8_linear",
            "DeepGEMM's fp8_fp4_gemm_nt",
            f"a k that is a multiple of {PACKED_VALUES} and an m that is one of 8",
            f"{k} and {m}",
        )
    out = torch.empty(n, m, dtype=torch.bfloat16, device=values.device)
    if n:
        deep_gemm().fp8_fp4_gemm_nt(
            (values.contiguous(), pack(scales[:, None])[:, 0]),
            (weight, pack_weight(weight_scales, m, 1)[0]),
            out,
            # Rows of the two operands, and columns of both, that share a scale.
            recipe=(1, 1, 32),
        )
    return out
