"""Which caches the model keeps, for an engine to allocate. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepinfer_plugins.kernels import cache_layout
from deepinfer_plugins.model.config import ModelConfig

Kind = Literal["window", "compressed", "index_key", "compressor", "draft"]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache: a field of ``Caches`` and a key in it, with what an allocator must know.

    Args:
        kind: The field of ``Caches``.
        layer: The key in that field.
        ratio: Positions that one entry stands for.
        window: How many of the latest positions a row reads, its own included; older entries may be
            freed. None if all of them.
        record_bytes: Bytes of one entry.
    """

    kind: Kind
    layer: int
    ratio: int
    window: int | None
    record_bytes: int

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.layer}"


def cache_specs(config: ModelConfig, draft: bool = False) -> tuple[CacheSpec, ...]:
    """Every cache of the model, layer by layer.

    Args:
        config: The model.
        draft: Whether the draft layers' context keys are kept too.
    """
    window_bytes = cache_layout.window_bytes(config.head_dim)
    specs: list[CacheSpec] = []
    for layer in range(config.num_hidden_layers):
        ratio = config.compress_ratios[layer]
        specs.append(CacheSpec("window", layer, 1, config.sliding_window, window_bytes))
        if layer in config.kv_source_layer_ids:
            record = cache_layout.compressed_bytes(config.head_dim)
            specs.append(CacheSpec("compressed", layer, ratio, None, record))
        if layer in config.index_k_source_layer_ids:
            record = cache_layout.index_key_bytes(config.index_head_dim)
            specs.append(CacheSpec("index_key", layer, ratio, None, record))
        if layer in config.kv_source_layer_ids and ratio > 1:
            record = cache_layout.compressor_bytes(config.head_dim)
            specs.append(CacheSpec("compressor", layer, 1, ratio, record))
    if draft:
        for layer in range(config.num_nextn_predict_layers):
            specs.append(CacheSpec("draft", layer, 1, config.sliding_window, window_bytes))
    return tuple(specs)
