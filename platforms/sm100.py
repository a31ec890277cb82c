"""NVIDIA Blackwell for data centres: B200, GB200 (10.0), B300, GB300 (10.3). Not SM120, which has no TMEM."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.platforms import nvml
from deepinfer_plugins.platforms.chip import Chip, Defaults


class SM100(Chip):
    """FP4 and FP8 tensor cores with block scales: MXFP8, MXFP4, NVFP4 are multiplied as stored."""

    arch = Arch.SM100
    torch_device = "cuda"
    formats = frozenset({"float64", "float32", "bfloat16", "float8_e4m3fn", "mxfp8", "mxfp4", "nvfp4"})
    defaults = Defaults(eager=True, cache_bytes=None)

    @classmethod
    def detect(cls) -> str | None:
        return nvml.name_of(major=10)
