"""The definition of ``swiglu_and_cast``."""

import torch

from deepinfer_plugins.kernels.formats import encode_mxfp8


def swiglu_and_cast(
    gate_up: torch.Tensor, weights: torch.Tensor | None, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit) * weight``, quantised to MXFP8.

    Args:
        gate_up: ``[n, 2 * d]``, bfloat16, gate first; ``d`` a multiple of 32.
        weights: ``[n]``, float32, or None for 1.
        limit: Bound of both.

    Returns:
        values: ``[n, d]``, e4m3.
        scales: ``[n, d / 32]``, uint8, UE8M0. The product is computed in float64 and rounded to float32 before it is
            quantised.
    """
    gate, up = gate_up.double().chunk(2, -1)
    gate = gate.clamp(max=limit)
    hidden = gate * gate.sigmoid() * up.clamp(-limit, limit)
    if weights is not None:
        hidden = hidden * weights[:, None]
    return encode_mxfp8(hidden.float())
