"""Every tensor of a checkpoint in the release format: name, shape, dtype.

Names are the checkpoint's own; dtypes are spelled as safetensors headers spell them. Imports no torch.

Source: section 3.2 of the model's fact sheet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer_plugins.model.config import ModelConfig

FP8_BLOCK = 32
FP4_GROUP = 32

DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor of the checkpoint must be.

    Args:
        shape: As stored.
        dtype: As stored, and as ``make_checkpoint`` writes it.
        also: Another dtype that is accepted.
    """

    shape: tuple[int, ...]
    dtype: str
    also: str | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class _Table(dict[str, TensorSpec]):
    """Specs by name, with one method for each storage format."""

    def bf16(self, name: str, *shape: int) -> None:
        self[name] = TensorSpec(shape, "BF16")

    def f32(self, name: str, *shape: int) -> None:
        self[name] = TensorSpec(shape, "F32")

    def fp8(self, name: str, out: int, inner: int) -> None:
        """An e4m3 matrix with one UE8M0 scale for each 32x32 block."""
        self[f"{name}.weight"] = TensorSpec((out, inner), "F8_E4M3")
        self[f"{name}.scale"] = TensorSpec((-(-out // FP8_BLOCK), -(-inner // FP8_BLOCK)), "F8_E8M0")

    def fp8_rows(self, name: str, rows: int, width: int) -> None:
        """An e4m3 table with one UE8M0 scale for each 32 values of a row."""
        self[f"{name}.weight"] = TensorSpec((rows, width), "F8_E4M3")
        self[f"{name}.scale"] = TensorSpec((rows, width // FP8_BLOCK), "F8_E8M0")

    def fp4(self, name: str, out: int, inner: int) -> None:
        """An e2m1 matrix, two values to a byte, with one UE8M0 scale for each 32 values of a row."""
        self[f"{name}.weight"] = TensorSpec((out, inner // 2), "I8")
        self[f"{name}.scale"] = TensorSpec((out, inner // FP4_GROUP), "F8_E8M0")


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor a checkpoint of ``config`` holds, in the order of computation."""
    table = _Table()
    hidden = config.hidden_size
    table.bf16("embed.weight", config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        _block(table, config, f"layers.{layer}", config.n_routed_experts, layer)
    table.bf16("norm.weight", hidden)
    table.bf16("head.weight", config.vocab_size, hidden)
    _draft(table, config)
    _vision(table, config)
    return table


def _block(table: _Table, config: ModelConfig, prefix: str, num_experts: int, layer: int | None) -> None:
    """One transformer block; ``layer`` is None for a draft layer, which has sliding-window attention only."""
    hidden, streams = config.hidden_size, config.hc_mult
    mixes = streams * (2 + streams)
    for part in ("attn", "ffn"):
        table.f32(f"{prefix}.hc_{part}_fn", mixes, streams * hidden)
        table.f32(f"{prefix}.hc_{part}_base", mixes)
        table.f32(f"{prefix}.hc_{part}_scale", 3)
        table.bf16(f"{prefix}.{part}_norm.weight", hidden)
    if layer in config.engram_layer_ids:
        _engram(table, config, f"{prefix}.engram", config.engram_layer_ids.index(layer))
    _attention(table, config, f"{prefix}.attn", layer)
    _moe(table, config, f"{prefix}.ffn", num_experts)


def _attention(table: _Table, config: ModelConfig, prefix: str, layer: int | None) -> None:
    hidden, head_dim = config.hidden_size, config.head_dim
    attention_width = config.num_attention_heads * head_dim
    table.f32(f"{prefix}.attn_sink", config.num_attention_heads)
    table.fp8(f"{prefix}.wq_a", config.q_lora_rank, hidden)
    table.bf16(f"{prefix}.q_norm.weight", config.q_lora_rank)
    table.fp8(f"{prefix}.wq_b", attention_width, config.q_lora_rank)
    table.fp8(f"{prefix}.wkv", head_dim, hidden)
    table.bf16(f"{prefix}.kv_norm.weight", head_dim)
    table.fp8(f"{prefix}.wo_a", config.o_groups * config.o_lora_rank, attention_width // config.o_groups)
    table.fp8(f"{prefix}.wo_b", hidden, config.o_groups * config.o_lora_rank)
    if layer is None:
        return
    if layer in config.kv_source_layer_ids:
        table.bf16(f"{prefix}.compressor.wkv.weight", head_dim, hidden)
        if config.compress_ratios[layer] == 2:
            table.bf16(f"{prefix}.compressor.wgate.weight", head_dim, hidden)
        table.bf16(f"{prefix}.compressor.norm.weight", head_dim)
    if layer in config.index_source_layer_ids:
        table.fp8(f"{prefix}.indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        table.bf16(f"{prefix}.indexer.weights_proj.weight", config.index_n_heads, hidden)
    if layer in config.index_k_source_layer_ids:
        table.bf16(f"{prefix}.indexer.wk.weight", config.index_head_dim, head_dim)
        table.bf16(f"{prefix}.indexer.k_norm.weight", config.index_head_dim)


def _moe(table: _Table, config: ModelConfig, prefix: str, num_experts: int) -> None:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    table.bf16(f"{prefix}.gate.weight", num_experts, hidden)
    table.f32(f"{prefix}.gate.bias", num_experts)
    table.f32(f"{prefix}.gate.bias_vl", num_experts)
    for name, out, inner in (("w1", width, hidden), ("w3", width, hidden), ("w2", hidden, width)):
        table.fp8(f"{prefix}.shared_experts.{name}", out, inner)
    for expert in range(num_experts):
        table.fp4(f"{prefix}.experts.{expert}.w1", width, hidden)
        table.fp4(f"{prefix}.experts.{expert}.w3", width, hidden)
        table.fp4(f"{prefix}.experts.{expert}.w2", hidden, width)


def _engram(table: _Table, config: ModelConfig, prefix: str, index: int) -> None:
    streams, hidden = config.hc_mult, config.hidden_size
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    table.bf16(f"{prefix}.q_weight", streams, hidden)
    table.bf16(f"{prefix}.k_weight", streams, hidden)
    table.fp8(f"{prefix}.wkv", (streams + 1) * hidden, columns * config.engram_head_dim)
    table.fp8_rows(f"{prefix}.embed", config.engram_num_embeddings[index], config.engram_head_dim)


def _draft(table: _Table, config: ModelConfig) -> None:
    count = config.num_nextn_predict_layers
    if count == 0:
        return
    hidden, rank = config.hidden_size, config.dspark_markov_rank
    table.fp8("mtp.0.main_proj", hidden, len(config.dspark_target_layer_ids) * hidden)
    table.bf16("mtp.0.main_norm.weight", hidden)
    for layer in range(count):
        _block(table, config, f"mtp.{layer}", config.dspark_n_routed_experts, None)
    last = f"mtp.{count - 1}"
    table.bf16(f"{last}.norm.weight", hidden)
    table.bf16(f"{last}.markov_head.embed.weight", config.vocab_size, rank)
    table.bf16(f"{last}.markov_head.head.weight", config.vocab_size, rank)
    # The only tensor that is rounded (to bf16) on its way into the model.
    table[f"{last}.confidence_head.proj.weight"] = TensorSpec((1, hidden + rank), "F32", also="BF16")


def _vision(table: _Table, config: ModelConfig) -> None:
    vision = config.vision
    if vision is None:
        return
    width, hidden = vision.hidden_size, config.hidden_size
    for name in ("image_start", "image_end", "image_newline"):
        table.bf16(name, hidden)
    table.bf16("vision.patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    table.bf16("vision.patch_embed.proj.bias", width)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        table.bf16(f"{prefix}.norm1.weight", width)
        table.bf16(f"{prefix}.attn.wqkv.weight", 3 * width, width)
        table.bf16(f"{prefix}.attn.wqkv.bias", 3 * width)
        table.bf16(f"{prefix}.attn.wo.weight", width, width)
        table.bf16(f"{prefix}.attn.wo.bias", width)
        table.bf16(f"{prefix}.norm2.weight", width)
        table.bf16(f"{prefix}.mlp.w1.weight", 2 * vision.intermediate_size, width)
        table.bf16(f"{prefix}.mlp.w2.weight", width, vision.intermediate_size)
    table.bf16("vision.norm.weight", width)
    table.bf16("aligner.w1.weight", hidden, width * vision.downsample_ratio**2)
    table.bf16("aligner.w1.bias", hidden)
    table.bf16("aligner.w2.weight", hidden, hidden)
    table.bf16("aligner.w2.bias", hidden)
