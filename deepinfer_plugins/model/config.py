"""The release's ``config.json``, typed and checked. Imports no torch.

Source: section 1.1 of the model's fact sheet; names are the checkpoint's own.
"""

from __future__ import annotations

from dataclasses import dataclass


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
