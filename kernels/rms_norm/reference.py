"""The definition of ``rms_norm``."""

import torch

from deepinfer_plugins.kernels.row_blocks import sum_last


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row by its root mean square and scale it: ``x * rsqrt(mean(x^2) + eps) * weight``.

    Args:
        x: ``[n, d]``, bfloat16 or float32.
        weight: ``[d]``, bfloat16.
        eps: Added to the mean square, in units of ``x`` squared.

    Returns:
        ``[n, d]``, bfloat16. Computed in float64, rounded once.
    """
    wide = x.double()
    mean = sum_last(wide * wide) / x.shape[-1]
    return (wide * (mean + eps).rsqrt().unsqueeze(-1) * weight).bfloat16()
