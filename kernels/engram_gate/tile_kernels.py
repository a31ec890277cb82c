"""``engram_gate`` by TileKernels; not run on hardware.

A warp adds up a stream of a row in float32, in an order that follows from ``d`` alone. Where nothing agrees at all, its
gate is ``sigmoid(±1e-3)`` and not one half.
"""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels.vendors import UnsupportedShape

# The definition's least magnitude of what the gate's root is taken of.
_LEAST = 1e-6


def engram_gate(
    streams: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference, but for the precision of sums.

    Raises:
        UnsupportedShape: If ``d`` is not a multiple of 256, from 512 on.
    """
    from tile_kernels.engram import engram_gate_fwd

    d = streams.shape[2]
    if d % 256 or d < 512:
        raise UnsupportedShape(
            "engram_gate",
            "TileKernels' engram_gate_fwd",
            "a d that is a multiple of 256, from 512 on",
            f"{d}",
        )
    gated: torch.Tensor = engram_gate_fwd(
        streams.contiguous(),
        _side_by_side(keys, value),
        weight.contiguous(),
        eps,
        _LEAST,
        save_for_backward=False,
        image_token_mask=skip,
    )[0]
    return gated


def _side_by_side(keys: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``[n, num_streams + 1, d]``: keys, then the value. No copy where they are parts of one projection's result."""
    n, num_streams, d = keys.shape
    row = (num_streams + 1) * d
    follows = value.data_ptr() == keys.data_ptr() + num_streams * d * keys.itemsize
    if follows and keys.stride() == (row, d, 1) and value.stride() == (row, 1):
        return keys.as_strided((n, num_streams + 1, d), (row, d, 1))
    return torch.cat([keys, value[:, None]], dim=1)
