"""vLLM's own V4.1 code accepts what make-checkpoint writes, and agrees with what we work out from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_plugins.model.engram import CompressedVocabulary, engram_tables
from deepinfer_plugins.model.make_checkpoint import make_checkpoint
from deepinfer_plugins.model.presets import small

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    make_checkpoint(folder)
    return folder


def test_configuration(folder: Path) -> None:
    from vllm.transformers_utils.config import get_config

    config = get_config(str(folder), trust_remote_code=False)
    ours = small()
    assert type(config).__name__ == "DeepseekV41Config"
    assert config.architectures == ["DeepseekV41ForCausalLM"]
    for name in ("hidden_size", "vocab_size", "image_token_id", "candidate_source_layer_id", "index_topk"):
        assert getattr(config, name) == getattr(ours, name)
    for name in (
        "compress_ratios",
        "kv_source_layer_ids",
        "engram_num_embeddings",
        "dspark_target_layer_ids",
    ):
        assert tuple(getattr(config, name)) == getattr(ours, name)
    assert config.expert_dtype == "fp4" and config.vision_n_layers == 1
    assert config.rope_parameters["rope_type"] == "yarn"


def test_tokenizer_mode(folder: Path) -> None:
    from vllm.tokenizers.registry import get_tokenizer

    tokenizer = get_tokenizer(str(folder), tokenizer_mode="deepseek_v41")
    assert tokenizer.encode("") == [0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens[:2] == ["<｜begin▁of▁sentence｜>", "<｜System｜>"]
    assert tokens[-2:] == ["<｜Assistant｜>", "<think>"] and "<｜User｜>" in tokens


def test_engram(folder: Path) -> None:
    from vllm.models.deepseek_v41.common import engram
    from vllm.tokenizers.registry import get_tokenizer

    tokenizer = get_tokenizer(str(folder), tokenizer_mode="deepseek_v41")
    mapping, size = engram.build_compressed_token_map(tokenizer)
    ours = CompressedVocabulary.from_folder(folder, small().vocab_size)
    assert ours.map.tolist() == mapping and ours.size == size == small().engram_compressed_vocab_size
    multipliers = engram.compute_hash_multipliers((1, 4), 4, size)
    tables = engram_tables(small())
    assert [tables[1].multipliers, tables[4].multipliers] == [tuple(row) for row in multipliers.tolist()]
