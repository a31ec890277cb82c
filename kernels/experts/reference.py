"""The definition of ``experts``."""

import torch

from deepinfer_plugins.kernels.formats import decode_mxfp4, decode_mxfp8
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
    """Apply to each row the experts chosen for it, of those that live here: ``w2 cast(swiglu(w13 x) * weight)``.

    Args:
        values: ``[n, k]``, e4m3.
        scales: ``[n, k / 32]``, uint8, UE8M0.
        ids: ``[n, topk]``, int64.
        weights: ``[n, topk]``, float32.
        w13: ``[num_experts, 2 * d, k / 2]``, uint8: packed e2m1, gate before up.
        w13_scales: ``[num_experts, 2 * d, k / 32]``, uint8, UE8M0.
        w2: ``[num_experts, k, d / 2]``, uint8: packed e2m1.
        w2_scales: ``[num_experts, k, d / 32]``, uint8, UE8M0.
        first_expert: Id of the first expert of ``w13`` and ``w2``.
        limit: See ``swiglu_and_cast``.

    Returns:
        ``[n, topk, k]``, bfloat16; zeros for an expert that does not live here. Both products are summed in float64
        and rounded once.
    """
    out = torch.zeros(*ids.shape, values.shape[1], dtype=torch.bfloat16, device=values.device)
    x = decode_mxfp8(values, scales)
    for row, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            local = expert - first_expert
            if not 0 <= local < w13.shape[0]:
                continue
            gate_up = (decode_mxfp4(w13[local], w13_scales[local]) @ x[row]).bfloat16()
            hidden = swiglu_and_cast(gate_up[None], weights[row, place, None], limit)
            out[row, place] = decode_mxfp4(w2[local], w2_scales[local]) @ decode_mxfp8(*hidden)[0]
    return out
