"""``mxfp8_grouped_linear`` as one ``mxfp8_linear`` a group."""

import torch

from deepinfer_plugins.kernels.mxfp8_linear.torch import mxfp8_linear


def mxfp8_grouped_linear(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """As the reference; the order of a row's sums depends on ``k`` and ``m`` alone."""
    num_groups = values.shape[1]
    weights = weight.view(num_groups, -1, weight.shape[1])
    block_scales = weight_scales.view(num_groups, -1, weight_scales.shape[1])
    groups = [
        mxfp8_linear(values[:, group], scales[:, group], weights[group], block_scales[group])
        for group in range(num_groups)
    ]
    return torch.stack(groups, 1)
