"""Shapes of checkpoints: the release's own, and small ones that keep every kind of layer it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deepinfer_plugins.model.config import ModelConfig, RopeScaling, VisionConfig


def release() -> ModelConfig:
    """DeepSeek-V4.1-Flash-1017."""
    return ModelConfig(
        vocab_size=129280,
        hidden_size=5120,
        num_hidden_layers=40,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1280,
        o_lora_rank=1024,
        o_groups=8,
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        max_position_embeddings=1048576,
        rope_theta=10000.0,
        rope_scaling=RopeScaling(
            factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536
        ),
        compress_rope_theta=160000.0,
        sliding_window=128,
        compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
        kv_source_layer_ids=(2, 8, 14, 20),
        index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
        index_k_source_layer_ids=(2, 8, 14, 20),
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        n_routed_experts=384,
        num_experts_per_tok=6,
        moe_intermediate_size=2304,
        routed_scaling_factor=1.5,
        engram_layer_ids=(1, 14),
        engram_max_ngram_size=4,
        engram_vocab_size=16_000_000,
        engram_n_heads=8,
        engram_head_dim=256,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=99092,
        num_nextn_predict_layers=3,
        dspark_block_size=5,
        dspark_noise_token_id=128799,
        dspark_target_layer_ids=(37, 38, 39),
        dspark_markov_rank=256,
        dspark_n_routed_experts=128,
        dspark_num_experts_per_tok=3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=129264,
        vision=VisionConfig(
            num_hidden_layers=32,
            hidden_size=1024,
            num_attention_heads=16,
            intermediate_size=2816,
            patch_size=14,
            downsample_ratio=3,
        ),
    )


# engram_compressed_vocab_size of the shapes below is what the tokenizer of tokenizer_data.py comes to.


def small() -> ModelConfig:
    """A few MB with every kind of layer: the default of ``make-checkpoint``, and what most tests run on.

    ``index_topk``, ``candidate_topk_blocks`` and the context that YaRN stretches are so small that a prompt
    of a few hundred tokens goes beyond each of them.
    """
    return replace(
        release(),
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=2,
        max_position_embeddings=4096,
        rope_scaling=RopeScaling(
            factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=256
        ),
        sliding_window=64,
        compress_ratios=(0,) * 2 + (2,) * 6 + (1,) * 4 + (0,) * 3,
        kv_source_layer_ids=(2, 4, 6, 8),
        index_source_layer_ids=(2, 4, 6, 8, 10),
        index_k_source_layer_ids=(2, 4, 6, 8),
        index_n_heads=4,
        index_head_dim=64,
        index_topk=32,
        candidate_source_layer_id=8,
        candidate_topk_blocks=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        engram_layer_ids=(1, 4),
        engram_vocab_size=1000,
        engram_n_heads=4,
        engram_head_dim=32,
        engram_compressed_vocab_size=854,
        dspark_noise_token_id=1007,
        dspark_target_layer_ids=(9, 10, 11),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        image_token_id=1008,
        vision=VisionConfig(
            num_hidden_layers=1,
            hidden_size=32,
            num_attention_heads=2,
            intermediate_size=64,
            patch_size=14,
            downsample_ratio=3,
        ),
    )


def tiny() -> ModelConfig:
    """The fewest layers that still have every kind among them, for tests that run the model often."""
    return replace(
        small(),
        num_hidden_layers=6,
        compress_ratios=(0, 2, 2, 1, 1, 1) + (0,),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 4),
        index_k_source_layer_ids=(1, 3),
        candidate_source_layer_id=3,
        engram_layer_ids=(1,),
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=(4, 5),
        sliding_window=16,
        index_topk=8,
        candidate_block_size=8,
    )


def wide() -> ModelConfig:
    """Layers of the release's widths, few of them, few experts and small Engram tables: about 4 GB."""
    full = release()
    return replace(
        full,
        vocab_size=4096,
        num_hidden_layers=6,
        compress_ratios=(0, 2, 2, 1, 1, 1) + (0,) * 3,
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 4),
        index_k_source_layer_ids=(1, 3),
        candidate_source_layer_id=3,
        n_routed_experts=16,
        engram_layer_ids=(1,),
        engram_vocab_size=16_000,
        engram_compressed_vocab_size=3922,
        dspark_noise_token_id=4079,
        dspark_target_layer_ids=(4, 5),
        dspark_n_routed_experts=8,
        image_token_id=4080,
        vision=replace(full.vision, num_hidden_layers=1) if full.vision else None,
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "small": small,
    "tiny": tiny,
    "wide": wide,
    "release": release,
}


def preset(name: str) -> ModelConfig:
    """The configuration of a preset.

    Raises:
        ValueError: There is no preset of that name.
    """
    if name not in PRESETS:
        raise ValueError(f"no shape is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]()
