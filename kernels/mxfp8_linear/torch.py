"""``mxfp8_linear`` by blocks of rows, decoding a bounded part of the weight at a time."""

import torch

from deepinfer_plugins.kernels.formats import decode_mxfp8, decode_mxfp8_weight
from deepinfer_plugins.kernels.row_blocks import linear


def mxfp8_linear(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """As the reference; the order of a row's sums depends on ``k`` and ``m`` alone."""

    def rows_of_weight(part: slice) -> torch.Tensor:
        return decode_mxfp8_weight(weight[part], weight_scales[part.start // 32 : -(-part.stop // 32)])

    x = decode_mxfp8(values, scales)
    return linear(x, weight.shape[0], rows_of_weight, torch.bfloat16, (weight, weight_scales))
