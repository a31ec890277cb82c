"""NVIDIA devices, asked of the driver.

torch would do, but asking it for a device's capability creates a CUDA context, and an engine that
forks its workers afterwards fails. NVML creates none. It is called through ctypes since neither
engine-free environments nor every engine has a binding.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import sys
from dataclasses import dataclass
from typing import Any

_UUID_BYTES = 96
_NAME_BYTES = 96


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU as the driver numbers it."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int]


def devices() -> list[Device]:
    """Every NVIDIA GPU of the machine, visible to this process or not; none if there is no driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    try:
        return _enumerate(library)
    finally:
        library.nvmlShutdown()


def _enumerate(library: Any) -> list[Device]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        major, minor = ctypes.c_int(), ctypes.c_int()
        failed = (
            library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
            or library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_UUID_BYTES))
            or library.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES))
            or library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        )
        # A GPU that fell off the bus answers with an error; the others are still there.
        if not failed:
            found.append(Device(index, uuid.value.decode(), name.value.decode(), (major.value, minor.value)))
    return found


def visible() -> list[Device]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process, in its order."""
    everything = devices()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return everything
    found: list[Device] = []
    for entry in chosen.split(","):
        entry = entry.strip()
        if entry.startswith("MIG-"):
            # A slice has an id of its own; which GPU it is cut from does not matter, its kind does.
            match = everything[:1]
        else:
            match = [d for d in everything if str(d.index) == entry or (entry and d.uuid.startswith(entry))]
        # CUDA reads up to the first entry that names no device and ignores the rest.
        if len(match) != 1:
            break
        found += match
    return found


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, without importing it."""
    if (torch := sys.modules.get("torch")) is not None:
        return torch.version.cuda is not None
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def name_of(major: int) -> str | None:
    """The name of this process's first GPU if its compute capability has this major number."""
    if not torch_has_cuda():
        return None
    found = visible()
    return found[0].name if found and found[0].capability[0] == major else None
