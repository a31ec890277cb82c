"""The definition of ``mxfp8_grouped_linear``."""

import torch

from deepinfer_plugins.kernels.formats import decode_mxfp8, decode_mxfp8_weight


def mxfp8_grouped_linear(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """Multiply group ``g`` of each row by rows ``g * m .. (g + 1) * m`` of the weight.

    Args:
        values: ``[n, num_groups, k]``, e4m3; ``k`` a multiple of 32.
        scales: ``[n, num_groups, k / 32]``, uint8, UE8M0.
        weight: ``[num_groups * m, k]``, e4m3; ``m`` a multiple of 32.
        weight_scales: ``[num_groups * m / 32, k / 32]``, uint8, UE8M0.

    Returns:
        ``[n, num_groups, m]``, bfloat16. Summed in float64, rounded once.
    """
    num_groups, k = values.shape[1:]
    groups = decode_mxfp8_weight(weight, weight_scales).view(num_groups, -1, k)
    return torch.einsum("ngk,gmk->ngm", decode_mxfp8(values, scales), groups).bfloat16()
