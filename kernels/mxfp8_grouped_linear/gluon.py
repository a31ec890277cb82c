"""``mxfp8_grouped_linear`` with the bits of the Triton provider, faster on SM90 (``gluon_matmul.py``)."""

# mypy: ignore-errors

import torch

from deepinfer_plugins.kernels.gluon_matmul import mxfp8_matmul


def mxfp8_grouped_linear(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """As the reference, but for the precision of sums."""
    n, groups, _ = values.shape
    out = torch.empty(n, groups, weight.shape[0] // groups, dtype=torch.bfloat16, device=values.device)
    rows = (tensor.contiguous().view(n, -1) for tensor in (values, scales)) if n else ()
    if n:
        mxfp8_matmul(*rows, weight, weight_scales, out.view(n, -1), groups)
    return out
