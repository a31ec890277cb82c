"""From SGLang's batch to the model's step: no arithmetic of the model, only addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_spec

from deepinfer_plugins.model.step import NO_TOKEN, Caches, Step
from deepinfer_plugins.sglang_ext.cache import CachePool


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one forward needs, read once at its start.

    SGLang's scheduler prepares the next batch while this one runs; after this is built, nothing of
    the scheduler's is read any more.
    """

    step: Step
    caches: Caches


class StepBackend(AttentionBackend):
    """An attention backend by SGLang's registry, though the model attends by itself.

    Args:
        runner: SGLang's ``ModelRunner``.
        context_length: How many tokens before its own the model wants to know of each request.
    """

    forward_metadata: Batch | None

    def __init__(self, runner: Any, context_length: int) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, CachePool):
            raise RuntimeError(
                f"the KV pool is {type(pool).__name__}, not ours: the patch of the pool has no effect"
            )
        self.token_to_kv_pool = pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.context_length = context_length
        self.forward_metadata = None
        # With drafts only the device knows how many tokens a step accepted. A bound, which the scheduler has
        # anyway, is enough for page tables, so it need not wait for the number.
        self.needs_cpu_seq_lens = get_spec().speculative_algorithm is None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = None if forward_batch.forward_mode.is_idle() else self._read(forward_batch)

    def _read(self, batch: Any) -> Batch:
        num_requests, num_rows = batch.batch_size, batch.input_ids.shape[0]
        request = torch.arange(num_requests, device=batch.input_ids.device)
        if batch.forward_mode.is_decode():
            first = batch.seq_lens.long() - 1
        else:
            request = torch.repeat_interleave(request, batch.extend_seq_lens.long(), output_size=num_rows)
            first = batch.extend_prefix_lens.long()
        slots = batch.req_pool_indices.long()
        step = self.step(slots, request, batch.input_ids.long(), batch.positions.long(), first)
        return Batch(step, self.caches(slots, int(batch.seq_lens_cpu.max())))

    def step(
        self,
        slots: torch.Tensor,
        request: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        first: torch.Tensor,
    ) -> Step:
        """A step of these rows; notes their tokens for the n-grams of later steps.

        Args:
            slots: int64 ``[num_requests]``; each request's row in SGLang's table of token slots.
            request, token_ids, positions: int64 ``[num_rows]``, as in ``Step``.
            first: int64 ``[num_requests]``, the position of each request's first row.
        """
        pool, table = self.token_to_kv_pool, self.req_to_token_pool.req_to_token
        pool.token_ids[table[slots[request], positions].long()] = token_ids.int()
        before = first[:, None] - torch.arange(1, self.context_length + 1, device=token_ids.device)
        known = pool.token_ids[table[slots[:, None], before.clamp(min=0)].long()].long()
        return Step(token_ids, positions, request, torch.where(before < 0, NO_TOKEN, known))

    def caches(self, slots: torch.Tensor, longest: int) -> Caches:
        """The caches of some requests.

        Args:
            slots: As for :meth:`step`.
            longest: How many positions of each to address; more than a request has is harmless.
        """
        pool, page_size = self.token_to_kv_pool, self.token_to_kv_pool.page_size
        table = self.req_to_token_pool.req_to_token
        # The first slot of a page names it: slots of a page are handed out together, in both pools.
        heads = table[slots, : max(longest, 1) : page_size].long()
        window_table = pool.translate_loc_from_full_to_swa(heads) // page_size
        # One column further than the last token: half a pair has a column too.
        pair_table = table[slots, 1 : longest + 1 : 2] if pool.cuts_entries else None
        return pool.caches(heads // page_size, window_table, pair_table)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise NotImplementedError("deepinfer_plugins runs without CUDA graphs yet; leave --cuda-graph-* out")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1
