"""``experts``, one after the other, each over the rows that chose it."""

import torch

from deepinfer_plugins.kernels.formats import decode_mxfp4, decode_mxfp8
from deepinfer_plugins.kernels.row_blocks import linear
from deepinfer_plugins.kernels.swiglu_and_cast.reference import swiglu_and_cast


def experts(
    values: torch.Tensor,
    scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scales: torch.Tensor,
    w2: torch.Tensor,
    w2_scales: torch.Tensor,
    first_expert: int,
    limit: float,
) -> torch.Tensor:
    """As the reference; an expert's products are by blocks of rows, so who shares it with a row has no influence."""
    out = torch.zeros(*ids.shape, values.shape[1], dtype=torch.bfloat16, device=values.device)
    local = ids - first_expert
    for expert in local.unique().tolist():
        if not 0 <= expert < w13.shape[0]:
            continue
        rows, places = (local == expert).nonzero(as_tuple=True)
        x = decode_mxfp8(values[rows], scales[rows])
        gate_up = _mxfp4_linear(x, w13[expert], w13_scales[expert])
        hidden = decode_mxfp8(*swiglu_and_cast(gate_up, weights[rows, places], limit))
        out[rows, places] = _mxfp4_linear(hidden, w2[expert], w2_scales[expert])
    return out


def _mxfp4_linear(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    def rows_of_weight(part: slice) -> torch.Tensor:
        return decode_mxfp4(weight[part], scales[part])

    return linear(x, weight.shape[0], rows_of_weight, torch.bfloat16)
