"""Any CPU that torch runs on: for development and for tests, not for speed."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.platforms.chip import Chip, Defaults


class CPU(Chip):
    """The chip that every machine has; the last one asked."""

    arch = Arch.CPU
    torch_device = "cpu"
    formats = frozenset({"float64", "float32", "bfloat16"})
    # Enough for a few thousand tokens of the small checkpoint; a laptop must not swap.
    defaults = Defaults(eager=True, cache_bytes=256 << 20)

    @classmethod
    def detect(cls) -> str:
        try:
            with open("/proc/cpuinfo") as lines:
                names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        except OSError:
            names = []
        return names[0] if names else "CPU"
