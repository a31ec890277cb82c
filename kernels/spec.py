"""What a provider of an operator is. Importing this module imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer_plugins.core.target import Arch, Want


@dataclass(frozen=True, slots=True)
class Bitwise:
    """The provider's result equals the reference's, bit for bit."""


@dataclass(frozen=True, slots=True)
class Within:
    """The provider's result is near the reference's: |a - b| <= atol + rtol * |b|."""

    atol: float
    rtol: float


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of an operator, as data.

    Args:
        op: The operator, e.g. ``"rms_norm"``; also its folder under ``kernels/``.
        name: The provider, e.g. ``"triton"``; also its file.
        path: ``"module:function"``, imported on the first call of :meth:`load`.
        archs: Chips it is built for.
        batch_invariant: Whether row ``i`` of the result has the same bits whatever
            the other rows hold and however many there are.
        agrees: How near it is to the operator's reference.
        needs: Importable modules without which it can't run.
        capturable: Whether it never waits for the device, and what it launches follows from shapes alone, so that a
            CUDA graph can hold it.
        unchecked: Chips it is built for on which no run has shown that its rows depend on nothing else. In invariant
            mode it serves there only if asked for by name.
    """

    op: str
    name: str
    path: str
    archs: frozenset[Arch]
    batch_invariant: bool
    agrees: Bitwise | Within
    needs: tuple[str, ...] = ()
    capturable: bool = False
    unchecked: frozenset[Arch] = frozenset()

    def refusal(self, want: Want) -> str:
        """Why it can't serve ``want``; empty if it can."""
        if want.arch not in self.archs:
            built = ", ".join(sorted(a.value for a in self.archs))
            return f"built for {built}, not {want.arch.value}"
        if want.batch_invariant and not self.batch_invariant:
            return "not batch-invariant"
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if missing:
            return f"needs {', '.join(missing)}, not installed"
        return ""

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        module, _, name = self.path.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function
