"""From a checkpoint into the network: everything finds its place, and little memory is needed on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.checkpoint import Checkpoint
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.layers import Target
from deepinfer_plugins.model.loading import load
from deepinfer_plugins.model.make_checkpoint import make_checkpoint
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.model.presets import small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loading") / "checkpoint"
    make_checkpoint(path, "tiny")
    return path


def build(folder: Path, draft: bool = False) -> tuple[DeepseekV41, Checkpoint]:
    checkpoint = Checkpoint.open(folder)
    model = DeepseekV41(
        checkpoint.config,
        load_ops(Want(Arch.CPU)),
        device=torch.device("cpu"),
        max_positions=16,
        vocabulary=CompressedVocabulary.from_folder(folder, checkpoint.config.vocab_size),
        draft=draft,
    )
    return model, checkpoint


@pytest.mark.parametrize("draft", [False, True])
def test_every_weight_is_filled_by_one_tensor(folder: Path, draft: bool) -> None:
    model, checkpoint = build(folder, draft)
    for parameter in model.parameters():
        parameter.view(torch.uint8).fill_(0xFF)
    load(model, checkpoint)
    filled = 0
    for name, target in model.targets():
        want = checkpoint.read(name).to(target.tensor.dtype)
        assert_same_bits(target.tensor.detach().contiguous(), want, name)
        filled += target.tensor.numel() * target.tensor.element_size()
    # What is derived at load is not in the checkpoint.
    derived = sum(layer.engram.gate_weight.nbytes for layer in model.layers if layer.engram is not None)
    assert filled + derived == sum(parameter.nbytes for parameter in model.parameters())
    assert any(name.startswith("mtp.") for name, _ in model.targets()) == draft


def test_a_tensor_without_a_place_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, checkpoint = build(folder)
    places = dict(model.targets())
    del places["norm.weight"]
    places["layers.0.attn.surprise"] = Target(torch.empty(3))
    places["head.weight"] = Target(torch.empty(5, 7))
    monkeypatch.setattr(model, "targets", lambda: iter(places.items()))
    with pytest.raises(RuntimeError) as error:
        load(model, checkpoint)
    for problem in (
        "norm.weight has no place in the model",
        "layers.0.attn.surprise is not in the checkpoint",
        "head.weight has shape [1024, 128], but its place has [5, 7]",
    ):
        assert problem in str(error.value)


_MEASURE = """
import re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_loading import build
from deepinfer_plugins.model.loading import load

def peak_bytes():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

# Whatever a first model sets up in the process is not the weights'.
load(*build(Path(sys.argv[3])))
before = peak_bytes()
model, checkpoint = build(Path(sys.argv[1]), draft=True)
load(model, checkpoint)
print(peak_bytes() - before)
"""


def test_loading_takes_hardly_more_memory_than_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    make_checkpoint(large, replace(small(), engram_vocab_size=100_000))
    size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert size > 80_000_000
    here = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(large), str(here), str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=here.parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    # It must grow by the weights, or this measures nothing.
    assert 0.8 * size < int(re.findall(r"\d+", result.stdout)[-1]) < 1.1 * size
