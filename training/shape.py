"""The shape of the trained checkpoint: every kind of layer, under 8 MB in the release format."""

from __future__ import annotations

from dataclasses import replace

from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.presets import small


def trained() -> ModelConfig:
    """Twelve layers of width 128 with eight experts, trained on sequences of 512 tokens.

    Selection bites from 256 tokens on (ratio 2) and from 128 on (ratio 1); candidate blocks bite beyond the
    length trained on.
    """
    base = small()
    return replace(
        base,
        vocab_size=2048,
        o_lora_rank=32,
        index_topk=128,
        candidate_topk_blocks=64,
        n_routed_experts=8,
        moe_intermediate_size=96,
        engram_vocab_size=500,
        dspark_n_routed_experts=4,
        dspark_noise_token_id=2031,
        dspark_markov_rank=32,
        image_token_id=2032,
    )
