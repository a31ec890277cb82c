"""The definition of ``mxfp8_linear``."""

import torch

from deepinfer_plugins.kernels.formats import decode_mxfp8, decode_mxfp8_weight


def mxfp8_linear(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """Multiply MXFP8 rows by a weight with one scale per 32x32 block.

    Args:
        values: ``[n, k]``, e4m3; ``k`` a multiple of 32.
        scales: ``[n, k / 32]``, uint8, UE8M0.
        weight: ``[m, k]``, e4m3.
        weight_scales: ``[ceil(m / 32), k / 32]``, uint8, UE8M0.

    Returns:
        ``[n, m]``, bfloat16. Summed in float64, rounded once.
    """
    return (decode_mxfp8(values, scales) @ decode_mxfp8_weight(weight, weight_scales).T).bfloat16()
