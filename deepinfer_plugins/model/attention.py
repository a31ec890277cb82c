"""Shared-latent attention: sliding window, compressed keys and the indexer that selects among them.

A layer first writes the keys of its rows to the caches and then reads all keys, its own rows'
included, back from them. So prefill, decode, and verification of drafts see the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from deepinfer_plugins.kernels.catalogue import Ops
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.layers import (
    WEIGHT_BLOCK,
    Fp8Linear,
    Linear,
    Norm,
    Quantized,
    Target,
    Targets,
    quantize,
    weight,
)
from deepinfer_plugins.model.rows import Rows
from deepinfer_plugins.model.step import Caches, Paged


class Selection(NamedTuple):
    """What an index source chose for its rows; the layers up to the next source use it too.

    Args:
        indices: ``[n, index_topk]``, int32; compressed entries, ascending, -1 at the end.
        candidates: ``[n, candidate_topk_blocks]``, int32; blocks that later sources choose within,
            ascending, -1 at the end. None before the candidate source.
    """

    indices: torch.Tensor
    candidates: torch.Tensor | None


class Compressor(nn.Module):
    """Makes the compressed keys, and the index keys, of a KV source layer."""

    def __init__(
        self, config: ModelConfig, layer: int, ops: Ops, rope_table: torch.Tensor, device: torch.device
    ) -> None:
        super().__init__()
        self.ops = ops
        self.layer = layer
        self.rope_table = rope_table
        self.ratio = config.compress_ratios[layer]
        self.head_dim = config.head_dim
        size, eps = config.head_dim, config.rms_norm_eps
        if self.ratio == 1:
            self.latent = Linear(ops, {"wkv": size}, config.hidden_size, device)
        else:
            parts = {"wgate": size, "wkv": size}
            self.latent = Linear(ops, parts, config.hidden_size, device, out_dtype=torch.float32)
        self.norm = Norm(ops, size, eps, device)
        self.index_key = Linear(ops, {"wk": config.index_head_dim}, size, device)
        self.index_norm = Norm(ops, config.index_head_dim, eps, device)

    def targets(self, prefix: str) -> Targets:
        yield from self.latent.targets(f"{prefix}compressor.")
        yield from self.norm.targets(f"{prefix}compressor.norm")
        yield from self.index_key.targets(f"{prefix}indexer.")
        yield from self.index_norm.targets(f"{prefix}indexer.k_norm")

    def forward(self, y: torch.Tensor, rows: Rows, caches: Caches) -> None:
        """Write the entries that the step's rows complete.

        Rows that complete no entry are computed all the same and not stored: how many do is known on
        the device only, and the host must not wait for it.

        Args:
            y: ``[num_local, hidden]``, bf16, normed.
            rows: The step.
            caches: Written: ``compressed``, ``index_key`` and, at ratio 2, ``compressor``.
        """
        latent = rows.gather(self.latent(y))
        if self.ratio > 1:
            latent = self._pool(latent, rows, caches.compressor[self.layer])
        latent = self.norm(latent)
        # An entry sits at the first position it stands for.
        positions = (rows.step.positions // self.ratio * self.ratio).clamp(min=0)
        key = self.ops.rope(latent[:, None], positions, self.rope_table, False)[:, 0]
        pages = caches.compressed[self.layer]
        self.ops.store_compressed(key, pages.pages, rows.entry_slots(pages, self.ratio))
        index_key = self.index_norm(self.index_key(latent))
        index_key = self.ops.rope(index_key[:, None], positions, self.rope_table, False)[:, 0]
        pages = caches.index_key[self.layer]
        self.ops.store_index_key(index_key, pages.pages, rows.entry_slots(pages, self.ratio))

    def _pool(self, latent: torch.Tensor, rows: Rows, cache: Paged) -> torch.Tensor:
        """Pool each odd row with the row before it, which this step or an earlier one stored."""
        gates, latents = latent.split(self.head_dim, dim=1)
        slots = rows.position_slots(cache)
        self.ops.store_compressor(gates, latents, cache.pages, slots)
        first = self.ops.load_compressor(cache.pages, rows.partner_slots(cache))
        return self.ops.pool_pairs(
            torch.stack([first[0], gates], dim=1), torch.stack([first[1], latents], dim=1)
        )


class Indexer(nn.Module):
    """Selects, for each row, the compressed entries it attends to."""

    def __init__(
        self, config: ModelConfig, layer: int, ops: Ops, rope_table: torch.Tensor, device: torch.device
    ) -> None:
        super().__init__()
        self.ops = ops
        self.rope_table = rope_table
        self.ratio = config.compress_ratios[layer]
        self.key_layer = config.index_k_source(layer)
        self.heads = config.index_n_heads
        self.topk = config.index_topk
        self.block_size = config.candidate_block_size
        source = config.candidate_source_layer_id
        self.publish_blocks = config.candidate_topk_blocks if layer == source else 0
        self.within_candidates = source is not None and layer > source
        self.query = Fp8Linear(
            ops, {"wq_b": config.index_n_heads * config.index_head_dim}, config.q_lora_rank, device
        )
        self.head_weights = Linear(ops, {"weights_proj": config.index_n_heads}, config.hidden_size, device)

    def targets(self, prefix: str) -> Targets:
        yield from self.query.targets(f"{prefix}indexer.")
        yield from self.head_weights.targets(f"{prefix}indexer.")

    def forward(
        self, y: torch.Tensor, q_lora: Quantized, rows: Rows, caches: Caches, before: Selection | None
    ) -> Selection:
        """Score the index keys and keep the best.

        Args:
            y: ``[n, hidden]``, bf16, normed.
            q_lora: ``[n, q_lora_rank]``, the normed low-rank query.
            rows: The step.
            caches: Read: ``index_key``.
            before: The selection of the source before this one, for its candidates.
        """
        q = self.query(q_lora).unflatten(1, (self.heads, -1))
        q = self.ops.rope(q, rows.angles, self.rope_table, False)
        candidates = before.candidates if self.within_candidates and before is not None else None
        assert self.key_layer is not None
        keys = caches.index_key[self.key_layer]
        indices, blocks = self.ops.index_select(
            q,
            self.head_weights(y),
            keys.pages,
            keys.table,
            rows.request,
            rows.lengths(self.ratio),
            self.topk,
            candidates,
            self.publish_blocks,
            self.block_size,
        )
        return Selection(indices, blocks if self.publish_blocks else candidates)


class Attention(nn.Module):
    """Attention of one layer of the backbone, or of the draft (``ratio`` 0)."""

    def __init__(
        self, config: ModelConfig, layer: int, ops: Ops, rope_table: torch.Tensor, device: torch.device
    ) -> None:
        super().__init__()
        self.ops = ops
        self.layer = layer
        self.rope_table = rope_table
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.groups = config.o_groups
        self.scale = config.head_dim**-0.5
        self.kv_layer = config.kv_source(layer)
        q_lora, eps = config.q_lora_rank, config.rms_norm_eps
        width = self.heads * self.head_dim
        self.wqkv_a = Fp8Linear(ops, {"wq_a": q_lora, "wkv": self.head_dim}, config.hidden_size, device)
        self.q_norm = Norm(ops, q_lora, eps, device)
        self.kv_norm = Norm(ops, self.head_dim, eps, device)
        self.wq_b = Fp8Linear(ops, {"wq_b": width}, q_lora, device)
        self.wo_a = Fp8Linear(ops, {"wo_a": self.groups * config.o_lora_rank}, width // self.groups, device)
        self.wo_b = Fp8Linear(ops, {"wo_b": config.hidden_size}, self.groups * config.o_lora_rank, device)
        self.sinks = weight((self.heads,), torch.float32, device)
        self.compressor: Compressor | None = None
        if layer in config.kv_source_layer_ids:
            self.compressor = Compressor(config, layer, ops, rope_table, device)
        self.indexer: Indexer | None = None
        if layer in config.index_source_layer_ids:
            self.indexer = Indexer(config, layer, ops, rope_table, device)

    def targets(self, prefix: str) -> Targets:
        yield from self.wqkv_a.targets(prefix)
        yield from self.q_norm.targets(f"{prefix}q_norm")
        yield from self.kv_norm.targets(f"{prefix}kv_norm")
        yield from self.wq_b.targets(prefix)
        yield from self.wo_a.targets(prefix)
        yield from self.wo_b.targets(prefix)
        yield f"{prefix}attn_sink", Target(self.sinks)
        if self.compressor is not None:
            yield from self.compressor.targets(prefix)
        if self.indexer is not None:
            yield from self.indexer.targets(prefix)

    def forward(
        self, y: torch.Tensor, rows: Rows, caches: Caches, selection: Selection | None
    ) -> tuple[torch.Tensor, Selection | None]:
        """Attend to the window and to the selected compressed entries.

        Compressed keys of these rows must have been written (``compressor``) before.

        Args:
            y: ``[n, hidden]``, bf16, normed.
            rows: The step.
            caches: Written and read: ``window``. Read: ``compressed``, ``index_key``.
            selection: What the last index source chose.

        Returns:
            ``[n, hidden]``, bf16, and the selection for the layers that follow.
        """
        q_lora, kv = self.project(y)
        window = caches.window[self.layer]
        self.store(kv, rows, window)
        if self.indexer is not None:
            selection = self.indexer(y, q_lora, rows, caches, selection)
        compressed = None if self.kv_layer is None else caches.compressed[self.kv_layer]
        return self.attend(q_lora, rows, window, rows.positions, compressed, selection), selection

    def project(self, y: torch.Tensor) -> tuple[Quantized, torch.Tensor]:
        """The normed low-rank query, and the latent that is both key and value, before its norm."""
        q_lora, kv = self.wqkv_a(quantize(self.ops, y)).split(
            [self.q_norm.weight.shape[0], self.head_dim], dim=1
        )
        return quantize(self.ops, self.q_norm(q_lora)), kv

    def key_latent(self, x: Quantized) -> torch.Tensor:
        """:meth:`project`'s second result alone."""
        start = self.q_norm.weight.shape[0]
        return self.ops.mxfp8_linear(
            x.values, x.scales, self.wqkv_a.weight[start:], self.wqkv_a.scale[start // WEIGHT_BLOCK :]
        )

    def store(self, kv: torch.Tensor, rows: Rows, window: Paged) -> None:
        """Write the window keys of all rows. ``kv`` is ``[num_local, head_dim]``, bf16, before its norm."""
        key = self.ops.rope(self.kv_norm(kv)[:, None], rows.angles, self.rope_table, False)[:, 0]
        self.ops.store_window(rows.gather(key), window.pages, rows.position_slots(window))

    def attend(
        self,
        q_lora: Quantized,
        rows: Rows,
        window: Paged,
        window_end: torch.Tensor,
        compressed: Paged | None,
        selection: Selection | None,
    ) -> torch.Tensor:
        """Softmax over window, selection and sink, then the output projections; bf16 ``[n, hidden]``."""
        q = self.wq_b(q_lora).unflatten(1, (self.heads, self.head_dim))
        q = self.ops.rope(q, rows.angles, self.rope_table, False)
        out = self.ops.sparse_attention(
            q,
            window.pages,
            window.table,
            None if compressed is None else compressed.pages,
            None if compressed is None else compressed.table,
            None if selection is None else selection.indices,
            rows.request,
            rows.window_start,
            window_end,
            self.sinks,
            self.scale,
        )
        # Keys are values, rotated by their position: turn the sum back by the query's.
        out = self.ops.rope(out, rows.angles, self.rope_table, True)
        n, width = out.shape[0], self.heads * self.head_dim // self.groups
        cast = quantize(self.ops, out.reshape(n * self.groups, width))
        grouped = Quantized(
            cast.values.view(n, self.groups, width), cast.scales.view(n, self.groups, cast.scales.shape[1])
        )
        return self.wo_b(quantize(self.ops, self.wo_a.grouped(grouped).flatten(1)))
