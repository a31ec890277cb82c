"""What a chip is to this package, whichever engine drives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.kernels import registry


@dataclass(frozen=True, slots=True)
class Defaults:
    """What an engine is told where the user says nothing.

    Args:
        eager: Run without captured graphs.
        cache_bytes: Memory for caches; None lets the engine measure the device.
    """

    eager: bool
    cache_bytes: int | None


class Chip(ABC):
    """Facts of one chip family. Never instantiated: engine classes refer to it, they don't inherit it.

    Attributes:
        arch: The family kernels are built for.
        torch_device: The device type in torch.
        formats: Number formats that its matrix units multiply without converting first.
        defaults: See :class:`Defaults`.
        refusal: Why nothing may start on it yet; empty if it may.
    """

    arch: ClassVar[Arch]
    torch_device: ClassVar[str]
    formats: ClassVar[frozenset[str]]
    defaults: ClassVar[Defaults]
    refusal: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def detect(cls) -> str | None:
        """The chip's name if this process would run on it, else None. Touches no device, imports no torch."""

    @classmethod
    def refusals(cls, *, batch_invariant: bool) -> list[str]:
        """Why the model can't run on this chip; empty if it can."""
        reasons = [f"{cls.arch.value}: {cls.refusal}"] if cls.refusal else []
        want = Want(cls.arch, batch_invariant=batch_invariant)
        for op in registry.operators():
            try:
                registry.choose(op, want)
            except registry.NoProvider as error:
                reasons.append(str(error))
        return reasons
