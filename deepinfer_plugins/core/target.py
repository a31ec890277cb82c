"""The machine a process runs on, as facts that never change while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Arch(Enum):
    """A chip family that a kernel can be built for."""

    CPU = "cpu"
    SM90 = "sm90"
    SM100 = "sm100"
    ASCEND950 = "ascend950"


@dataclass(frozen=True, slots=True)
class Want:
    """What a caller needs from an operator.

    Only facts known before the first request belong here. The number of tokens is
    not one of them: a provider chosen by batch size is not batch-invariant.
    """

    arch: Arch
    batch_invariant: bool = True

    def __str__(self) -> str:
        return f"{self.arch.value}, {'batch-invariant' if self.batch_invariant else 'any order of summing'}"
