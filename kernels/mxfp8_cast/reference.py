"""The definition of ``mxfp8_cast``."""

import torch

from deepinfer_plugins.kernels.formats import encode_mxfp8


def mxfp8_cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to e4m3 with one power-of-two scale per 32 values.

    Args:
        x: ``[n, d]``, bfloat16 or float32; ``d`` a multiple of 32.

    Returns:
        values: ``[n, d]``, ``float8_e4m3fn``, rounded to nearest, ties to even.
        scales: ``[n, d / 32]``, uint8, UE8M0. The least power of two that brings the group's greatest magnitude
            (taken to be at least 1e-4) to at most 448.
    """
    return encode_mxfp8(x)
