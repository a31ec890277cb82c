"""``hc_collapse`` by TileKernels; not run on hardware. Sums are in float32, in the definition's order."""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels.vendors import UnsupportedShape


def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """As the reference, but for the precision of sums.

    Raises:
        UnsupportedShape: If ``d`` is not a multiple of 128.
    """
    from tile_kernels.mhc import mhc_pre_apply_mix_fwd

    n, _, d = streams.shape
    if d % 128:
        raise UnsupportedShape(
            "hc_collapse", "TileKernels' mhc_pre_apply_mix_fwd", "a d that is a multiple of 128", f"{d}"
        )
    out = torch.empty(n, d, dtype=streams.dtype, device=streams.device)
    if n:
        mhc_pre_apply_mix_fwd(streams.contiguous(), pre.contiguous(), out)
    return out
