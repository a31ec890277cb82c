"""``mxfp8_cast`` by TileKernels; not run on hardware.

Its reciprocal of 448 gives the scales that a division gives (``tests/kernels/test_vendors.py``), and the rest is exact.
"""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels.vendors import UnsupportedShape


def mxfp8_cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference.

    Raises:
        UnsupportedShape: If ``d`` is not a multiple of 128.
    """
    from tile_kernels.quant import per_token_cast

    if x.shape[-1] % 128:
        # Four scales make an int32, which must not reach into the next row.
        raise UnsupportedShape(
            "mxfp8_cast", "TileKernels' per_token_cast", "a d that is a multiple of 128", f"{x.shape[-1]}"
        )
    values, scales = per_token_cast(x.contiguous(), "e4m3", 32, round_sf=True, use_packed_ue8m0=True)
    return values, scales.view(torch.uint8)
