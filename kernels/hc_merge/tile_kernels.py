"""``hc_merge`` by TileKernels; not run on hardware. Sums are in float32, in the definition's order."""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels.vendors import UnsupportedShape


def hc_merge(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """As the reference, but for the precision of sums.

    Raises:
        UnsupportedShape: If ``d`` is not a multiple of 128.
    """
    from tile_kernels.mhc import mhc_post_fwd

    n, _, d = streams.shape
    if d % 128:
        raise UnsupportedShape(
            "hc_merge", "TileKernels' mhc_post_fwd", "a d that is a multiple of 128", f"{d}"
        )
    if not n:
        return torch.empty_like(streams)
    # One sequence, of n tokens.
    x, streams, post, comb = (part.contiguous()[None] for part in (x, streams, post, comb))
    merged: torch.Tensor = mhc_post_fwd(x, streams, post[..., None], comb)[0]
    return merged
