"""SGLang's view of the machines our model runs on."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from sglang.srt.platforms.cuda import CudaSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

ATTENTION_BACKEND = "deepinfer"


class CudaPlatform(CudaSRTPlatform):
    """NVIDIA. It stays the engine's own platform in every question the engine asks of a chip."""


class CpuPlatform(SRTPlatform):
    """A plain CPU.

    SGLang's in-tree CPU platform demands compiled Intel kernels at import, so this is an out-of-tree
    one: that makes the engine ask the platform instead of a table of devices.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    # No Triton, no graphs: the engine then takes its plain torch paths.
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def set_device(self, device: Any) -> None:
        """There is one."""

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def get_current_memory_usage(self, device: Any = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_default_attention_backend(self) -> str:
        # For models that are not ours; ours names its own backend.
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU
