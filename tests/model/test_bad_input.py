"""Every broken configuration and checkpoint is refused at once, with the message its user needs."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugins.model.checkpoint import INDEX_NAME, Checkpoint, CheckpointError
from deepinfer_plugins.model.config import ConfigError, ModelConfig
from deepinfer_plugins.model.make_checkpoint import make_checkpoint

# CPU time rather than wall-clock time: a busy machine must not fail these tests.
_LIMIT_S = 2.0
_ABSENT = object()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make_checkpoint(folder, "tiny")
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "checkpoint")


@contextmanager
def _refused(error: type[ValueError], *words: str) -> Iterator[None]:
    start = time.process_time()
    with pytest.raises(error) as caught:
        yield
    assert time.process_time() - start < _LIMIT_S
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message


def _text(**values: Any) -> dict[str, Any]:
    return {f"text_config.{key}": value for key, value in values.items()}


# What to change in the tiny preset's config.json, and words that the message must have.
_CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another architecture": (
        {"architectures": ["LlamaForCausalLM"]},
        ("architectures", "LlamaForCausalLM", "DeepseekV41ForCausalLM"),
    ),
    "another model type": ({"model_type": "deepseek_v3"}, ("model_type", '"deepseek_v3"', '"deepseek_v41"')),
    "float16": ({"dtype": "float16"}, ("dtype", '"float16"', '"bfloat16"')),
    "no quantisation": (
        {"quantization_config": _ABSENT},
        ("quantization_config", "no such key"),
    ),
    "another quantisation": ({"quantization_config.quant_method": "awq"}, ("quant_method", '"awq"', '"fp8"')),
    "static activations": (
        {"quantization_config.activation_scheme": "static"},
        ("activation_scheme", '"static"', '"dynamic"'),
    ),
    "blocks of V3": (
        {"quantization_config.weight_block_size": [128, 128]},
        ("quantization_config.weight_block_size", "[128, 128]", "[32, 32]"),
    ),
    "float scales": ({"quantization_config.scale_fmt": "fp32"}, ("scale_fmt", '"fp32"', '"ue8m0"')),
    "fp8 experts": ({"quantization_config.expert_dtype": "fp8"}, ("expert_dtype", '"fp8"', '"fp4"')),
    "no text_config": ({"text_config": _ABSENT}, ("text_config: no such key", "an object")),
    "text_config is a list": ({"text_config": [1]}, ("text_config: found [1]", "an object")),
    "key missing": (_text(hidden_size=_ABSENT), ("text_config.hidden_size", "no such key", "an integer")),
    "key null": (_text(head_dim=None), ("text_config.head_dim", "null", "multiple of 32")),
    "string for a number": (_text(hidden_size="128"), ("text_config.hidden_size", '"128"', "an integer")),
    "true for a number": (_text(num_attention_heads=True), ("num_attention_heads", "true", "an integer")),
    "fraction for an integer": (_text(index_topk=8.5), ("index_topk", "8.5", "an integer")),
    "width inside a scale block": (_text(hidden_size=100), ("hidden_size", "100", "multiple of 32")),
    "negative width": (_text(moe_intermediate_size=-64), ("moe_intermediate_size", "-64", "at least 1")),
    "infinite eps": (_text(rms_norm_eps=float("inf")), ("rms_norm_eps", "Infinity", "a number above 0")),
    "several key heads": (_text(num_key_value_heads=4), ("num_key_value_heads", "found 4", "only 1")),
    "another activation": (_text(hidden_act="gelu"), ("hidden_act", '"gelu"', '"silu"')),
    "attention bias": (_text(attention_bias=True), ("attention_bias", "true", "only false")),
    "tied head": (_text(tie_word_embeddings=True), ("tie_word_embeddings", "true", "only false")),
    "softmax router": (_text(scoring_func="softmax"), ("scoring_func", '"softmax"', '"sqrtsoftplus"')),
    "greedy router": (_text(topk_method="greedy"), ("topk_method", '"greedy"', '"noaux_tc"')),
    "hash layers of V4": (_text(num_hash_layers=3), ("num_hash_layers", "found 3", "only 0")),
    "overlapping blocks of V4": (_text(compress_overlap=True), ("compress_overlap", "true", "only false")),
    "unshifted mHC": (_text(hc_shifted=False), ("hc_shifted", "false", "only true")),
    "FP8 compressed cache": (_text(use_fp4_sparse_kv=False), ("use_fp4_sparse_kv", "false", "only true")),
    "three streams": (_text(hc_mult=3), ("hc_mult", "found 3", "from 4 to 4")),
    "heads do not fill groups": (_text(o_groups=3), ("o_groups", "found 3", "divisor", "4")),
    "odd rotary width": (_text(qk_rope_head_dim=31), ("qk_rope_head_dim", "31", "multiple of 2")),
    "rotary part wider than a head": (
        _text(qk_rope_head_dim=96),
        ("qk_rope_head_dim", "96", "head_dim", "64"),
    ),
    "linear rope scaling": (
        {"text_config.rope_scaling.rope_type": "linear"},
        ("text_config.rope_scaling.rope_type", '"linear"', '"yarn"'),
    ),
    "yarn without its length": (
        {"text_config.rope_scaling.original_max_position_embeddings": _ABSENT},
        ("rope_scaling.original_max_position_embeddings", "no such key"),
    ),
    "ratios of V4": (
        _text(compress_ratios=[0, 4, 4, 128, 128, 1, 0]),
        ("compress_ratios", "[0, 4, 4, 128, 128, 1, 0]", "0, 1 and 2 only"),
    ),
    "too few ratios": (
        _text(compress_ratios=[0, 2, 2, 1, 1, 1]),
        ("compress_ratios", "7 entries (found 6)", "num_hidden_layers 6", "num_nextn_predict_layers 1"),
    ),
    "compressing draft layer": (
        _text(compress_ratios=[0, 2, 2, 1, 1, 1, 1]),
        ("compress_ratios", "0 for the last 1 entries", "draft"),
    ),
    "no source for the first compressed layer": (
        _text(kv_source_layer_ids=[2, 3], index_k_source_layer_ids=[2, 3]),
        ("kv_source_layer_ids", "[2, 3]", "starts with layer 1"),
    ),
    "source that does not compress": (
        _text(index_source_layer_ids=[0, 1, 3, 4]),
        ("index_source_layer_ids", "[0, 1, 3, 4]", "[0] are not"),
    ),
    "sources out of order": (
        _text(kv_source_layer_ids=[3, 1], index_k_source_layer_ids=[3, 1]),
        ("kv_source_layer_ids", "[3, 1]", "ascending"),
    ),
    "map across the cut": (
        _text(kv_source_layer_ids=[1], index_k_source_layer_ids=[1], candidate_source_layer_id=None),
        ("kv_source_layer_ids", "[1]", "layer 3, where the decoder side begins"),
    ),
    "ratios mixed in one segment": (
        _text(compress_ratios=[0, 2, 2, 1, 2, 1, 0]),
        ("compress_ratios", "same ratio", "layer 4 has 2", "layer 3 has 1"),
    ),
    "second source on the decoder side": (
        _text(kv_source_layer_ids=[1, 3, 4], index_k_source_layer_ids=[1, 3, 4]),
        ("kv_source_layer_ids", "no source after layer 3", "[4]"),
    ),
    "selection coarser than keys": (
        _text(index_source_layer_ids=[1, 4]),
        ("index_source_layer_ids", "[1, 4]", "[3] are missing"),
    ),
    "index keys of other layers": (
        _text(index_k_source_layer_ids=[1, 3, 4]),
        ("index_k_source_layer_ids", "[1, 3, 4]", "[1, 3]"),
    ),
    "candidates of a layer without indexer": (
        _text(candidate_source_layer_id=5),
        ("candidate_source_layer_id", "found 5", "[1, 3, 4]"),
    ),
    "candidates across compressed caches": (
        _text(candidate_source_layer_id=1),
        ("candidate_source_layer_id", "found 1", "[1, 3]"),
    ),
    "too few candidates": (
        _text(index_topk=1000),
        ("candidate_topk_blocks", "8 x 8", "1000"),
    ),
    "candidate blocks not in eights": (
        _text(candidate_topk_blocks=12),
        ("candidate_topk_blocks", "12", "multiple of 8"),
    ),
    "candidate block of 32": (_text(candidate_block_size=32), ("candidate_block_size", "32", "from 8 to 16")),
    "too many index heads": (_text(index_n_heads=64), ("index_n_heads", "64", "from 1 to 32")),
    "experts without end": (
        _text(n_routed_experts=10**8),
        ("n_routed_experts", "100000000", "from 1 to 4096"),
    ),
    "hash tables without end": (_text(engram_n_heads=10**6), ("engram_n_heads", "1000000", "from 1 to 64")),
    "n-grams without end": (_text(engram_max_ngram_size=10**6), ("engram_max_ngram_size", "from 2 to 8")),
    "Sinkhorn without end": (_text(hc_sinkhorn_iters=10**9), ("hc_sinkhorn_iters", "from 1 to 1000")),
    "more experts chosen than there are": (
        _text(num_experts_per_tok=9),
        ("num_experts_per_tok", "found 9", "n_routed_experts", "8"),
    ),
    "Engram on the decoder side": (
        _text(engram_layer_ids=[1, 3], engram_num_embeddings=_ABSENT),
        ("engram_layer_ids", "below 3", "[3]"),
    ),
    "Engram rows that are not the primes'": (
        _text(engram_num_embeddings=[12345]),
        ("engram_num_embeddings", "[12345]", "sums of the primes"),
    ),
    "Engram without its size": (_text(engram_vocab_size=_ABSENT), ("engram_vocab_size", "no such key")),
    "compressed vocabulary larger than the vocabulary": (
        _text(engram_compressed_vocab_size=2000),
        ("engram_compressed_vocab_size", "2000", "1024"),
    ),
    "BOS outside the vocabulary": ({"bos_token_id": 1024}, ("bos_token_id", "1024", "from 0 to 1023")),
    "image token outside the vocabulary": (
        {"image_token_id": 129264},
        ("image_token_id", "129264", "from 0 to 1023"),
    ),
    "noise token outside the vocabulary": (
        _text(dspark_noise_token_id=-1),
        ("dspark_noise_token_id", "-1", "from 0 to 1023"),
    ),
    "draft taps on both sides of the cut": (
        _text(dspark_target_layer_ids=[2, 5]),
        ("dspark_target_layer_ids", "[2, 5]", "one side of layer 3"),
    ),
    "draft tap after the last layer": (
        _text(dspark_target_layer_ids=[5, 6]),
        ("dspark_target_layer_ids", "[5, 6]", "below num_hidden_layers, which is 6"),
    ),
    "vision heads do not divide": (
        {"vision_config.num_attention_heads": 3},
        ("vision_config.hidden_size", "32", "12"),
    ),
    "unknown tokenizer policy": (
        {"tokenizer_compatibility": "legacy"},
        ("tokenizer_compatibility", '"legacy"', '"release"', '"native"'),
    ),
}


@pytest.mark.parametrize("case", _CONFIGS)
def test_configuration_is_refused(case: str, good: Path) -> None:
    changes, words = _CONFIGS[case]
    values = json.loads((good / "config.json").read_text())
    ModelConfig.from_dict(values)
    for path, value in changes.items():
        *parents, key = path.split(".")
        target = values
        for parent in parents:
            target = target[parent]
        if value is _ABSENT:
            del target[key]
        else:
            target[key] = value
    with _refused(ConfigError, *words):
        ModelConfig.from_dict(values)


def test_one_message_has_every_problem(good: Path) -> None:
    values = json.loads((good / "config.json").read_text())
    values["dtype"] = "float16"
    values["text_config"] |= {"hidden_size": 100, "o_groups": 3, "hc_mult": "4"}
    del values["text_config"]["sliding_window"]
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(values, "some/config.json")
    keys = {problem.split(":")[0].removeprefix("text_config.") for problem in caught.value.problems}
    assert keys == {"dtype", "hidden_size", "o_groups", "hc_mult", "sliding_window"}
    assert str(caught.value).startswith("some/config.json") and "5 problems" in str(caught.value)


def test_folder_without_configuration(tmp_path: Path) -> None:
    with _refused(ConfigError, "config.json", "no such file"):
        ModelConfig.from_folder(tmp_path)


def test_configuration_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{'hidden_size': 128}")
    with _refused(ConfigError, "config.json", "not JSON", "line 1"):
        Checkpoint.open(folder)


def test_configuration_nested_without_end(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    with _refused(ConfigError, "config.json", "not JSON"):
        Checkpoint.open(folder)


# -- Broken tensors and files --

_Break = Callable[[Path], None]
_WKV = "layers.2.attn.wkv.weight"


def _shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][name]


def _edit_index(folder: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def _edit_header(shard: Path, edit: Callable[[dict[str, Any]], Any], data: bytes | None = None) -> None:
    stored = shard.read_bytes()
    start = 8 + int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8:start])
    edit(header)
    encoded = json.dumps(header).encode()
    data = stored[start:] if data is None else data
    shard.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def _describe(name: str, **values: Any) -> _Break:
    def edit(folder: Path) -> None:
        _edit_header(_shard_of(folder, name), lambda header: header[name].update(values))

    return edit


def _rename(old: str, new: str) -> _Break:
    """Rename a tensor in its file and in the index."""

    def edit(folder: Path) -> None:
        shard = _shard_of(folder, old)
        _edit_header(shard, lambda header: header.update({new: header.pop(old)}))
        _edit_index(folder, lambda index: index.update({new: index.pop(old)}))

    return edit


def _add(name: str, *, indexed: bool = True, spec: str = "BF16") -> _Break:
    """Add a tensor of 16 values at the end of the last shard."""

    def edit(folder: Path) -> None:
        shard = sorted(folder.glob("*.safetensors"))[-1]
        stored = shard.read_bytes()
        data = stored[8 + int.from_bytes(stored[:8], "little") :]
        item = {"dtype": spec, "shape": [16], "data_offsets": [len(data), len(data) + 32]}
        _edit_header(shard, lambda header: header.update({name: item}), data + bytes(32))
        if indexed:
            _edit_index(folder, lambda index: index.update({name: shard.name}))

    return edit


def _drop_from_index(folder: Path) -> None:
    _edit_index(folder, lambda index: index.pop(_WKV))


def _name_in_index_only(folder: Path) -> None:
    _edit_index(
        folder, lambda index: index.update({"layers.99.attn.wkv.weight": _shard_of(folder, _WKV).name})
    )


def _swap_shards(folder: Path) -> None:
    other = next(shard for shard in sorted(folder.glob("*.safetensors")) if shard != _shard_of(folder, _WKV))
    _edit_index(folder, lambda index: index.update({_WKV: other.name}))


def _twice_in_index(folder: Path) -> None:
    _edit_index(folder, lambda index: index.update({f"model.{_WKV}": index[_WKV]}))


def _truncate(folder: Path) -> None:
    shard = _shard_of(folder, _WKV)
    shard.write_bytes(shard.read_bytes()[:-1000])


def _lengthen(folder: Path) -> None:
    with _shard_of(folder, _WKV).open("ab") as file:
        file.write(bytes(7))


def _overlap(folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        start, end = header[_WKV]["data_offsets"]
        header[_WKV]["data_offsets"] = [start - 32, end - 32]

    _edit_header(_shard_of(folder, _WKV), edit)


def _beyond_the_end(folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        start, end = header[_WKV]["data_offsets"]
        header[_WKV]["data_offsets"] = [start + 2**40, end + 2**40]

    _edit_header(_shard_of(folder, _WKV), edit)


def _write(name: str, content: bytes) -> _Break:
    return lambda folder: None if (folder / name).write_bytes(content) else None


def _without_index(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()


_SHARD = "model-00002-of-00005.safetensors"

_CHECKPOINTS: dict[str, tuple[_Break, tuple[str, ...]]] = {
    "tensor missing": (
        _rename(_WKV, "image_end_"),
        (f"{_WKV}: missing", "F8_E4M3 [64, 128]", "image_end_", "nothing uses it"),
    ),
    "tensor missing from a shard": (
        lambda folder: _edit_index(
            folder, lambda index: index.update({"norm.weight_": index["norm.weight"], "norm.weight": _SHARD})
        ),
        ("norm.weight_", "but it is not", _SHARD),
    ),
    "tensor not in the index": (_drop_from_index, (_WKV, INDEX_NAME, "not in")),
    "tensor in the index only": (
        _name_in_index_only,
        ("layers.99.attn.wkv.weight", "says it is in", "but it is not", "copy that file again"),
    ),
    "tensor in another shard": (_swap_shards, (_WKV, "says it is in", "but it is in", "from one release")),
    "extra tensor": (_add("layers.2.attn.wk.weight"), ("layers.2.attn.wk.weight", "nothing uses it", "-of-")),
    "extra tensor, not in the index": (
        _add("layers.2.attn.wk.weight", indexed=False),
        ("layers.2.attn.wk.weight", f"not in {INDEX_NAME}"),
    ),
    "tensor twice": (
        _add("norm.weight", indexed=False),
        ("norm.weight: there twice", "remove one"),
    ),
    "tensor with and without prefix": (
        _add("model.norm.weight", indexed=False),
        ("norm.weight: there twice", "model.norm.weight", "remove one"),
    ),
    "index with and without prefix": (_twice_in_index, (f"{_WKV}: twice in {INDEX_NAME}", "'model.'")),
    "mHC norm not folded": (
        _add("layers.2.hc_attn_norm.weight"),
        ("layers.2.hc_attn_norm.weight", "folded into hc_*_fn"),
    ),
    "unshifted mHC head": (_add("hc_head_base", spec="BF16"), ("hc_head_base", "without shifted mHC")),
    "wrong dtype": (
        _describe("layers.2.hc_attn_fn", dtype="I32"),
        ("layers.2.hc_attn_fn: dtype I32", "F32", "-of-", "convert"),
    ),
    "wrong dtype of another width": (
        lambda folder: _edit_header(
            _shard_of(folder, "norm.weight"),
            lambda header: header["norm.weight"].update(dtype="F32", shape=[64]),
        ),
        ("norm.weight: dtype F32", "BF16", "shape [64]", "[128]"),
    ),
    "scales as plain bytes": (
        _describe("layers.2.attn.wkv.scale", dtype="U8"),
        ("layers.2.attn.wkv.scale: dtype U8", "F8_E8M0"),
    ),
    "wrong shape": (
        _describe(_WKV, shape=[128, 64]),
        (f"{_WKV}: shape [128, 64]", "asks for [64, 128]", "config.json"),
    ),
    "shape does not fit the bytes": (
        _describe(_WKV, shape=[64, 127]),
        ("-of-", _WKV, "8192 bytes, not 8128"),
    ),
    "negative shape": (_describe(_WKV, shape=[-64, -128]), ("-of-", _WKV, "[-64, -128]")),
    "header without offsets": (_describe(_WKV, data_offsets=None), ("-of-", _WKV, "does not describe")),
    "truncated file": (_truncate, ("-of-", "truncated", "copy the file again")),
    "bytes after the last tensor": (_lengthen, ("-of-", "7 bytes follow", "copy the file again")),
    "overlapping tensors": (_overlap, ("-of-", _WKV, "overlaps")),
    "tensor outside its file": (_beyond_the_end, ("-of-", _WKV, "truncated")),
    "empty shard": (_write(_SHARD, b""), (_SHARD, "no safetensors header", "0 bytes")),
    "shard that is a web page": (_write(_SHARD, b"<!DOCTYPE html><html>"), (_SHARD, "no safetensors header")),
    "pointer instead of the file": (
        _write(_SHARD, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n"),
        (_SHARD, "Git LFS", "git lfs pull"),
    ),
    "header that is not JSON": (
        _write(_SHARD, (16).to_bytes(8, "little") + b"not JSON at all!"),
        (_SHARD, "not JSON"),
    ),
    "header that is a list": (
        _write(_SHARD, (2).to_bytes(8, "little") + b"[]"),
        (_SHARD, "not a JSON object"),
    ),
    "shard missing": (
        lambda folder: (folder / _SHARD).unlink(),
        (_SHARD, "missing", INDEX_NAME, "1 problem\n"),
    ),
    "index missing": (_without_index, (INDEX_NAME, "missing", "5 .safetensors files")),
    "index is not JSON": (_write(INDEX_NAME, b"{"), (INDEX_NAME, "weight_map")),
    "index nested without end": (_write(INDEX_NAME, b"[" * 100_000), (INDEX_NAME, "weight_map")),
    "index without map": (_write(INDEX_NAME, b'{"metadata": {}}'), (INDEX_NAME, "weight_map")),
    "index names a file elsewhere": (
        lambda folder: _edit_index(folder, lambda index: index.update({_WKV: f"../{_SHARD}"})),
        (INDEX_NAME, f"'../{_SHARD}'", "not in the checkpoint's folder"),
    ),
}


@pytest.mark.parametrize("case", _CHECKPOINTS)
def test_checkpoint_is_refused(case: str, folder: Path) -> None:
    spoil, words = _CHECKPOINTS[case]
    Checkpoint.open(folder)
    spoil(folder)
    with _refused(CheckpointError, str(folder), *words):
        Checkpoint.open(folder)


def test_no_files_at_all(folder: Path) -> None:
    for file in (folder / INDEX_NAME, *folder.glob("*.safetensors")):
        file.unlink()
    with _refused(CheckpointError, INDEX_NAME, "no .safetensors file"):
        Checkpoint.open(folder)


def test_many_problems_are_counted(folder: Path) -> None:
    """A configuration with other widths: hundreds of tensors are wrong, and the message stays readable."""
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["hidden_size"] = 256
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert len(caught.value.problems) > 300
    assert message.count("\n") == 21
    assert f"and {len(caught.value.problems) - 20} more" in message
    assert "embed.weight: shape [1024, 128]" in message


def test_file_that_shrinks_after_it_was_opened(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    name = "head.weight"
    with _shard_of(folder, name).open("r+b") as file:
        file.truncate(5000)
    with _refused(CheckpointError, name, "changed since it was opened"):
        checkpoint.read(name)
