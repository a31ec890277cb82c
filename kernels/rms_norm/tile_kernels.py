"""``rms_norm`` by TileKernels; not run on hardware.

Sums are in float32; which thread adds what, and in which order, follows from ``d`` alone.
"""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels.vendors import UnsupportedShape


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference, but for the precision of sums.

    Raises:
        UnsupportedShape: If ``d`` is not a multiple of 16, up to 8192.
    """
    from tile_kernels.quant import norm_forward

    d = x.shape[-1]
    if d % 16 or d > 8192:
        raise UnsupportedShape(
            "rms_norm", "TileKernels' norm_forward", "a d that is a multiple of 16, up to 8192", f"{d}"
        )
    if x.stride(0) % 16 or x.stride(1) != 1:
        x = x.contiguous()
    # Its result has the dtype of x.
    normed: torch.Tensor = norm_forward(x, weight.to(x.dtype), eps)[0]
    return normed.bfloat16()
