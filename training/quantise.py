"""Casts that a gradient passes through: forward as the release's format rounds, backward as if it did not.

Definitions: the table and the section "Casts" of ``deepinfer_plugins/model/README.md``.
"""

from __future__ import annotations

import torch

E4M3_MAX, E2M1_MAX = 448.0, 6.0


def straight_through(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """``rounded`` forward, the gradient of ``x`` backward."""
    return x + (rounded - x).detach()


def bf16(x: torch.Tensor) -> torch.Tensor:
    return straight_through(x, x.detach().bfloat16().float())


def power_of_two_at_least(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below ``x``, fp32, positive and normal."""
    bits = x.contiguous().view(torch.int32)
    return (((bits - 1) >> 23) + 1 << 23).view(torch.float32)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; ties to the even code."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (torch.round(x / step) * step).clamp(-E2M1_MAX, E2M1_MAX)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def mxfp8_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., d]`` to e4m3 values and powers of two, ``[..., d/32, 32]`` and ``[..., d/32, 1]``."""
    groups = x.unflatten(-1, (-1, 32))
    scale = power_of_two_at_least(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / E4M3_MAX)
    return e4m3(groups / scale), scale


def mxfp4_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., d]`` to e2m1 values and powers of two, ``[..., d/32, 32]`` and ``[..., d/32, 1]``."""
    groups = x.unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-126)
    scale = power_of_two_at_least(amax / E2M1_MAX)
    return e2m1(groups / scale), scale


def fp8_block_parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[out, in]``, multiples of 32, to e4m3 values ``[out, in]`` and one power of two per 32x32 block."""
    blocks = weight.unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
    scale = power_of_two_at_least(blocks.abs().amax((1, 3)).clamp(min=1e-4 * 2.0**-8) / E4M3_MAX)
    values = e4m3(blocks / scale[:, None, :, None])
    return values.flatten(2, 3).flatten(0, 1), scale


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    values, scale = mxfp8_parts(x.detach())
    return straight_through(x, (values * scale).flatten(-2))


def mxfp4(x: torch.Tensor) -> torch.Tensor:
    values, scale = mxfp4_parts(x.detach())
    return straight_through(x, (values * scale).flatten(-2))


def fp4(x: torch.Tensor) -> torch.Tensor:
    """The compressed cache: e2m1 in groups of 16 with an e4m3 scale."""
    groups = x.detach().unflatten(-1, (-1, 16))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-9)
    scale = e4m3(amax * (1 / 6))
    return straight_through(x, (e2m1(groups * (1 / scale)) * scale).flatten(-2))


def fp8_block(weight: torch.Tensor) -> torch.Tensor:
    values, scale = fp8_block_parts(weight.detach())
    return straight_through(weight, values * scale.repeat_interleave(32, 0).repeat_interleave(32, 1))
