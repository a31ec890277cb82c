"""Random checkpoints: in the release's format, reproducible, and alive."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from deepinfer_plugins.commands import make_checkpoint as command
from deepinfer_plugins.model.checkpoint import INDEX_NAME, Checkpoint
from deepinfer_plugins.model.config import ConfigError, ModelConfig
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.make_checkpoint import make_checkpoint
from deepinfer_plugins.model.oracle import Oracle, compressed_vocab
from deepinfer_plugins.model.presets import PRESETS, preset, release, small, tiny
from deepinfer_plugins.model.tensors import expected_tensors
from deepinfer_plugins.model.tokenizer_data import (
    BOS_TOKEN,
    EOS_TOKEN,
    IMAGE_TOKEN,
    PAD_TOKEN,
    build_tokenizer,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    make_checkpoint(folder)
    return folder


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_files(folder: Path) -> None:
    assert ModelConfig.from_folder(folder) == small()
    names = sorted(path.name for path in folder.iterdir() if path.suffix != ".safetensors")
    assert names == [
        "config.json",
        "generation_config.json",
        INDEX_NAME,
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    index = json.loads((folder / INDEX_NAME).read_text())
    specs = expected_tensors(small())
    assert index["weight_map"].keys() == specs.keys()
    assert index["metadata"]["total_size"] == sum(spec.num_bytes for spec in specs.values())


def test_the_default_has_every_kind_of_layer() -> None:
    """What the issue lists, by the tensors that only that kind has."""
    names = expected_tensors(small()).keys()

    def layers(part: str) -> list[int]:
        return sorted(
            int(name.split(".")[1]) for name in names if name.startswith("layers.") and part in name
        )

    assert small().compress_ratios[:2] == (0, 0)
    assert layers("compressor.wgate.weight") == [2, 4, 6]
    assert layers("compressor.wkv.weight") == [2, 4, 6, 8] and small().decoder_start == 8
    assert layers("indexer.wq_b.weight") == [2, 4, 6, 8, 10] and small().candidate_source_layer_id == 8
    assert layers("engram.embed.weight") == [1, 4]
    assert len(layers("shared_experts.w1.weight")) == 12
    assert {name.split(".")[1] for name in names if name.startswith("mtp.")} == {"0", "1", "2"}
    assert "mtp.2.markov_head.head.weight" in names and "mtp.2.confidence_head.proj.weight" in names


def test_the_same_arguments_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "again")
    assert _digests(tmp_path / "again") == _digests(folder)
    make_checkpoint(tmp_path / "other", seed=1)
    other = _digests(tmp_path / "other")
    changed = {name for name, digest in _digests(folder).items() if other[name] != digest}
    assert changed == {path.name for path in folder.glob("*.safetensors")}


def test_values_do_not_depend_on_the_shards(folder: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "many", shard_bytes=100_000)
    shards = list((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 30
    many, few = Checkpoint.open(tmp_path / "many"), Checkpoint.open(folder)
    for shard in shards:
        with safe_open(shard, "pt") as file:
            names = list(file.keys())
        assert len(names) == 1 or sum(expected_tensors(small())[name].num_bytes for name in names) <= 100_000
    for name in few.names:
        assert torch.equal(many.read(name).view(torch.uint8), few.read(name).view(torch.uint8)), name


def test_tensors_differ_from_each_other(folder: Path) -> None:
    seen = set()
    for name, tensor in Checkpoint.open(folder).stream():
        if tensor.numel() >= 32:
            digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).digest()
            assert digest not in seen, name
            seen.add(digest)


def test_scales_differ_from_their_neighbours(folder: Path) -> None:
    """A scale read from the wrong block must matter."""
    for name, tensor in Checkpoint.open(folder).stream():
        if name.endswith(".scale") and tensor.numel() >= 16:
            assert 100 < tensor.min() and tensor.max() < 127 and len(tensor.unique()) == 3, name


def test_values_are_finite_and_spread(folder: Path) -> None:
    for name, tensor in Checkpoint.open(folder).stream():
        if tensor.dtype == torch.uint8:
            continue
        values = tensor.float()
        assert values.isfinite().all(), name
        assert values.numel() < 4 or values.std() > 0.01, name


def test_the_model_is_alive(tmp_path: Path) -> None:
    """Logits spread, and positions, prompts and far tokens make a difference."""
    config = make_checkpoint(tmp_path / "tiny", "tiny")
    tensors = dict(Checkpoint.open(tmp_path / "tiny").stream())
    oracle = Oracle(config, tensors, compressed_vocab(tmp_path / "tiny" / "tokenizer.json"))
    tokens = torch.randint(30, 1000, (120,), generator=torch.Generator().manual_seed(7)).tolist()
    logits = oracle.logits(tokens)
    assert logits.isfinite().all()
    assert 2 < logits.std() < 4
    assert len(logits.argmax(-1).unique()) > 60
    tokens[3] += 1
    far = oracle.logits(tokens)[60:]
    # A window is 16 tokens: only compressed keys can carry the change this far.
    assert ((far - logits[60:]).abs().amax(-1) > 0.05).all()


def test_greedy_text_does_not_run_in_a_circle(tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path / "tiny", "tiny")
    tensors = dict(Checkpoint.open(tmp_path / "tiny").stream())
    oracle = Oracle(config, tensors, compressed_vocab(tmp_path / "tiny" / "tokenizer.json"))
    assert len(set(oracle.generate([0, 77, 400], 24))) > 18


def test_a_configuration_of_ones_own(tmp_path: Path) -> None:
    shape = replace(tiny(), vocab_size=300, image_token_id=290, dspark_noise_token_id=291)
    config = make_checkpoint(tmp_path / "own", shape)
    assert config.vocab_size == 300
    assert config == ModelConfig.from_folder(tmp_path / "own")
    assert (
        CompressedVocabulary.from_folder(tmp_path / "own", 300).size
        == config.engram_compressed_vocab_size
        < 300
    )
    Checkpoint.open(tmp_path / "own")


def test_release_without_weights(tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path / "release", "release", with_weights=False)
    assert config == release() == ModelConfig.from_folder(tmp_path / "release")
    assert sorted(path.name for path in (tmp_path / "release").iterdir()) == [
        "config.json",
        "generation_config.json",
        INDEX_NAME,
    ]
    index = json.loads((tmp_path / "release" / INDEX_NAME).read_text())
    assert len(index["weight_map"]) == 96_085


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "release"])
def test_presets_know_their_compressed_vocabulary(name: str) -> None:
    config = preset(name)
    tokenizer = build_tokenizer(config.vocab_size, config.image_token_id, config.dspark_noise_token_id)
    vocabulary = CompressedVocabulary.from_tokenizer(tokenizer, config.vocab_size)
    assert vocabulary.size == config.engram_compressed_vocab_size
    assert (vocabulary.map >= 0).all()


def test_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in (BOS_TOKEN, EOS_TOKEN, PAD_TOKEN)] == [0, 1, 2]
    assert tokenizer.token_to_id(IMAGE_TOKEN) == small().image_token_id
    assert tokenizer.get_vocab_size() == small().vocab_size
    assert tokenizer.encode("").ids == [0]
    for text in ("The capital of France is", "def f(x):\n\treturn x ** 2", "大海 ñ 🙂 <think>a</think>", " "):
        ids = tokenizer.encode(text).ids
        assert ids[0] == 0
        assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text
    # Text that it was made from takes fewer tokens than bytes.
    assert len(tokenizer.encode("What is the capital of France?").ids) < 12


@pytest.mark.parametrize(
    ("vocab_size", "image", "noise", "message"),
    [
        (200, 190, 191, "vocab_size is 200.*at least 276"),
        (400, 399, 399, "must be two ids"),
        (400, 3, 399, "image_token_id 3 .* from 18 to 399"),
    ],
)
def test_vocabularies_that_cannot_be(vocab_size: int, image: int, noise: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(vocab_size, image, noise)


def test_what_it_refuses(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="is not empty"):
        make_checkpoint(folder)
    with pytest.raises(ConfigError, match="hidden_size.*100"):
        make_checkpoint(tmp_path / "a", replace(tiny(), hidden_size=100))
    with pytest.raises(ValueError, match="shard_bytes is 0"):
        make_checkpoint(tmp_path / "a", shard_bytes=0)
    assert not (tmp_path / "a").exists()


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make_checkpoint(tmp_path / "a", "tiny", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(spec.num_bytes for spec in expected_tensors(tiny()).values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(tmp_path / "a", "tiny", seed=3, shard_bytes=1_000_000) == 0
    assert "tiny, 6 layers of width 128, seed 3" in capsys.readouterr().out
    Checkpoint.open(tmp_path / "a")
    assert command.main(tmp_path / "a", "tiny") == 2
    assert "is not empty" in capsys.readouterr().err
    assert command.main(tmp_path / "b", "huge") == 2
    assert "no shape is called 'huge'" in capsys.readouterr().err
    assert command.main(tmp_path / "b", "release", weights=False) == 0
