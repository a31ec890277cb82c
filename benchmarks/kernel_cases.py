"""What a measurement of an operator needs to know of it; the cases themselves are in modules of their own.

A module of cases has ``cases(config) -> list[KernelCase]`` and is named in ``MODULES``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_plugins.model.config import ModelConfig

Rival = tuple[str, Callable[[dict[str, Any]], Callable[[], Any]]]

MODULES = ("dense_cases", "attention_cases", "token_cases")


@dataclass(frozen=True)
class KernelCase:
    """An operator at one shape of weights.

    Args:
        op: The operator.
        name: What it is in the model, e.g. ``wq_b``; unique among the cases of ``op``.
        shape: Its sizes, to be printed.
        make: Arguments of the operator, by name, for a number of tokens.
        rows: Names of the arguments whose first dimension is the tokens.
        num_bytes: Least bytes to be read and written for a number of tokens.
        num_flops: Multiplications and additions, for a number of tokens.
        rivals: What computes the same from the same rows, in any order of summing. Each is a name and what makes a call
            from the operator's arguments, which may prepare weights beforehand and is not timed. One may need what is
            not installed: that is recorded, and costs nothing else.
        bounds: The same of what does less than the operator, such as multiplying rows that were decoded beforehand.
        most_tokens: More are not measured.
        written: For an operator that writes records at ``slots`` and returns nothing: the names of their pages.
    """

    op: str
    name: str
    shape: str
    make: Callable[[int, Draw], dict[str, Any]]
    rows: tuple[str, ...]
    num_bytes: Callable[[int], int]
    num_flops: Callable[[int], int]
    rivals: tuple[Rival, ...] = ()
    bounds: tuple[Rival, ...] = ()
    most_tokens: int = 8192
    written: tuple[str, ...] = ()


class Draw:
    """Seeded random tensors, made on the device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        if dtype is torch.float8_e4m3fn:
            return self.normal(*shape, scale=scale).to(dtype)
        drawn = torch.empty(shape, dtype=dtype, device=self.device)
        return drawn.normal_(0, scale, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype, device=self.device)

    def choices(self, rows: int, count: int, of: int) -> torch.Tensor:
        """``count`` different integers below ``of`` in each row."""
        keys = torch.rand(rows, of, generator=self.generator, device=self.device)
        return keys.topk(count, dim=1).indices


def all_cases(config: ModelConfig) -> list[KernelCase]:
    """The cases of every module."""
    return [case for name in MODULES for case in importlib.import_module(name).cases(config)]
