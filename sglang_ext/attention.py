"""From SGLang's batch to the model's step: no arithmetic of the model, only addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

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

    needs_cpu_seq_lens = True
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

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = None if forward_batch.forward_mode.is_idle() else self._read(forward_batch)

    def _read(self, batch: Any) -> Batch:
        pool, page_size = self.token_to_kv_pool, self.token_to_kv_pool.page_size
        token_ids = batch.input_ids.long()
        num_requests, num_rows = batch.batch_size, token_ids.shape[0]
        requests = torch.arange(num_requests, device=token_ids.device)
        if batch.forward_mode.is_decode():
            request, first = requests, batch.seq_lens.long() - 1
        else:
            request = torch.repeat_interleave(requests, batch.extend_seq_lens.long(), output_size=num_rows)
            first = batch.extend_prefix_lens.long()

        rows = batch.req_pool_indices.long()
        slots = self.req_to_token_pool.req_to_token
        longest = int(batch.seq_lens_cpu.max())
        # The first slot of a page names it: slots of a page are handed out together, in both pools.
        heads = slots[rows, : max(longest, 1) : page_size].long()
        full_table = heads // page_size
        window_table = pool.translate_loc_from_full_to_swa(heads) // page_size
        # One column further than the last token: half a pair has a column too.
        pair_table = slots[rows, 1 : longest + 1 : 2] if pool.cuts_entries else None

        pool.token_ids[batch.out_cache_loc] = token_ids.int()
        before = first[:, None] - torch.arange(1, self.context_length + 1, device=token_ids.device)
        known = pool.token_ids[slots[rows[:, None], before.clamp(min=0)].long()].long()
        step = Step(
            token_ids=token_ids,
            positions=batch.positions.long(),
            request=request,
            context_ids=torch.where(before < 0, NO_TOKEN, known),
        )
        return Batch(step, pool.caches(full_table, window_table, pair_table))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise NotImplementedError("deepinfer_plugins runs without CUDA graphs yet; leave --cuda-graph-* out")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1
