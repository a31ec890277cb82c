"""The draft's context keys in vLLM's KV cache manager: kept for prefix hits while they last, and never in their way.

vLLM takes a prefix as known as far as *every* group of caches knows it. Without context keys a draft is only worse, so
this group agrees to any length. Where its blocks are gone it has null blocks, and a draft starts its window behind
them (:func:`~deepinfer_plugins.vllm_ext.v0_33.deepseek_v41.speculator.window_floor`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowMLASpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class DraftWindowSpec(SlidingWindowMLASpec):
    """A window of the draft's context keys."""


class DraftWindowManager(SlidingWindowManager):
    """Blocks of such a window."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **ranks: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """All of ``max_length``, down to a length that a hit can have, with the blocks that are still there.

        Only those in a row before the end of it: vLLM takes a null block to have none before it.
        """
        assert isinstance(kv_cache_spec, DraftWindowSpec)
        size = kv_cache_spec.block_size
        length = max_length - max_length % alignment_tokens
        count = length // size
        found: tuple[list[KVCacheBlock], ...] = tuple(
            [block_pool.null_block] * count for _ in kv_cache_group_ids
        )
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        for index in range(count - 1, max(-1, count - 1 - cdiv(kv_cache_spec.sliding_window, size)), -1):
            cached = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            if not cached:
                break
            for blocks, block in zip(found, cached, strict=True):
                blocks[index] = block
        return found, length


def register() -> None:
    """Tell vLLM which manager the spec has. Doing it again does nothing."""
    KVCacheSpecRegistry.register(DraftWindowSpec, DraftWindowManager)
