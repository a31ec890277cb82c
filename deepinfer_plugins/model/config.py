"""The release's ``config.json``, typed and checked. Imports no torch.

Reading collects every problem before it raises, so that one look at the message is enough to repair a file.

Source: sections 1.1 and 1.2 of the model's fact sheet; names are the checkpoint's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_plugins.model.engram import table_primes

ARCHITECTURE = "DeepseekV41ForCausalLM"
# Scale blocks of FP8 weights, groups of activations and of FP4 weights: no width may end inside one.
_GROUP = 32
_MAX_CANDIDATE_BLOCKS = 4096
_MAX_INDEX_HEADS = 32
# Far above any release. Checking makes a list of each expert's tensors and of each hash table's size: a number that
# only a broken file has must not take minutes to be refused.
_MAX_EXPERTS = 4096
_MAX_ENGRAM_HEADS = 64
_MAX_NGRAM = 8
_MAX_SINKHORN = 1000


class ConfigError(ValueError):
    """A configuration this package cannot run. ``problems`` has one line for each key."""

    def __init__(self, problems: list[str], where: str = "config.json") -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            "\n  ".join(
                [f"{where} is not a DeepSeek-V4.1-Flash configuration we can run: {count}", *problems]
            )
        )


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN, applied in compressed layers only."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Shape of the vision tower, for checking its tensors."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int
    rope_theta: float = 10000.0
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the model computes with.

    Layer ids are 0-based. ``compress_ratios`` covers the backbone and then the draft layers.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    compress_rope_theta: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_k_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    engram_layer_ids: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vision: VisionConfig | None
    tokenizer_compatibility: str = "release"

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read and check the ``config.json`` of a checkpoint.

        Raises:
            ConfigError: The file is missing, is not JSON, or :meth:`from_dict` refuses it.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigError([f"{path}: no such file; supported: a folder in the release format"], str(path))
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                [f"{path}: not JSON ({error}); supported: the release's own config.json"], str(path)
            ) from error
        return cls.from_dict(values, str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Check a parsed ``config.json``.

        Args:
            values: The file's content, nested as in the release. Keys that mean nothing to us are ignored.
            where: Name of the file, for the message.

        Raises:
            ConfigError: Names each unusable key with the value found and what is supported.
        """
        return _read(values, where)

    def to_dict(self) -> dict[str, Any]:
        """The release's ``config.json`` of this configuration, every key written out."""
        return _write(self)

    @property
    def engram_primes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Sizes of the Engram hash tables, ``[engram layer][n - 2][head]``."""
        return table_primes(
            len(self.engram_layer_ids),
            self.engram_max_ngram_size,
            self.engram_n_heads,
            self.engram_vocab_size,
        )

    @property
    def engram_num_embeddings(self) -> tuple[int, ...]:
        """Rows of each Engram table."""
        return tuple(sum(sum(row) for row in layer) for layer in self.engram_primes)

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder side: the first with ratio 1; all layers if there is none."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else self.num_hidden_layers

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed keys ``layer`` attends to; None for a pure sliding-window layer."""
        return self._source(layer, self.kv_source_layer_ids)

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection ``layer`` uses; None for a pure sliding-window layer."""
        return self._source(layer, self.index_source_layer_ids)

    def index_k_source(self, layer: int) -> int | None:
        """The layer whose index keys ``layer`` scores against; None for a pure sliding-window layer."""
        return self._source(layer, self.index_k_source_layer_ids)

    def _source(self, layer: int, sources: tuple[int, ...]) -> int | None:
        if self.compress_ratios[layer] == 0:
            return None
        return max(source for source in sources if source <= layer)


_ABSENT: Any = object()


class _Section:
    """One object of the file. Reads values by key and notes what is wrong with them.

    A key that is wrong reads as a harmless stand-in, so that reading goes on; :meth:`good` tells checks that
    involve several keys whether there is anything to check.
    """

    def __init__(self, values: Any, prefix: str, problems: dict[str, str]) -> None:
        self._prefix = prefix
        self._problems = problems
        self._values: Mapping[str, Any] = values if isinstance(values, Mapping) else {}
        if not isinstance(values, Mapping):
            found = "no such key" if values is _ABSENT else f"found {_show(values)}"
            problems[prefix] = f"{found}; supported: an object"

    def section(self, key: str) -> _Section:
        return _Section(self._values.get(key, _ABSENT), f"{self._prefix}{key}.", self._problems)

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def refuse(self, key: str, supported: str) -> None:
        """Note that a value is of the right type but cannot be used."""
        self._problems.setdefault(
            self._prefix + key, f"found {_show(self._values.get(key))}; supported: {supported}"
        )

    def good(self, *keys: str) -> bool:
        return not any(self._prefix + key in self._problems for key in keys)

    def _get(self, key: str, default: Any, supported: str) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _ABSENT:
            found = "found null" if key in self._values else "no such key"
            self._problems[self._prefix + key] = f"{found}; supported: {supported}"
        return None

    def integer(
        self,
        key: str,
        minimum: int = 1,
        maximum: int | None = None,
        multiple: int = 1,
        default: Any = _ABSENT,
    ) -> int:
        supported = (
            f"an integer, at least {minimum}"
            if maximum is None
            else f"an integer from {minimum} to {maximum}"
        )
        if multiple > 1:
            supported += f", a multiple of {multiple}"
        value = self._get(key, default, supported)
        if value is None:
            return minimum if default is _ABSENT else default
        if (
            not _is_integer(value)
            or value < minimum
            or (maximum is not None and value > maximum)
            or value % multiple
        ):
            self.refuse(key, supported)
            return minimum
        return int(value)

    def number(self, key: str, supported: str = "a number above 0", default: Any = _ABSENT) -> float:
        value = self._get(key, default, supported)
        if value is None:
            return 1.0 if default is _ABSENT else default
        if not (_is_integer(value) or isinstance(value, float)) or not math.isfinite(value) or value <= 0:
            self.refuse(key, supported)
            return 1.0
        return float(value)

    def layers(self, key: str, default: Any = _ABSENT) -> tuple[int, ...]:
        """A list of ids in ascending order, each once."""
        value = self.integers(key, "a list of layer ids", default)
        if self.good(key) and list(value) != sorted(set(value)):
            self.refuse(key, "layer ids in ascending order, each once")
        return value

    def integers(self, key: str, supported: str, default: Any = _ABSENT) -> tuple[int, ...]:
        value = self._get(key, default, supported)
        if value is None:
            return () if default is _ABSENT else tuple(default)
        if not isinstance(value, (list, tuple)) or not all(_is_integer(item) and item >= 0 for item in value):
            self.refuse(key, supported)
            return ()
        return tuple(value)

    def fixed(self, key: str, value: Any, default: Any = _ABSENT) -> None:
        """A value of which there is one only."""
        found = self._get(key, default, f"only {_show(value)}")
        if found is not None and (found != value or isinstance(found, bool) != isinstance(value, bool)):
            self.refuse(key, f"only {_show(value)}")

    def choice(self, key: str, values: tuple[str, ...], default: str) -> str:
        value = self._get(key, default, "")
        if value is None:
            return default
        if value not in values:
            self.refuse(key, " or ".join(map(_show, values)))
            return default
        return str(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _read(values: Mapping[str, Any], where: str) -> ModelConfig:
    problems: dict[str, str] = {}
    top = _Section(values, "", problems)
    _read_asserted(top)
    text = top.section("text_config")
    vocab_size = text.integer("vocab_size", multiple=1)
    last_token = max(vocab_size - 1, 0) if text.good("vocab_size") else None
    layers = text.integer("num_hidden_layers")
    drafts = text.integer("num_nextn_predict_layers", minimum=0, default=0)
    engram_layers = text.layers("engram_layer_ids", default=())
    candidates = text.has("candidate_source_layer_id")
    kv_sources = text.layers("kv_source_layer_ids")

    def engram(default: int) -> Any:
        return _ABSENT if engram_layers else default

    def draft(default: Any) -> Any:
        return _ABSENT if drafts else default

    def candidate(default: int) -> Any:
        return _ABSENT if candidates else default

    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size", multiple=_GROUP),
        num_hidden_layers=layers,
        num_attention_heads=text.integer("num_attention_heads"),
        head_dim=text.integer("head_dim", multiple=_GROUP),
        qk_rope_head_dim=text.integer("qk_rope_head_dim", multiple=2),
        q_lora_rank=text.integer("q_lora_rank", multiple=_GROUP),
        o_lora_rank=text.integer("o_lora_rank", multiple=_GROUP),
        o_groups=text.integer("o_groups"),
        swiglu_limit=text.number("swiglu_limit"),
        rms_norm_eps=text.number("rms_norm_eps"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        rope_theta=text.number("rope_theta"),
        rope_scaling=_read_rope_scaling(text),
        compress_rope_theta=text.number("compress_rope_theta"),
        sliding_window=text.integer("sliding_window"),
        compress_ratios=text.integers("compress_ratios", "a list of 0, 1 and 2, one for each layer"),
        kv_source_layer_ids=kv_sources,
        index_source_layer_ids=text.layers("index_source_layer_ids"),
        index_k_source_layer_ids=text.layers("index_k_source_layer_ids", default=kv_sources),
        index_n_heads=text.integer("index_n_heads", maximum=_MAX_INDEX_HEADS),
        index_head_dim=text.integer("index_head_dim", multiple=_GROUP),
        index_topk=text.integer("index_topk"),
        candidate_source_layer_id=text.integer("candidate_source_layer_id", minimum=0)
        if candidates
        else None,
        candidate_topk_blocks=text.integer(
            "candidate_topk_blocks", 8, _MAX_CANDIDATE_BLOCKS, multiple=8, default=candidate(8)
        ),
        candidate_block_size=text.integer("candidate_block_size", 8, 16, multiple=8, default=candidate(8)),
        hc_mult=text.integer("hc_mult", 4, 4),
        hc_sinkhorn_iters=text.integer("hc_sinkhorn_iters", 1, _MAX_SINKHORN),
        hc_eps=text.number("hc_eps"),
        n_routed_experts=text.integer("n_routed_experts", 1, _MAX_EXPERTS),
        num_experts_per_tok=text.integer("num_experts_per_tok"),
        moe_intermediate_size=text.integer("moe_intermediate_size", multiple=_GROUP),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        engram_layer_ids=engram_layers,
        engram_max_ngram_size=text.integer("engram_max_ngram_size", 2, _MAX_NGRAM, default=engram(2)),
        engram_vocab_size=text.integer("engram_vocab_size", minimum=2, default=engram(2)),
        engram_n_heads=text.integer("engram_n_heads", 1, _MAX_ENGRAM_HEADS, default=engram(1)),
        engram_head_dim=text.integer("engram_head_dim", multiple=_GROUP, default=engram(_GROUP)),
        engram_pad_token_id=text.integer("engram_pad_token_id", 0, last_token, default=engram(0)),
        engram_compressed_vocab_size=text.integer("engram_compressed_vocab_size", default=engram(1)),
        num_nextn_predict_layers=drafts,
        dspark_block_size=text.integer("dspark_block_size", default=draft(1)),
        dspark_noise_token_id=text.integer("dspark_noise_token_id", 0, last_token, default=draft(0)),
        dspark_target_layer_ids=text.layers("dspark_target_layer_ids", default=draft(())),
        dspark_markov_rank=text.integer("dspark_markov_rank", default=draft(1)),
        dspark_n_routed_experts=text.integer("dspark_n_routed_experts", 1, _MAX_EXPERTS, default=draft(1)),
        dspark_num_experts_per_tok=text.integer("dspark_num_experts_per_tok", default=draft(1)),
        bos_token_id=top.integer("bos_token_id", 0, last_token),
        eos_token_id=top.integer("eos_token_id", 0, last_token),
        pad_token_id=top.integer("pad_token_id", 0, last_token),
        image_token_id=top.integer("image_token_id", 0, last_token),
        vision=_read_vision(top.section("vision_config")) if top.has("vision_config") else None,
        tokenizer_compatibility=top.choice("tokenizer_compatibility", ("release", "native"), "release"),
    )
    _check_widths(config, text)
    _check_layers(config, text)
    _check_candidates(config, text)
    _check_engram(config, text)
    _check_draft(config, text)
    if problems:
        raise ConfigError(
            [f"{key.rstrip('.') or 'the file'}: {problem}" for key, problem in problems.items()], where
        )
    return config


def _read_asserted(top: _Section) -> None:
    """Keys of which the release's value is the only one supported."""
    top.fixed("architectures", [ARCHITECTURE])
    top.fixed("model_type", "deepseek_v41")
    top.fixed("dtype", "bfloat16")
    quantization = top.section("quantization_config")
    quantization.fixed("quant_method", "fp8")
    quantization.fixed("activation_scheme", "dynamic")
    quantization.fixed("weight_block_size", [_GROUP, _GROUP])
    quantization.fixed("scale_fmt", "ue8m0")
    quantization.fixed("expert_dtype", "fp4")
    text = top.section("text_config")
    text.fixed("model_type", "deepseek_v41_text", default=None)
    text.fixed("num_key_value_heads", 1)
    text.fixed("hidden_act", "silu")
    text.fixed("attention_bias", False, default=None)
    text.fixed("attention_dropout", 0, default=None)
    text.fixed("tie_word_embeddings", False, default=None)
    text.fixed("n_shared_experts", 1)
    text.fixed("scoring_func", "sqrtsoftplus")
    text.fixed("topk_method", "noaux_tc")
    text.fixed("norm_topk_prob", True)
    text.fixed("hc_shifted", True, default=None)
    text.fixed("use_fp4_sparse_kv", True, default=None)
    text.fixed("dspark_target_attn_input", True, default=None)
    # Switches of DeepSeek-V4 that V4.1 gave up; a file that sets one describes another model.
    text.fixed("compress_overlap", False, default=None)
    text.fixed("use_ape", False, default=None)
    text.fixed("num_hash_layers", 0, default=None)


def _read_rope_scaling(text: _Section) -> RopeScaling | None:
    if not text.has("rope_scaling"):
        return None
    scaling = text.section("rope_scaling")
    scaling.fixed("type" if scaling.has("type") else "rope_type", "yarn")
    result = RopeScaling(
        factor=scaling.number("factor"),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
    )
    if scaling.good("beta_fast", "beta_slow") and result.beta_fast < result.beta_slow:
        scaling.refuse("beta_fast", f"at least beta_slow, which is {result.beta_slow:g}")
    return result


def _read_vision(vision: _Section) -> VisionConfig:
    vision.fixed("model_type", "deepseek_v41_vision", default=None)
    result = VisionConfig(
        num_hidden_layers=vision.integer("num_hidden_layers"),
        hidden_size=vision.integer("hidden_size"),
        num_attention_heads=vision.integer("num_attention_heads"),
        intermediate_size=vision.integer("intermediate_size"),
        patch_size=vision.integer("patch_size"),
        downsample_ratio=vision.integer("downsample_ratio"),
        rope_theta=vision.number("rope_theta", default=10000.0),
        max_image_tokens=vision.integer("max_image_tokens", default=1024),
        min_pixels=vision.integer("min_pixels", default=295936),
        max_wh_ratio=vision.number("max_wh_ratio") if vision.has("max_wh_ratio") else None,
    )
    if vision.good("hidden_size", "num_attention_heads") and result.hidden_size % (
        4 * result.num_attention_heads
    ):
        # Rows and columns of the image rotate one half of a head each, in pairs.
        vision.refuse(
            "hidden_size", f"a multiple of 4 times num_attention_heads, {4 * result.num_attention_heads}"
        )
    return result


def _check_widths(config: ModelConfig, text: _Section) -> None:
    for key in ("head_dim", "index_head_dim"):
        width = getattr(config, key)
        if text.good(key, "qk_rope_head_dim") and config.qk_rope_head_dim > width:
            text.refuse("qk_rope_head_dim", f"at most {key}, which is {width}")
    if text.good("num_attention_heads", "o_groups") and config.num_attention_heads % config.o_groups:
        text.refuse("o_groups", f"a divisor of num_attention_heads, which is {config.num_attention_heads}")
    for chosen, total in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
    ):
        if text.good(chosen, total) and getattr(config, chosen) > getattr(config, total):
            text.refuse(chosen, f"at most {total}, which is {getattr(config, total)}")


def _check_layers(config: ModelConfig, text: _Section) -> None:
    """The maps from layers to the layers whose keys and selections they use."""
    layers, drafts = config.num_hidden_layers, config.num_nextn_predict_layers
    ratios = config.compress_ratios
    if not text.good("compress_ratios", "num_hidden_layers", "num_nextn_predict_layers"):
        return
    if set(ratios) - {0, 1, 2}:
        text.refuse("compress_ratios", "0, 1 and 2 only (4 and 128 are DeepSeek-V4's, not V4.1's)")
        return
    if len(ratios) != layers + drafts:
        text.refuse(
            "compress_ratios",
            f"{layers + drafts} entries (found {len(ratios)}): num_hidden_layers {layers} and "
            f"num_nextn_predict_layers {drafts}",
        )
        return
    if any(ratios[layers:]):
        text.refuse("compress_ratios", f"0 for the last {drafts} entries: draft layers do not compress")
    compressed = [layer for layer in range(layers) if ratios[layer]]
    maps = ("kv_source_layer_ids", "index_k_source_layer_ids", "index_source_layer_ids")
    for key in maps:
        if not text.good(key):
            continue
        sources = getattr(config, key)
        if wrong := [layer for layer in sources if layer not in compressed]:
            text.refuse(key, f"layers of ratio 1 or 2 below {layers}, which {_show(wrong)} are not")
        elif compressed and (not sources or sources[0] != compressed[0]):
            text.refuse(key, f"a list that starts with layer {compressed[0]}, the first that compresses")
    if not text.good("compress_ratios", *maps):
        return
    if config.index_k_source_layer_ids != config.kv_source_layer_ids:
        text.refuse("index_k_source_layer_ids", f"the KV sources, {_show(config.kv_source_layer_ids)}")
    if missing := sorted(set(config.kv_source_layer_ids) - set(config.index_source_layer_ids)):
        text.refuse(
            "index_source_layer_ids", f"a list with every KV source in it; {_show(missing)} are missing"
        )
    cut = config.decoder_start
    for layer in range(compressed[0] if compressed else layers, layers):
        source = max(source for source in config.kv_source_layer_ids if source <= layer)
        if ratios[layer] == ratios[source]:
            continue
        if layer == cut:
            supported = (
                f"a list with layer {cut}, where the decoder side begins, in it: no map crosses the cut"
            )
            text.refuse("kv_source_layer_ids", supported)
        else:
            text.refuse(
                "compress_ratios",
                f"the same ratio in a layer and its KV source (layer {layer} has {ratios[layer]}, "
                f"layer {source} has {ratios[source]})",
            )
        return
    if late := [source for source in config.kv_source_layer_ids if source > cut]:
        text.refuse(
            "kv_source_layer_ids",
            f"no source after layer {cut}, where the decoder side begins, unlike {_show(late)}",
        )


def _check_candidates(config: ModelConfig, text: _Section) -> None:
    source = config.candidate_source_layer_id
    if source is None:
        return
    if text.good(
        "candidate_source_layer_id", "index_source_layer_ids", "kv_source_layer_ids", "compress_ratios"
    ):
        if source not in config.index_source_layer_ids:
            text.refuse(
                "candidate_source_layer_id",
                f"an index source, {_show(config.index_source_layer_ids)}, or null",
            )
        elif any(later > source for later in config.kv_source_layer_ids):
            text.refuse(
                "candidate_source_layer_id",
                "a layer after which no KV source comes: blocks are numbered in one compressed cache "
                f"(KV sources are {_show(config.kv_source_layer_ids)})",
            )
    if text.good("candidate_topk_blocks", "candidate_block_size", "index_topk"):
        capacity = config.candidate_topk_blocks * config.candidate_block_size
        if capacity < config.index_topk:
            text.refuse(
                "candidate_topk_blocks",
                f"blocks that hold index_topk entries: {config.candidate_topk_blocks} x "
                f"{config.candidate_block_size} is below {config.index_topk}",
            )


def _check_engram(config: ModelConfig, text: _Section) -> None:
    if not text.good("engram_layer_ids", "compress_ratios", "num_hidden_layers"):
        return
    if late := [layer for layer in config.engram_layer_ids if layer >= config.decoder_start]:
        text.refuse(
            "engram_layer_ids",
            f"layers below {config.decoder_start}, where the decoder side begins, unlike {late}",
        )
    if text.good("engram_compressed_vocab_size", "vocab_size"):
        if config.engram_compressed_vocab_size > config.vocab_size:
            text.refuse("engram_compressed_vocab_size", f"at most vocab_size, which is {config.vocab_size}")
    sized_by = ("engram_layer_ids", "engram_max_ngram_size", "engram_n_heads", "engram_vocab_size")
    rows = text.integers("engram_num_embeddings", "a list with the rows of each Engram table", default=())
    if text.has("engram_num_embeddings") and text.good("engram_num_embeddings", *sized_by):
        if rows != config.engram_num_embeddings:
            text.refuse(
                "engram_num_embeddings",
                f"{_show(config.engram_num_embeddings)}, the sums of the primes from engram_vocab_size on",
            )


def _check_draft(config: ModelConfig, text: _Section) -> None:
    key = "dspark_target_layer_ids"
    if not text.good(key, "compress_ratios", "num_hidden_layers") or not config.num_nextn_predict_layers:
        return
    targets, cut = config.dspark_target_layer_ids, config.decoder_start
    if not targets or targets[-1] >= config.num_hidden_layers:
        text.refuse(
            key, f"at least one layer, all below num_hidden_layers, which is {config.num_hidden_layers}"
        )
    elif len({layer >= cut for layer in targets}) > 1:
        text.refuse(key, f"layers on one side of layer {cut}, where the decoder side begins")


def _plain(value: float) -> int | float:
    """A whole number as the release writes it, without a fraction."""
    return int(value) if value.is_integer() else value


def _write(config: ModelConfig) -> dict[str, Any]:
    scaling, vision = config.rope_scaling, config.vision
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": 1,
        "head_dim": config.head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "q_lora_rank": config.q_lora_rank,
        "o_lora_rank": config.o_lora_rank,
        "o_groups": config.o_groups,
        "hidden_act": "silu",
        "swiglu_limit": config.swiglu_limit,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": _plain(config.rope_theta),
        "rope_scaling": scaling
        and {
            "rope_type": "yarn",
            "factor": _plain(scaling.factor),
            "beta_fast": _plain(scaling.beta_fast),
            "beta_slow": _plain(scaling.beta_slow),
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
        "compress_rope_theta": _plain(config.compress_rope_theta),
        "sliding_window": config.sliding_window,
        "compress_ratios": list(config.compress_ratios),
        "kv_source_layer_ids": list(config.kv_source_layer_ids),
        "index_source_layer_ids": list(config.index_source_layer_ids),
        "index_k_source_layer_ids": list(config.index_k_source_layer_ids),
        "index_n_heads": config.index_n_heads,
        "index_head_dim": config.index_head_dim,
        "index_topk": config.index_topk,
        "candidate_source_layer_id": config.candidate_source_layer_id,
        "candidate_topk_blocks": config.candidate_topk_blocks,
        "candidate_block_size": config.candidate_block_size,
        "hc_mult": config.hc_mult,
        "hc_sinkhorn_iters": config.hc_sinkhorn_iters,
        "hc_eps": config.hc_eps,
        "hc_shifted": True,
        "use_fp4_sparse_kv": True,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": config.routed_scaling_factor,
        "engram_layer_ids": list(config.engram_layer_ids),
        "engram_num_embeddings": list(config.engram_num_embeddings),
        "engram_max_ngram_size": config.engram_max_ngram_size,
        "engram_vocab_size": config.engram_vocab_size,
        "engram_n_heads": config.engram_n_heads,
        "engram_head_dim": config.engram_head_dim,
        "engram_pad_token_id": config.engram_pad_token_id,
        "engram_compressed_vocab_size": config.engram_compressed_vocab_size,
        "num_nextn_predict_layers": config.num_nextn_predict_layers,
        "dspark_block_size": config.dspark_block_size,
        "dspark_noise_token_id": config.dspark_noise_token_id,
        "dspark_target_layer_ids": list(config.dspark_target_layer_ids),
        "dspark_target_attn_input": True,
        "dspark_markov_rank": config.dspark_markov_rank,
        "dspark_n_routed_experts": config.dspark_n_routed_experts,
        "dspark_num_experts_per_tok": config.dspark_num_experts_per_tok,
    }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "image_token_id": config.image_token_id,
        "tokenizer_compatibility": config.tokenizer_compatibility,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_GROUP, _GROUP],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": vision
        and {
            "model_type": "deepseek_v41_vision",
            "num_hidden_layers": vision.num_hidden_layers,
            "hidden_size": vision.hidden_size,
            "num_attention_heads": vision.num_attention_heads,
            "intermediate_size": vision.intermediate_size,
            "patch_size": vision.patch_size,
            "rope_theta": _plain(vision.rope_theta),
            "downsample_ratio": vision.downsample_ratio,
            "max_image_tokens": vision.max_image_tokens,
            "min_pixels": vision.min_pixels,
            "max_wh_ratio": vision.max_wh_ratio,
        },
    }
