"""The definition of ``engram_gate``."""

import torch

from deepinfer_plugins.kernels.row_blocks import sum_last


def engram_gate(
    streams: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    """Add the value to each stream ``x``, as far as the stream agrees with its key ``k``.

    ``a = d^-0.5 * sum(x * weight * k) * rsqrt(mean(x^2) + eps) * rsqrt(mean(k^2) + eps)``,
    ``gate = sigmoid(sign(a) * sqrt(max(|a|, 1e-6)))``, result ``x + gate * value``.

    Args:
        streams: ``[n, num_streams, d]``, bfloat16.
        keys: ``[n, num_streams, d]``, bfloat16.
        value: ``[n, d]``, bfloat16.
        weight: ``[num_streams, d]``, float32.
        eps: Added to both mean squares.
        skip: ``[n]``, bool, rows to leave unchanged; None for none.

    Returns:
        ``[n, num_streams, d]``, bfloat16. Computed in float64, rounded once.
    """
    x, k = streams.double(), keys.double()
    width = x.shape[-1]
    norms = (sum_last(x * x) / width + eps).rsqrt() * (sum_last(k * k) / width + eps).rsqrt()
    agreement = sum_last(x * weight * k) * norms * width**-0.5
    gate = (agreement.sign() * agreement.abs().clamp(min=1e-6).sqrt()).sigmoid()
    updated = (x + gate[..., None] * value.double()[:, None]).bfloat16()
    return updated if skip is None else torch.where(skip[:, None, None], streams, updated)
