"""Huawei Ascend 950 (PR and DT): recognised and refused. Nothing of this package has run on one."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.platforms.chip import Chip, Defaults

# The driver's control device: there when any Ascend NPU is, and readable without CANN.
DEVICE_FILE = Path("/dev/davinci_manager")

# torch_npu.npu.get_soc_version() on every Ascend 950. Asking initialises the device.
SOC_VERSION = 260


class Ascend950(Chip):
    """MXFP8 and MXFP4 matrix units, 32-value blocks."""

    arch = Arch.ASCEND950
    torch_device = "npu"
    formats = frozenset({"float32", "bfloat16", "float8_e4m3fn", "mxfp8", "mxfp4"})
    defaults = Defaults(eager=True, cache_bytes=None)
    refusal = (
        "not run on hardware. This class only recognises the chip, so that nothing starts by accident and "
        "generates tokens that nobody has checked"
    )

    @classmethod
    def detect(cls) -> str | None:
        """Whether there is an Ascend NPU; which one, only :meth:`wrong_soc` can say."""
        if not DEVICE_FILE.exists() or find_spec("torch_npu") is None:
            return None
        return "Ascend NPU (model not asked: that would initialise it)"

    @classmethod
    def wrong_soc(cls) -> str:
        """Why this process's NPU is no Ascend 950; empty if it is one. Initialises it: for workers only."""
        version = import_module("torch_npu").npu.get_soc_version()
        if version == SOC_VERSION:
            return ""
        return f"SoC version {version} is no Ascend 950 ({SOC_VERSION}); older Ascends have no FP8 or FP4"

    @classmethod
    def refusals(cls, *, batch_invariant: bool) -> list[str]:
        reasons = super().refusals(batch_invariant=batch_invariant)
        if batch_invariant:
            reasons.append(
                "ascend950: no batch-invariant mode, as in DeepInfer; unset DEEPINFER_BATCH_INVARIANT"
            )
        return reasons
