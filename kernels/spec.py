"""What a provider of an operator is. Importing this module imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
        needs: Modules without which it can't run; ``module:function`` for one that must have a function, ``a | b``
            where either will do.
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
        missing = [need for need in self.needs if not any(map(is_installed, need.split(" | ")))]
        if missing:
            return f"needs {', '.join(missing)}, not installed"
        return ""

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        module, _, name = self.path.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


def is_installed(need: str) -> bool:
    """Whether ``module`` or ``module:function`` is there, by its files: an import takes seconds and may need a chip."""
    module, _, function = need.partition(":")
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not (inner or function):
        return spec is not None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *inner)
        for source in (path / "__init__.py", path.with_suffix(".py")):
            if source.is_file():
                return re.search(rf"\b{function}\b", source.read_text()) is not None
    return False
