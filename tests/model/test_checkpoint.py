"""Reading checkpoints: the same values as the safetensors library, by ranges, for ranks, in bounded memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_plugins.model.checkpoint import INDEX_NAME, Checkpoint, Placement, resolve_model_folder
from deepinfer_plugins.model.make_checkpoint import make_checkpoint
from deepinfer_plugins.model.presets import small
from deepinfer_plugins.model.tensors import expected_tensors

_TABLE = "layers.1.engram.embed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make_checkpoint(folder, "tiny", shard_bytes=700_001)
    return folder


@pytest.fixture(scope="module")
def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors as the safetensors library reads them."""
    return {
        name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_every_tensor_has_the_stored_bits(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.names) == set(stored)
    for name, tensor in stored.items():
        read = checkpoint.read(name)
        assert read.shape == tensor.shape
        assert torch.equal(_bits(read), _bits(tensor)), name
        if tensor.dtype in (torch.int8, torch.float8_e8m0fnu):
            assert read.dtype == torch.uint8
        else:
            assert read.dtype == tensor.dtype


def test_rows(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint.open(folder)
    for start, stop in ((0, 1), (3, 1000), (7, 7), (1000, 1024)):
        rows = checkpoint.read_rows("embed.weight", start, stop)
        assert torch.equal(rows, stored["embed.weight"][start:stop])
    for start, stop in ((-1, 3), (4, 3), (0, 1025)):
        with pytest.raises(IndexError, match="embed.weight, which has 1024"):
            checkpoint.read_rows("embed.weight", start, stop)
    with pytest.raises(KeyError, match="no tensor embed"):
        checkpoint.read("embed")


def test_stream_goes_through_the_files_once(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    places = []
    weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    for name, tensor in checkpoint.stream():
        assert tensor.shape == checkpoint.spec(name).shape
        places.append((weight_map[name], name))
    assert len(places) == len(checkpoint.names)
    assert [shard for shard, _ in places] == sorted(shard for shard, _ in places)
    assert len({shard for shard, _ in places}) > 3
    chosen = {"head.weight", "embed.weight", "layers.2.attn.attn_sink"}
    assert {name for name, _ in checkpoint.stream(names=chosen)} == chosen


def test_load_fills_views_other_types_and_padding(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint.open(folder)
    fused = torch.zeros(3, 128, dtype=torch.bfloat16)
    columns = torch.zeros(1024, 2, 128, dtype=torch.bfloat16)
    confidence = torch.zeros(1, 160, dtype=torch.bfloat16)
    rows = stored[f"{_TABLE}.weight"].shape[0]
    table = torch.full((10, 32), 3.0).to(torch.float8_e4m3fn)
    scales = torch.zeros(10, 1, dtype=torch.uint8)
    checkpoint.load(
        [
            ("norm.weight", fused[1], 0),
            ("embed.weight", columns[:, 1], 0),
            ("mtp.0.confidence_head.proj.weight", confidence, 0),
            (f"{_TABLE}.weight", table, rows - 4),
            (f"{_TABLE}.scale", scales, rows - 4),
        ]
    )
    assert torch.equal(fused[1], stored["norm.weight"]) and not fused[[0, 2]].any()
    assert torch.equal(columns[:, 1], stored["embed.weight"]) and not columns[:, 0].any()
    assert torch.equal(confidence, stored["mtp.0.confidence_head.proj.weight"].bfloat16())
    assert (
        torch.equal(_bits(table[:4]), _bits(stored[f"{_TABLE}.weight"][-4:])) and not _bits(table[4:]).any()
    )
    assert torch.equal(scales[:4], _bits(stored[f"{_TABLE}.scale"][-4:])) and (scales[4:] == 127).all()
    with pytest.raises(ValueError, match=r"head.weight has rows of shape \[128\].* \[64\]"):
        checkpoint.load([("head.weight", torch.zeros(1024, 64, dtype=torch.bfloat16), 0)])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_engram_shares_make_up_the_table(folder: Path, stored: dict[str, torch.Tensor], size: int) -> None:
    checkpoint = Checkpoint.open(folder)
    weight, scale = stored[f"{_TABLE}.weight"], stored[f"{_TABLE}.scale"]
    shares = [
        checkpoint.read_engram(1, Placement(engram_rank=rank, engram_size=size)) for rank in range(size)
    ]
    values = torch.cat([_bits(share[0]) for share in shares])
    scales = torch.cat([share[1] for share in shares])
    assert torch.equal(values[: len(weight)], _bits(weight)) and not values[len(weight) :].any()
    assert torch.equal(scales[: len(scale)], _bits(scale)) and (scales[len(scale) :] == 127).all()
    assert len({share[0].shape for share in shares}) == 1
    if size > 1:
        assert len(values) % math.lcm(256, size) == 0 and len(values) - len(weight) < math.lcm(256, size)


def test_experts_are_spread_over_ranks(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    shares = [set(checkpoint.wanted(Placement(ep_rank=rank, ep_size=4))) for rank in range(4)]
    everywhere = set.intersection(*shares)
    assert set.union(*shares) == set(checkpoint.names)
    assert not [name for name in everywhere if ".ffn.experts." in name]
    assert all(".ffn.experts." in name for share in shares for name in share - everywhere)
    # 8 experts a layer and 4 a draft layer, over 4 ranks.
    assert {name for name in shares[1] if ".experts." in name and ".w1.weight" in name} == {
        *(f"layers.{layer}.ffn.experts.{expert}.w1.weight" for layer in range(6) for expert in (2, 3)),
        "mtp.0.ffn.experts.1.w1.weight",
    }
    streamed = dict(checkpoint.stream(Placement(ep_rank=1, ep_size=4, engram_rank=2, engram_size=3)))
    assert set(streamed) == shares[1]
    assert torch.equal(
        _bits(streamed[f"{_TABLE}.weight"]),
        _bits(checkpoint.read_engram(1, Placement(engram_rank=2, engram_size=3))[0]),
    )


def test_placements_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="ep_rank is 2 of ep_size 2"):
        Placement(ep_rank=2, ep_size=2)
    with pytest.raises(ValueError, match="engram_rank is -1"):
        Placement(engram_rank=-1)
    with pytest.raises(ValueError, match="8 experts do not divide evenly over 3"):
        Placement(ep_size=3).experts(8)


def test_release_engram_shares() -> None:
    """The padding rule at the true size: 384 006 168 rows over 72 ranks."""
    shares = [Placement(engram_rank=rank, engram_size=72).engram_rows(384_006_168) for rank in range(72)]
    assert all(before.stop == after.start for before, after in zip(shares, shares[1:]))
    assert shares[-1].stop % math.lcm(256, 72) == 0 and 0 <= shares[-1].stop - 384_006_168 < math.lcm(256, 72)


def test_one_file_without_an_index(stored: dict[str, torch.Tensor], folder: Path, tmp_path: Path) -> None:
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.read("head.weight"), stored["head.weight"])


def test_names_with_the_model_prefix(stored: dict[str, torch.Tensor], folder: Path, tmp_path: Path) -> None:
    save_file({f"model.{name}": tensor for name, tensor in stored.items()}, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    weight_map = {f"model.{name}": "a.safetensors" for name in stored}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.names) == set(stored)
    assert torch.equal(checkpoint.read("head.weight"), stored["head.weight"])


def test_confidence_head_may_be_bf16(stored: dict[str, torch.Tensor], folder: Path, tmp_path: Path) -> None:
    name = "mtp.0.confidence_head.proj.weight"
    save_file(stored | {name: stored[name].bfloat16()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert Checkpoint.open(tmp_path).read(name).dtype == torch.bfloat16


def test_release_opens_without_reading_data(tmp_path: Path) -> None:
    """The true shapes: headers in front of holes, 510 GB that no disk has. Only the headers can be read in time."""
    folder = tmp_path / "release"
    config = make_checkpoint(folder, "release", with_weights=False)
    specs = expected_tensors(config)
    shards: dict[str, list[str]] = {}
    for name, shard in json.loads((folder / INDEX_NAME).read_text())["weight_map"].items():
        shards.setdefault(shard, []).append(name)
    for shard, names in shards.items():
        header, end = {}, 0
        for name in names:
            start, end = end, end + specs[name].num_bytes
            header[name] = {
                "dtype": specs[name].dtype,
                "shape": specs[name].shape,
                "data_offsets": [start, end],
            }
        encoded = json.dumps(header).encode()
        with (folder / shard).open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            file.truncate(8 + len(encoded) + end)
    start = time.process_time()
    checkpoint = Checkpoint.open(folder)
    assert time.process_time() - start < 10
    assert len(checkpoint.names) == 96_085
    # The last rows of a 98 GB table, past any 32-bit offset.
    assert not _bits(checkpoint.read_rows("layers.14.engram.embed.weight", 384_016_680, 384_016_682)).any()


_MEASURE = """
import re, sys
from pathlib import Path
from deepinfer_plugins.model.checkpoint import Checkpoint

def peak_bytes():
    # Not ru_maxrss, which a child process inherits from its parent.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

checkpoint = Checkpoint.open(sys.argv[1])
# Whatever a first read sets up is not the checkpoint's.
checkpoint.read("norm.weight")
before = peak_bytes()
tensors = dict(checkpoint.stream())
print(peak_bytes() - before)
"""


def test_a_full_load_takes_hardly_more_memory_than_the_checkpoint(tmp_path: Path) -> None:
    config = replace(small(), engram_vocab_size=100_000)
    folder = tmp_path / "large"
    config = make_checkpoint(folder, config)
    size = sum(spec.num_bytes for spec in expected_tensors(config).values())
    assert size > 80_000_000
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    grown = int(result.stdout)
    # It must grow by the tensors, or this measures nothing.
    assert 0.9 * size < grown < 1.1 * size


def test_progress_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = Checkpoint.open(folder)
    list(checkpoint.stream(progress=True))
    assert "Loading weights" in capsys.readouterr().out


# -- Finding the folder --


def test_a_folder_is_itself(folder: Path) -> None:
    assert resolve_model_folder(str(folder), hf_model_dir="/nowhere", download=None) == folder


def test_hf_model_dir_stands_for_an_id(folder: Path) -> None:
    assert resolve_model_folder("deepseek-ai/DeepSeek-V4.1-Flash", hf_model_dir=str(folder)) == folder
    with pytest.raises(
        FileNotFoundError, match="DEEPINFER_HF_MODEL_DIR is '/nowhere', which is not a folder"
    ):
        resolve_model_folder("deepseek-ai/DeepSeek-V4.1-Flash", hf_model_dir="/nowhere")


def test_an_id_is_downloaded_by_the_engine(folder: Path) -> None:
    asked = []

    def download(model: str) -> str:
        asked.append(model)
        return str(folder)

    assert resolve_model_folder("owner/name", download=download) == folder
    assert asked == ["owner/name"]


def test_neither_folder_nor_id(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a folder nor a Hugging Face id"):
        resolve_model_folder(str(tmp_path / "missing"), download=str)


def _fails(model: str) -> str:
    raise OSError("cannot reach the hub")


def test_offline_with_nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        FileNotFoundError, match="owner/name is not in the Hugging Face cache.*HF_HUB_OFFLINE"
    ):
        resolve_model_folder("owner/name", download=_fails)


def test_online_the_engines_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(OSError, match="cannot reach the hub"):
        resolve_model_folder("owner/name", download=_fails)
