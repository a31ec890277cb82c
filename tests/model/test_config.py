"""Reading and writing config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_plugins.model.config import ModelConfig, RopeScaling
from deepinfer_plugins.model.presets import PRESETS, preset, release, small
from deepinfer_plugins.model.tensors import expected_tensors

# Facts about the published checkpoint.
_RELEASE_TENSORS = 96_085
_RELEASE_BYTES = 510_313_353_565
_RELEASE_ENGRAM_ROWS = (384_006_168, 384_016_682)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_their_file(name: str) -> None:
    config = preset(name)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_no_such_preset() -> None:
    with pytest.raises(ValueError, match="'medium'.*small, tiny, wide, release"):
        preset("medium")


@st.composite
def _configs(draw: st.DrawFn) -> ModelConfig:
    """Configurations of any depth, with and without each optional part."""
    integers = st.integers
    swa, encoder, decoder = draw(integers(0, 3)), draw(integers(0, 6)), draw(integers(0, 6))
    layers = max(swa + encoder + decoder, 1)
    swa = layers - encoder - decoder
    drafts = draw(integers(0, 3))
    cut = swa + encoder
    kv_sources, index_sources = set(), set()
    if encoder:
        kv_sources = {swa} | draw(st.sets(integers(swa, cut - 1)))
        index_sources = kv_sources | draw(st.sets(integers(swa, cut - 1)))
    if decoder:
        kv_sources |= {cut}
        index_sources |= {cut} | draw(st.sets(integers(cut, layers - 1)))
    last = [source for source in sorted(index_sources) if source >= max(kv_sources)]
    side = (0, cut - 1) if cut and not decoder else (cut, layers - 1)
    engrams = draw(st.sets(integers(0, cut - 1), max_size=3)) if cut else set()
    vocab_size = draw(integers(300, 5000))
    token = integers(0, vocab_size - 1)
    heads_of_group, groups = draw(integers(1, 4)), draw(integers(1, 4))
    number = st.floats(1e-30, 1e6)
    base = small()
    config = replace(
        base,
        vocab_size=vocab_size,
        hidden_size=32 * draw(integers(1, 200)),
        num_hidden_layers=layers,
        num_attention_heads=heads_of_group * groups,
        o_groups=groups,
        compress_ratios=(0,) * swa + (2,) * encoder + (1,) * decoder + (0,) * drafts,
        kv_source_layer_ids=tuple(sorted(kv_sources)),
        index_k_source_layer_ids=tuple(sorted(kv_sources)),
        index_source_layer_ids=tuple(sorted(index_sources)),
        candidate_source_layer_id=draw(st.sampled_from([None, *last])),
        num_nextn_predict_layers=drafts,
        dspark_target_layer_ids=tuple(sorted(draw(st.sets(integers(*side), min_size=1)))),
        dspark_noise_token_id=draw(token),
        engram_layer_ids=tuple(sorted(engrams)),
        engram_compressed_vocab_size=draw(integers(1, vocab_size)),
        engram_pad_token_id=draw(token),
        engram_max_ngram_size=draw(integers(2, 5)),
        bos_token_id=draw(token),
        eos_token_id=draw(token),
        pad_token_id=draw(token),
        image_token_id=draw(token),
        rms_norm_eps=draw(number),
        swiglu_limit=draw(number),
        rope_theta=draw(number),
        rope_scaling=draw(st.sampled_from([None, base.rope_scaling, RopeScaling(2.5, 8.0, 8.0, 77)])),
        vision=draw(st.sampled_from([None, base.vision])),
        tokenizer_compatibility=draw(st.sampled_from(["release", "native"])),
    )
    return config


@settings(max_examples=150, deadline=None)
@given(_configs())
def test_valid_configurations_survive_their_file(config: ModelConfig) -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_optional_keys_have_the_documented_defaults() -> None:
    config = small()
    values = config.to_dict()
    del values["tokenizer_compatibility"]
    for key in (
        "index_k_source_layer_ids",
        "hc_shifted",
        "use_fp4_sparse_kv",
        "dspark_target_attn_input",
        "engram_num_embeddings",
        "model_type",
        "attention_bias",
    ):
        del values["text_config"][key]
    del values["vision_config"]["rope_theta"]
    assert ModelConfig.from_dict(values) == config


def test_parts_can_be_left_out() -> None:
    values = small().to_dict()
    del values["vision_config"]
    text = values["text_config"]
    for key in [key for key in text if key.startswith(("engram_", "dspark_", "candidate_", "rope_scaling"))]:
        del text[key]
    text["num_nextn_predict_layers"] = 0
    text["compress_ratios"] = text["compress_ratios"][:12]
    config = ModelConfig.from_dict(values)
    assert config.vision is None and config.rope_scaling is None and config.candidate_source_layer_id is None
    assert config.engram_layer_ids == () and config.num_nextn_predict_layers == 0
    names = expected_tensors(config)
    assert not [name for name in names if name.startswith(("mtp.", "vision.", "image_")) or "engram" in name]


def test_keys_of_others_are_ignored() -> None:
    values = small().to_dict() | {"transformers_version": "5.0", "auto_map": {}}
    assert ModelConfig.from_dict(values) == small()


def test_every_field_is_written() -> None:
    """Changing any field changes the file: nothing is lost on the way."""
    config = small()
    written = config.to_dict()
    for field in fields(config):
        value = getattr(config, field.name)
        other = replace(config, **{field.name: 1 if not isinstance(value, int) else value + 1})
        if field.name in ("rope_scaling", "vision"):
            other = replace(config, **{field.name: None})
        elif isinstance(value, tuple):
            other = replace(config, **{field.name: value[:-1]})
        elif isinstance(value, str):
            other = replace(config, **{field.name: "native"})
        elif isinstance(value, float):
            other = replace(config, **{field.name: value * 2})
        assert other.to_dict() != written, field.name


def test_release_has_the_published_sizes() -> None:
    config = release()
    assert config.engram_num_embeddings == _RELEASE_ENGRAM_ROWS
    specs = expected_tensors(config)
    assert len(specs) == _RELEASE_TENSORS
    # The files hold their headers too, and nothing else.
    headers = _RELEASE_BYTES - sum(spec.num_bytes for spec in specs.values())
    assert 0 < headers < 400 * len(specs)


def test_release_maps() -> None:
    """The source maps of section 1.2 of the fact sheet."""
    config = release()
    assert config.decoder_start == 20
    assert [config.kv_source(layer) for layer in (1, 2, 7, 8, 13, 14, 19, 20, 39)] == [
        None, 2, 2, 8, 8, 14, 14, 20, 20,
    ]  # fmt: skip
    assert [config.index_source(layer) for layer in (0, 19, 20, 23, 24, 31, 36, 39)] == [
        None, 14, 20, 20, 24, 28, 36, 36,
    ]  # fmt: skip
    assert {config.index_k_source(layer) for layer in range(20, 40)} == {20}


def test_reading_imports_no_torch() -> None:
    code = "import deepinfer_plugins.model.config, deepinfer_plugins.model.tensors, sys; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.stdout.strip() == "False"
