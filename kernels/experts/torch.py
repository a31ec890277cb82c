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
    n, topk = ids.shape
    num_experts, width = w13.shape[:2]
    local = ids.flatten() - first_expert
    rows = {e: (local == e).nonzero().squeeze(1) for e in local.unique().tolist() if 0 <= e < num_experts}
    x = decode_mxfp8(values, scales)
    gate_up = torch.zeros(n * topk, width, dtype=torch.bfloat16, device=values.device)
    for expert, chosen in rows.items():
        gate_up[chosen] = _mxfp4_linear(x[chosen // topk], w13[expert], w13_scales[expert])
    hidden = decode_mxfp8(*swiglu_and_cast(gate_up, weights.flatten(), limit))
    out = torch.zeros(n * topk, x.shape[1], dtype=torch.bfloat16, device=values.device)
    for expert, chosen in rows.items():
        out[chosen] = _mxfp4_linear(hidden[chosen], w2[expert], w2_scales[expert])
    return out.view(n, topk, x.shape[1])


def _mxfp4_linear(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    def rows_of_weight(part: slice) -> torch.Tensor:
        return decode_mxfp4(weight[part], scales[part])

    return linear(x, weight.shape[0], rows_of_weight, torch.bfloat16)
