"""The caches of the model in SGLang's pools.

Every cache is addressed through SGLang's token slots, so its allocator, its radix tree, its
chunking and its retraction hold for all of them:

- the *full* pool has a slot per token for as long as the token is kept: compressed keys and index
  keys (a page of ``page_size`` slots holds ``page_size / ratio`` entries), and the token's own id,
  which the n-gram tables of a later step need. Where pages cut entries in two, that is at ratio 2 and
  an odd page size, an entry lies in the slot of the last token it stands for, and the other slot is
  spare: a prefix may then end in the middle of an entry, which each of its users completes for itself;
- the *window* pool (SGLang calls it SWA) has slots for the latest tokens only, and SGLang frees what
  fell behind the window: window keys, the compressor's waiting rows, a draft's context keys.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.pool_configurator import (
    MemoryPoolConfig,
    MemoryPoolConfigurator,
    compute_swa_request_cap,
)

from deepinfer_plugins.model.caches import CacheSpec
from deepinfer_plugins.model.step import Caches, Paged

# For tests: fill the caches with NaN instead of zeros. No result may change.
POISON = "DEEPINFER_TEST_POISON_CACHES"
_TOKEN_ID_BYTES = 4


def _tokens_per_entry(spec: CacheSpec, page_size: int) -> int:
    """Slots of the full pool that share a place for one entry."""
    return spec.ratio if page_size % spec.ratio == 0 else 1


def bytes_per_token(specs: Sequence[CacheSpec], page_size: int) -> tuple[int, int]:
    """Bytes that a slot of the full pool and one of the window pool take, in all layers together."""
    full = sum(
        -(-spec.record_bytes // _tokens_per_entry(spec, page_size)) for spec in specs if spec.window is None
    )
    window = sum(spec.record_bytes for spec in specs if spec.window is not None)
    return full + _TOKEN_ID_BYTES, window


class Sizes(MemoryPoolConfigurator):
    """How many tokens the two pools hold.

    Args:
        kvc: SGLang's ``KVCacheConfigurator``.
        specs: The model's caches.
        reserved: Bytes that will be taken for something else by the time that requests run.
    """

    def __init__(self, kvc: Any, specs: Sequence[CacheSpec], reserved: int = 0) -> None:
        from sglang.srt.runtime_context import get_schedule

        self._reserved = reserved
        self._full_bytes, self._window_bytes = bytes_per_token(specs, kvc.page_size)
        self._window = kvc.sliding_window_size
        schedule = get_schedule()
        self._ratio = schedule.swa_full_tokens_ratio
        self._least = compute_swa_request_cap(
            page_size=kvc.page_size, window=self._window, attn_dp_size=kvc.attn_dp_size
        )
        # A CPU's memory is shared with everything else: no more than every request at full length.
        self._most = (
            schedule.max_running_requests * kvc.model_config.context_len if kvc.device == "cpu" else None
        )

    def _config(self, full: int, page_size: int) -> MemoryPoolConfig:
        full = full // page_size * page_size
        window = max(self._least, int(full * self._ratio))
        window = min(-(-window // page_size) * page_size, full)
        self.validate_swa_pool_size(window, self._window, page_size)
        return MemoryPoolConfig(
            max_total_num_tokens=full, full_max_total_num_tokens=full, swa_max_total_num_tokens=window
        )

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        available_bytes = max(0, available_bytes - self._reserved)
        by_ratio = available_bytes / (self._full_bytes + self._ratio * self._window_bytes)
        by_least = (available_bytes - self._least * self._window_bytes) / self._full_bytes
        full = int(min(by_ratio, by_least))
        if self._most is not None:
            full = min(full, self._most)
        return self._config(max(full, 0), page_size)

    def calculate_pool_sizes_from_max_tokens(
        self, max_total_num_tokens: int, page_size: int
    ) -> MemoryPoolConfig:
        return self._config(max_total_num_tokens, page_size)


class _Slots(KVCache):
    """One pool: a tensor of pages per cache that lives in it.

    Slot ids of SGLang start at ``page_size``: page 0 takes what padding writes.
    """

    def __init__(self, size: int, page_size: int, device: str, specs: Sequence[CacheSpec]) -> None:
        super().__init__(size, page_size, torch.uint8, len(specs), device, enable_memory_saver=False)
        fill = 0xFF if os.environ.get(POISON, "") not in ("", "0") else 0
        num_pages = size // page_size + 1
        self.pages: dict[CacheSpec, torch.Tensor] = {}
        for spec in specs:
            entries = page_size // _tokens_per_entry(spec, page_size)
            shape = (num_pages, entries, spec.record_bytes)
            # Zeros from the operating system cost memory only where they are written.
            pages = torch.zeros(shape, dtype=torch.uint8, device=device)
            self.pages[spec] = pages.fill_(fill) if fill else pages

    def get_kv_size_bytes(self) -> int:
        return sum(pages.numel() for pages in self.pages.values())

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        raise NotImplementedError("DeepSeek-V4.1 keeps no plain keys; see deepinfer_plugins.sglang_ext.cache")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        raise NotImplementedError("DeepSeek-V4.1 keeps no values; see deepinfer_plugins.sglang_ext.cache")

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("DeepSeek-V4.1 keeps no plain keys; see deepinfer_plugins.sglang_ext.cache")

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the model writes its own caches; see deepinfer_plugins.sglang_ext.cache")


class CachePool(BaseSWAKVPool):
    """Both pools and the map between their slots, as SGLang's hybrid allocator wants them."""

    def __init__(
        self, full_tokens: int, window_tokens: int, page_size: int, device: str, specs: Sequence[CacheSpec]
    ):
        super().__init__(full_tokens, page_size, torch.uint8, len(specs), device, enable_memory_saver=False)
        self.size_swa = window_tokens
        self.full_kv_pool = _Slots(full_tokens, page_size, device, [s for s in specs if s.window is None])
        self.swa_kv_pool = _Slots(
            window_tokens, page_size, device, [s for s in specs if s.window is not None]
        )
        self.token_ids = torch.zeros(full_tokens + page_size, dtype=torch.int32, device=device)
        self.full_to_swa_index_mapping: torch.Tensor | None = None
        self.mem_usage = self.get_kv_size_bytes() / (1 << 30)

    @property
    def cuts_entries(self) -> bool:
        """Whether entries of two tokens lie across pages."""
        return self.page_size % 2 == 1

    def caches(
        self, full_table: torch.Tensor, window_table: torch.Tensor, pair_table: torch.Tensor | None
    ) -> Caches:
        """The caches as one step sees them.

        Args:
            full_table: ``[num_requests, max_pages]``, page ids in the full pool.
            window_table: The same for the window pool.
            pair_table: ``[num_requests, max_entries]``, slots in the full pool of the second token of each
                pair; used, and only then needed, if :attr:`cuts_entries`.
        """
        kinds: dict[str, dict[int, Paged]] = {
            kind: {} for kind in ("window", "compressed", "index_key", "compressor", "draft")
        }
        for pool, table in ((self.full_kv_pool, full_table), (self.swa_kv_pool, window_table)):
            for spec, pages in pool.pages.items():
                if spec.window is None and spec.ratio == 2 and self.cuts_entries:
                    assert pair_table is not None
                    pages = pages.view(-1, 1, spec.record_bytes)
                    kinds[spec.kind][spec.layer] = Paged(pages, pair_table)
                else:
                    kinds[spec.kind][spec.layer] = Paged(pages, table)
        return Caches(**kinds)

    def get_kv_size_bytes(self) -> int:
        return (
            self.full_kv_pool.get_kv_size_bytes()
            + self.swa_kv_pool.get_kv_size_bytes()
            + 4 * self.token_ids.numel()
        )

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        if self.full_to_swa_index_mapping is None:
            raise RuntimeError("the pool has no allocator yet: its slots can't be translated")
        return self.full_to_swa_index_mapping[kv_indices]

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        raise NotImplementedError("moving caches between servers is not supported yet")

    get_key_buffer = _Slots.get_key_buffer
    get_value_buffer = _Slots.get_value_buffer
    get_kv_buffer = _Slots.get_kv_buffer
    set_kv_buffer = _Slots.set_kv_buffer


def assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write new token slots into SGLang's table, by torch.

    Args:
        req_pool_indices: ``[requests]``; rows of the table.
        req_to_token: The table.
        start_offset, end_offset: ``[requests]``; the columns that each request gets.
        out_cache_loc: The slots, request after request.
        batch_size: The number of requests.
    """
    counts = (end_offset - start_offset).long()
    first = start_offset.long() - (counts.cumsum(0) - counts)
    column = first.repeat_interleave(counts) + torch.arange(len(out_cache_loc), device=counts.device)
    row = req_pool_indices.long().repeat_interleave(counts)
    req_to_token[row, column] = out_cache_loc.to(req_to_token.dtype)
