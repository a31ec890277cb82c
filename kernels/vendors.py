"""What the providers that call a vendor's library share. Imports no torch."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from deepinfer_plugins.kernels.spec import is_installed

# SGLang depends on the package, vLLM ships a copy.
DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")

# Triton's lower-level language, with the matrix unit of SM90.
GLUON = "triton.experimental.gluon.language.nvidia.hopper:warpgroup_mma"


class UnsupportedShape(ValueError):
    """A library's function does not take these sizes."""

    def __init__(self, op: str, function: str, takes: str, found: str) -> None:
        super().__init__(
            f"{op}: {function} takes {takes}, not {found}; unset DEEPINFER_PLUGINS_{op.upper()}, or set it to triton"
        )


def needs_deep_gemm(function: str) -> str:
    """A function of whichever DeepGEMM there is, as ``Provider.needs`` names it."""
    return " | ".join(f"{module}:{function}" for module in DEEP_GEMM)


@functools.cache
def deep_gemm() -> ModuleType:
    """The first DeepGEMM that is installed.

    Raises:
        ModuleNotFoundError: If none is.
    """
    for module in DEEP_GEMM:
        if is_installed(module):
            return importlib.import_module(module)
    raise ModuleNotFoundError(f"none of {', '.join(DEEP_GEMM)} is installed")
