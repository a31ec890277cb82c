"""The definition of ``linear``."""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply rows by a weight.

    Args:
        x: ``[n, k]``, bfloat16.
        weight: ``[m, k]``, bfloat16.
        out_dtype: bfloat16 or float32.

    Returns:
        ``[n, m]``. Summed in float64, rounded once.
    """
    return (x.double() @ weight.double().T).to(out_dtype)
