"""A chip is recognised without touching it, and one that is not supported is never taken for another."""

import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_plugins.core.settings import SettingError, Settings
from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.kernels import registry
from deepinfer_plugins.kernels.spec import Bitwise, Provider
from deepinfer_plugins.platforms import ascend950, detect, nvml
from deepinfer_plugins.platforms.ascend950 import Ascend950
from deepinfer_plugins.platforms.cpu import CPU
from deepinfer_plugins.platforms.nvml import Device

H200 = Device(0, "GPU-aa", "NVIDIA H200", (9, 0))
H200_B = Device(1, "GPU-ab", "NVIDIA H200", (9, 0))
B200 = Device(0, "GPU-bb", "NVIDIA B200", (10, 0))
B300 = Device(0, "GPU-bc", "NVIDIA B300", (10, 3))
RTX = Device(0, "GPU-cc", "NVIDIA RTX PRO 6000", (12, 0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine with these GPUs, and no NPU."""

    def with_gpus(*gpus: Device, torch_has_cuda: bool = True) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(nvml, "devices", lambda: list(gpus))
        monkeypatch.setattr(nvml, "torch_has_cuda", lambda: torch_has_cuda)
        monkeypatch.setattr(ascend950, "DEVICE_FILE", tmp_path / "davinci_manager")

    return with_gpus


@pytest.mark.parametrize(
    ("gpu", "arch"), [(H200, Arch.SM90), (B200, Arch.SM100), (B300, Arch.SM100)], ids=["H200", "B200", "B300"]
)
def test_nvidia(machine, gpu: Device, arch: Arch) -> None:
    machine(gpu)
    found = detect.detect()
    assert (found.arch, found.name) == (arch, gpu.name)
    assert str(found) == f"{arch.value} ({gpu.name})"
    assert detect.detect("nvidia") == found
    assert detect.detect("cpu").arch is Arch.CPU


def test_no_gpu_is_a_cpu(machine) -> None:
    machine()
    assert detect.detect().chip is CPU
    assert detect.detect().name


def test_cpu_build_of_torch_on_a_gpu_machine_is_a_cpu(machine) -> None:
    machine(H200, torch_has_cuda=False)
    assert detect.detect().arch is Arch.CPU
    with pytest.raises(detect.UnsupportedChip, match="nvidia.*built without CUDA"):
        detect.detect("nvidia")


def test_unknown_gpu_is_no_cpu(machine) -> None:
    machine(RTX)
    with pytest.raises(detect.UnsupportedChip, match=r"RTX PRO 6000 \(12.0\): supported are"):
        detect.detect()


def test_mixed_gpus(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(H200, Device(1, "GPU-cd", "NVIDIA B200", (10, 0)))
    with pytest.raises(detect.UnsupportedChip, match="different kinds: NVIDIA H200.*NVIDIA B200"):
        detect.detect()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert detect.detect().arch is Arch.SM100


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        ("", []),
        ("0", [0]),
        ("1,0", [1, 0]),
        ("-1", []),
        ("7,0", []),
        ("0,7,1", [0]),
        ("GPU-ab", [1]),
        ("GPU-a", []),
        ("MIG-0123", [0]),
    ],
)
def test_visible_devices_as_cuda_reads_them(machine, monkeypatch, value: str, indices: list[int]) -> None:
    machine(H200, H200_B)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert [device.index for device in nvml.visible()] == indices


def test_ascend_is_recognised_and_refused(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    with pytest.raises(detect.UnsupportedChip, match="DEEPINFER_ACCELERATOR=ascend"):
        detect.detect("ascend")
    ascend950.DEVICE_FILE.touch()
    assert Ascend950.detect() is None, "a driver without torch_npu is of no use"
    monkeypatch.setattr(ascend950, "find_spec", lambda name: object())
    found = detect.detect()
    assert found.chip is Ascend950
    assert any("not run on hardware" in reason for reason in found.chip.refusals(batch_invariant=False))


def test_refusals_name_operators_without_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Provider(
        "an_op", "torch", "x:y", frozenset({Arch.CPU}), batch_invariant=False, agrees=Bitwise()
    )
    monkeypatch.setattr(registry, "_PROVIDERS", {"an_op": {"torch": provider}})
    assert CPU.refusals(batch_invariant=False) == []
    (reason,) = CPU.refusals(batch_invariant=True)
    assert "no provider of an_op" in reason and "not batch-invariant" in reason


def test_want_follows_flag_and_environment(machine) -> None:
    machine(H200)
    assert detect.want(Settings()) == Want(Arch.SM90, batch_invariant=False)
    assert detect.want(Settings(batch_invariant=True)) == Want(Arch.SM90, batch_invariant=True)
    assert detect.want(Settings(), flag=("--x", True)) == Want(Arch.SM90, batch_invariant=True)
    with pytest.raises(SettingError, match="--x asks for False and DEEPINFER_BATCH_INVARIANT for True"):
        detect.want(Settings(batch_invariant=True), flag=("--x", False))


def test_detection_imports_no_torch() -> None:
    code = "import sys; from deepinfer_plugins.platforms import detect; detect.detect()"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_driver_that_answers_with_errors_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def nvmlInit_v2(self) -> int:
            return 9

    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: Broken())
    assert nvml.devices() == []
