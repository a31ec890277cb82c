"""Holders of weights in the checkpoint's formats, each knowing the checkpoint's names of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from deepinfer_plugins.kernels.catalogue import Ops

# Rows and columns of a weight that share one scale.
WEIGHT_BLOCK = 32

# Sums a tensor over ranks, of which at most one has anything but zero at any place: an exact copy.
Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where a tensor of the checkpoint goes.

    Args:
        tensor: Filled by the loader; often a view into a fused weight.
        first_row: First row of the checkpoint's tensor to read, if ``tensor`` is a shard of it; None if
            it is the whole.
    """

    tensor: torch.Tensor
    first_row: int | None = None


Targets = Iterator[tuple[str, Target]]


def weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised weight; loading fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, ops: Ops, size: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.rms_norm = ops.rms_norm
        self.eps = eps
        self.weight = weight((size,), torch.bfloat16, device)

    def targets(self, prefix: str) -> Targets:
        yield f"{prefix}.weight", Target(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, size]``, bf16 or fp32, to bf16."""
        return self.rms_norm(x, self.weight, self.eps)


class Linear(nn.Module):
    """One or more bf16 matrices with the same input, side by side.

    Args:
        parts: Name in the checkpoint and number of output features of each.
        out_dtype: What the output is rounded to.
    """

    def __init__(
        self,
        ops: Ops,
        parts: Mapping[str, int],
        in_features: int,
        device: torch.device,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.linear = ops.linear
        self.parts = dict(parts)
        self.out_dtype = out_dtype
        self.weight = weight((sum(parts.values()), in_features), torch.bfloat16, device)

    def targets(self, prefix: str) -> Targets:
        for name, rows in zip(self.parts, self.weight.split(list(self.parts.values()))):
            yield f"{prefix}{name}.weight", Target(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """bf16 ``[n, in]`` to ``[n, out]``."""
        return self.linear(x, self.weight, self.out_dtype)


class Quantized:
    """Rows cast to MXFP8 once, for every FP8 linear that reads them."""

    def __init__(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        self.values = values
        self.scales = scales


class Fp8Linear(nn.Module):
    """One or more FP8 matrices with the same input, side by side; e4m3 with a scale per 32x32 block.

    Args:
        parts: Name in the checkpoint and number of output features of each. All but the last must
            be whole blocks of rows.
    """

    def __init__(self, ops: Ops, parts: Mapping[str, int], in_features: int, device: torch.device) -> None:
        super().__init__()
        self.ops = ops
        self.parts = dict(parts)
        blocks = [-(-rows // WEIGHT_BLOCK) for rows in parts.values()]
        self.weight = weight((sum(parts.values()), in_features), torch.float8_e4m3fn, device)
        self.scale = weight((sum(blocks), in_features // WEIGHT_BLOCK), torch.uint8, device)

    def targets(self, prefix: str) -> Targets:
        rows = list(self.parts.values())
        blocks = [-(-count // WEIGHT_BLOCK) for count in rows]
        for name, values, scales in zip(self.parts, self.weight.split(rows), self.scale.split(blocks)):
            yield f"{prefix}{name}.weight", Target(values)
            yield f"{prefix}{name}.scale", Target(scales)

    def forward(self, x: Quantized) -> torch.Tensor:
        """``[n, in]`` to bf16 ``[n, out]``."""
        return self.ops.mxfp8_linear(x.values, x.scales, self.weight, self.scale)

    def grouped(self, x: Quantized) -> torch.Tensor:
        """``[n, groups, in]`` to bf16 ``[n, groups, out / groups]``, each by its rows of the weight."""
        return self.ops.mxfp8_grouped_linear(x.values, x.scales, self.weight, self.scale)


def quantize(ops: Ops, x: torch.Tensor) -> Quantized:
    """Cast the rows of ``x``, bf16 ``[n, d]``, to MXFP8."""
    return Quantized(*ops.mxfp8_cast(x))
