"""Which platform class vLLM gets from us, if any. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import os

from deepinfer_plugins.core.report import report
from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.platforms.detect import Found
from deepinfer_plugins.vllm_ext.v0_33 import interpreter

_GROUP = "vllm.platform_plugins"
CPU = "deepinfer_plugins.vllm_ext.v0_33.cpu.DeepInferCpuPlatform"
NVIDIA = "deepinfer_plugins.vllm_ext.v0_33.nvidia.DeepInferCudaPlatform"


def choose(found: Found) -> str | None:
    """Our class for the chip found; None if vLLM drives another one, or another package drives it."""
    if others := _others():
        report().problem(f"no platform of ours: vLLM takes only one, and {', '.join(others)} is installed")
        return None
    if found.arch in (Arch.SM90, Arch.SM100):
        return NVIDIA
    if found.arch is not Arch.CPU:
        return None
    interpreter.install()
    return CPU


def _others() -> list[str]:
    """Platform plugins of other packages that vLLM would also load."""
    allowed = os.environ.get("VLLM_PLUGINS")
    names = {point.name for point in importlib.metadata.entry_points(group=_GROUP)} - {"deepinfer"}
    return sorted(names if allowed is None else names & set(allowed.split(",")))
