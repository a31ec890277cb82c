"""Which of our platform classes this machine needs. Imports neither torch nor SGLang."""

from __future__ import annotations

import os
from pathlib import Path

CPU = "deepinfer_plugins.sglang_ext.platforms:CpuPlatform"
CUDA = "deepinfer_plugins.sglang_ext.platforms:CudaPlatform"


def _has_nvidia() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*"))


def platform_class(accelerator: str | None) -> str | None:
    """``"module:Class"`` of the platform; None for a chip this package has no class for.

    Args:
        accelerator: ``DEEPINFER_ACCELERATOR``; None: as detected.
    """
    if accelerator == "ascend":
        return None
    return CUDA if accelerator == "nvidia" or _has_nvidia() else CPU
