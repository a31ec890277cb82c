"""``swiglu_and_cast`` by TileKernels; not run on hardware.

The product is in float32, so that a value near the middle of two e4m3 numbers may become the other one. A warp works on
one row and decides for all its lanes whether the fast exponential will do, so a row depends on itself alone.
"""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels.vendors import UnsupportedShape


def swiglu_and_cast(
    gate_up: torch.Tensor, weights: torch.Tensor | None, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, but for the precision of the product.

    Raises:
        UnsupportedShape: If ``d`` is not a multiple of 128.
    """
    from tile_kernels.quant import swiglu_forward_and_per_token_cast

    d = gate_up.shape[1] // 2
    if d % 128:
        # Four scales make an int32, which must not reach into the next row.
        raise UnsupportedShape(
            "swiglu_and_cast",
            "TileKernels' swiglu_forward_and_per_token_cast",
            "a d that is a multiple of 128",
            f"{d}",
        )
    values, scales = swiglu_forward_and_per_token_cast(
        gate_up.contiguous(),
        "e4m3",
        32,
        topk_weights=weights,
        round_sf=True,
        use_packed_ue8m0=True,
        clamp_value=limit,
    )
    return values, scales.view(torch.uint8)
