"""SGLang's own V4.1 code accepts what make-checkpoint writes, and agrees with what we work out from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_plugins.model.engram import CompressedVocabulary, engram_tables
from deepinfer_plugins.model.make_checkpoint import make_checkpoint
from deepinfer_plugins.model.presets import release, small

pytest.importorskip("sglang")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    make_checkpoint(folder)
    return folder


def test_configuration(folder: Path) -> None:
    from sglang.srt.utils.hf_transformers.config import get_config

    config = get_config(str(folder), trust_remote_code=False)
    ours = small()
    assert type(config).__name__ == "DeepseekV41Config"
    assert config.architectures == ["DeepseekV4ForCausalLM"]
    for name in ("hidden_size", "vocab_size", "image_token_id", "candidate_source_layer_id", "index_topk"):
        assert getattr(config, name) == getattr(ours, name)
    for name in (
        "compress_ratios",
        "kv_source_layer_ids",
        "engram_num_embeddings",
        "dspark_target_layer_ids",
    ):
        assert tuple(getattr(config, name)) == getattr(ours, name)
    assert config.rope_scaling["rope_type"] == "yarn"


def test_engram(folder: Path) -> None:
    from sglang.srt.layers import engram
    from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

    tokenizer = get_tokenizer(str(folder))
    assert tokenizer.encode("") == [0]
    mapping, size = engram.build_compressed_token_map(tokenizer)
    ours = CompressedVocabulary.from_folder(folder, small().vocab_size)
    assert ours.map.tolist() == mapping and ours.size == size


@pytest.mark.parametrize("config", [small(), release()], ids=["small", "release"])
def test_engram_layout(config) -> None:  # type: ignore[no-untyped-def]
    from sglang.srt.layers import engram

    layout = engram.EngramLayout.from_config(config)
    layers, size = config.engram_layer_ids, config.engram_compressed_vocab_size
    multipliers = engram.compute_hash_multipliers(layers, config.engram_max_ngram_size, size)
    for index, (layer, table) in enumerate(engram_tables(config).items()):
        assert layer == layers[index]
        assert table.primes == layout.primes[index]
        assert table.multipliers == tuple(multipliers[index].tolist())
        offsets = [offset for row in table.offsets for offset in row]
        assert (*offsets, table.num_rows) == layout.column_bounds(index)
