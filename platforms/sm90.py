"""NVIDIA Hopper: H100, H200, H20, GH200."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.platforms import nvml
from deepinfer_plugins.platforms.chip import Chip, Defaults


class SM90(Chip):
    """FP8 tensor cores, no FP4: FP4 operands are widened before they are multiplied."""

    arch = Arch.SM90
    torch_device = "cuda"
    formats = frozenset({"float64", "float32", "bfloat16", "float8_e4m3fn"})
    defaults = Defaults(eager=False, cache_bytes=None)

    @classmethod
    def detect(cls) -> str | None:
        return nvml.name_of(major=9)
