"""``mxfp8_grouped_linear``: all groups at once if the weight stays decoded, otherwise one ``mxfp8_linear`` a group."""

import torch

from deepinfer_plugins.kernels.formats import decode_mxfp8, decode_mxfp8_weight
from deepinfer_plugins.kernels.mxfp8_linear.torch import mxfp8_linear
from deepinfer_plugins.kernels.row_blocks import ROWS, decoded, pad_rows


def mxfp8_grouped_linear(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """As the reference; the order of a row's sums depends on the shape and the kind of the weight alone."""
    n, num_groups, k = values.shape
    kept = decoded(
        (weight, weight_scales), weight.numel(), lambda: decode_mxfp8_weight(weight, weight_scales)
    )
    if kept is not None:
        x = pad_rows(decode_mxfp8(values, scales), ROWS).transpose(0, 1)
        weights = kept.view(num_groups, -1, k).mT
        blocks = [torch.bmm(rows, weights) for rows in x.split(ROWS, 1)]
        out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
        return out[:, :n].transpose(0, 1).to(torch.bfloat16, memory_format=torch.contiguous_format)
    weights = weight.view(num_groups, -1, k)
    block_scales = weight_scales.view(num_groups, -1, weight_scales.shape[1])
    groups = [
        mxfp8_linear(values[:, group], scales[:, group], weights[group], block_scales[group])
        for group in range(num_groups)
    ]
    return torch.stack(groups, 1)
