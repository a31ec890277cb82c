"""Which chip this process runs on. Imports no torch and touches no device."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_plugins.core.settings import Settings, prefer
from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.kernels import catalogue
from deepinfer_plugins.platforms import nvml
from deepinfer_plugins.platforms.ascend950 import Ascend950
from deepinfer_plugins.platforms.chip import Chip
from deepinfer_plugins.platforms.cpu import CPU
from deepinfer_plugins.platforms.sm90 import SM90
from deepinfer_plugins.platforms.sm100 import SM100

# In the order in which they are asked.
CHIPS: tuple[type[Chip], ...] = (SM100, SM90, Ascend950, CPU)
_OF_ACCELERATOR = {"nvidia": (SM100, SM90), "ascend": (Ascend950,), "cpu": (CPU,), None: CHIPS}


class UnsupportedChip(RuntimeError):
    """The machine has no chip that was asked for, or one that this package does not know."""


@dataclass(frozen=True, slots=True)
class Found:
    """A chip family and the name of the chip."""

    chip: type[Chip]
    name: str

    @property
    def arch(self) -> Arch:
        return self.chip.arch

    def __str__(self) -> str:
        return f"{self.arch.value} ({self.name})"


def detect(accelerator: str | None = None) -> Found:
    """The chip this process runs on.

    Args:
        accelerator: ``DEEPINFER_ACCELERATOR``; None: whatever there is, a CPU at last.

    Raises:
        UnsupportedChip: If there is no such chip, or a GPU that is neither SM90 nor SM100, or GPUs
            of different kinds.
    """
    gpus = nvml.visible() if nvml.torch_has_cuda() and accelerator in (None, "nvidia") else []
    described = ", ".join(f"{gpu.name} ({gpu.capability[0]}.{gpu.capability[1]})" for gpu in gpus)
    if len({gpu.capability for gpu in gpus}) > 1:
        raise UnsupportedChip(
            f"GPUs of different kinds: {described}; name those of one kind in CUDA_VISIBLE_DEVICES"
        )
    for chip in _OF_ACCELERATOR[accelerator]:
        # A GPU that no class knows must not fall through to the CPU: the engine would still use the GPU.
        if chip is CPU and gpus:
            break
        if name := chip.detect():
            return Found(chip, name)
    if gpus:
        raise UnsupportedChip(
            f"{described}: supported are compute capability 9.0 (Hopper) and 10.x (Blackwell); "
            "CUDA_VISIBLE_DEVICES= (empty) runs on the CPU"
        )
    why = (
        ""
        if accelerator == "ascend" or nvml.torch_has_cuda()
        else "; the installed torch is built without CUDA"
    )
    raise UnsupportedChip(
        f"DEEPINFER_ACCELERATOR={accelerator}: no such chip is visible to this process{why}"
    )


def want(settings: Settings, *, flag: tuple[str, bool | None] = ("", None)) -> Want:
    """What every operator is asked for in this process.

    Args:
        settings: The environment's.
        flag: The engine's own flag for batch invariance and its value, None if it was not given.
    """
    batch_invariant = prefer(
        "batch invariance", False, flag, ("DEEPINFER_BATCH_INVARIANT", settings.batch_invariant)
    )
    return Want(detect(settings.accelerator).arch, batch_invariant=batch_invariant)


def no_graphs(settings: Settings, *, asked: bool, flag: tuple[str, bool | None] = ("", None)) -> str:
    """Why this process runs the model without captured graphs; empty if it captures them.

    Args:
        settings: As of :func:`want`.
        asked: Whether graphs were asked for; else the chip's default holds.
        flag: As of :func:`want`.
    """
    wanted, found = want(settings, flag=flag), detect(settings.accelerator)
    if found.chip.torch_device != "cuda":
        return f"there are none on {found.arch.value}"
    if held_up := catalogue.not_capturable(wanted):
        return f"a provider waits for the device: {', '.join(held_up)}"
    if found.chip.defaults.eager and not asked:
        return f"not the default on {found.arch.value}, where they have not been run"
    return ""
