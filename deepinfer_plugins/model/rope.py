"""Rotary tables: plain for sliding-window layers, YaRN for compressed ones."""

from __future__ import annotations

import math

import torch

from deepinfer_plugins.model.config import ModelConfig, RopeScaling


def _frequencies(theta: float, size: int, scaling: RopeScaling | None) -> torch.Tensor:
    """Angle per position of each pair, ``[size / 2]``, float64."""
    pair = torch.arange(size // 2, dtype=torch.float64)
    plain = theta ** (-2.0 * pair / size)
    if scaling is None:
        return plain

    def turning_pair(turns: float) -> float:
        """The pair (as a real number) that makes so many turns over the original context."""
        length = scaling.original_max_position_embeddings
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = float(max(math.floor(turning_pair(scaling.beta_fast)), 0))
    high = float(min(math.ceil(turning_pair(scaling.beta_slow)), size - 1))
    if low == high:
        high += 0.001
    stretched = ((pair - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


def rope_table(config: ModelConfig, compressed: bool, length: int, device: torch.device) -> torch.Tensor:
    """Cosines, then sines, of every pair's angle at every position.

    Computed on the CPU in float64 and rounded once, so that every device has the same bits.

    Args:
        config: The model.
        compressed: Whether for layers with compressed keys (their own base, and YaRN if configured).
        length: Number of positions.
        device: Where the table goes.

    Returns:
        ``[length, qk_rope_head_dim]``, float32.
    """
    theta = config.compress_rope_theta if compressed else config.rope_theta
    scaling = config.rope_scaling if compressed else None
    frequencies = _frequencies(theta, config.qk_rope_head_dim, scaling)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device)
