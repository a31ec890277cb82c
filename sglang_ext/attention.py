"""From SGLang's batch to the model's step: no arithmetic of the model, only addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_spec

from deepinfer_plugins.features.graphs import Graphs
from deepinfer_plugins.model.step import NO_POSITION, NO_TOKEN, Caches, Step
from deepinfer_plugins.sglang_ext.cache import CachePool


class Inputs(NamedTuple):
    """What one forward needs, read once at its start.

    SGLang's scheduler prepares the next batch while this one runs; after this is built, nothing of
    the scheduler's is read any more.

    Args:
        slots: int64 ``[num_requests]``; each request's row in SGLang's table of token slots.
        request, token_ids, positions: int64 ``[num_rows]``, as in ``Step``.
        first: int64 ``[num_requests]``, the position of each request's first row.
        longest: How many positions of each request to address; more than a request has is harmless.
    """

    slots: torch.Tensor
    request: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor
    longest: int


class _Buffers:
    """Where captured steps find their inputs and leave hidden states: those of ``Inputs``, for the largest of them.

    Args:
        max_requests: Of a step.
        max_rows: Of a step.
        hidden_size: Of the model.
        device: Of the model.
    """

    def __init__(self, max_requests: int, max_rows: int, hidden_size: int, device: torch.device) -> None:
        self.max_requests = max_requests
        self.slots, self.first = (
            torch.zeros(max_requests, dtype=torch.int64, device=device) for _ in range(2)
        )
        self.request, self.token_ids, self.positions = (
            torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.hidden = torch.empty(max_rows, hidden_size, dtype=torch.bfloat16, device=device)

    def inputs(self, size: int, longest: int) -> Inputs:
        """Those of a step of ``size`` rows, which has as many requests at most."""
        count = min(size, self.max_requests)
        return Inputs(
            self.slots[:count],
            self.request[:size],
            self.token_ids[:size],
            self.positions[:size],
            self.first[:count],
            longest,
        )

    def fill(self, inputs: Inputs, size: int) -> None:
        """Take in a step, and rows of padding up to ``size``."""
        requests, rows = inputs.slots.shape[0], inputs.token_ids.shape[0]
        self.slots[:requests], self.first[:requests] = inputs.slots, inputs.first
        self.request[:rows], self.request[rows:size] = inputs.request, 0
        self.token_ids[:rows] = inputs.token_ids
        self.positions[:rows], self.positions[rows:size] = inputs.positions, NO_POSITION


class StepBackend(AttentionBackend):
    """An attention backend by SGLang's registry, though the model attends by itself.

    Args:
        runner: SGLang's ``ModelRunner``.
        context_length: How many tokens before its own the model wants to know of each request.
    """

    forward_metadata: Inputs | None

    def __init__(self, runner: Any, context_length: int) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, CachePool):
            raise RuntimeError(
                f"the KV pool is {type(pool).__name__}, not ours: the patch of the pool has no effect"
            )
        self.network = runner.model.network
        # Numbers of requests whose steps are captured, and the memory of those graphs.
        self.captured: tuple[int, ...] = ()
        self.graph_pool: Any = None
        # Whether the last step was replayed, and the rows that it ran, padding included.
        self.replays = False
        self.num_rows = 0
        self._buffers: _Buffers | None = None
        self._graphs: Graphs[None] | None = None
        self.token_to_kv_pool = pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.context_length = context_length
        self.forward_metadata = None
        # With drafts only the device knows how many tokens a step accepted. A bound, which the scheduler has
        # anyway, is enough for page tables, so it need not wait for the number.
        self.needs_cpu_seq_lens = get_spec().speculative_algorithm is None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = None if forward_batch.forward_mode.is_idle() else self._read(forward_batch)

    def _read(self, batch: Any) -> Inputs:
        num_requests, num_rows = batch.batch_size, batch.input_ids.shape[0]
        request = torch.arange(num_requests, device=batch.input_ids.device)
        if batch.forward_mode.is_decode():
            first = batch.seq_lens.long() - 1
        else:
            request = torch.repeat_interleave(request, batch.extend_seq_lens.long(), output_size=num_rows)
            first = batch.extend_prefix_lens.long()
        longest = int(batch.seq_lens_cpu.max())
        slots = batch.req_pool_indices.long()
        return Inputs(slots, request, batch.input_ids.long(), batch.positions.long(), first, longest)

    def run(self, inputs: Inputs) -> torch.Tensor:
        """Hidden states of the rows, bf16 ``[num_rows, hidden]``; valid until the next step."""
        rows = inputs.token_ids.shape[0]
        size = None if self._graphs is None else self._graphs.size_for(rows)
        if (
            self._graphs is None
            or self._buffers is None
            or size is None
            or inputs.slots.shape[0] > self._buffers.max_requests
        ):
            self.replays, self.num_rows = False, rows
            return self._run(inputs)
        self.replays, self.num_rows = True, size
        self._buffers.fill(inputs, size)
        self._graphs.replay(size)
        return self._buffers.hidden[:rows]

    def _run(self, inputs: Inputs) -> torch.Tensor:
        step = self.step(*inputs[:-1])
        hidden: torch.Tensor = self.network(step, self.caches(inputs.slots, inputs.longest))
        return hidden

    @property
    def longest(self) -> int:
        """As many positions as a request can have."""
        return int(self.req_to_token_pool.req_to_token.shape[1])

    def capture(self, sizes: Sequence[int], width: int) -> None:
        """Capture steps in CUDA graphs; they serve all that have no more rows, whatever those are.

        Args:
            sizes: Numbers of requests.
            width: Rows of each.
        """
        device = self.token_to_kv_pool.token_ids.device
        buffers = _Buffers(max(sizes), max(sizes) * width, self.network.config.hidden_size, device)
        buffers.positions.fill_(NO_POSITION)

        def run(size: int) -> None:
            buffers.hidden[:size] = self._run(buffers.inputs(size, self.longest))

        graphs = Graphs(run, [size * width for size in sizes])
        self.graph_pool = graphs.capture()
        self.captured, self._buffers, self._graphs = tuple(sizes), buffers, graphs

    def step(
        self,
        slots: torch.Tensor,
        request: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        first: torch.Tensor,
    ) -> Step:
        """A step of these rows; notes their tokens for the n-grams of later steps. Arguments: :class:`Inputs`."""
        pool, table = self.token_to_kv_pool, self.req_to_token_pool.req_to_token
        # Slot 0 is nobody's.
        slot = torch.where(positions < 0, 0, table[slots[request], positions].long())
        pool.token_ids[slot] = token_ids.int()
        before = first[:, None] - torch.arange(1, self.context_length + 1, device=token_ids.device)
        known = pool.token_ids[table[slots[:, None], before.clamp(min=0)].long()].long()
        return Step(token_ids, positions, request, torch.where(before < 0, NO_TOKEN, known))

    def caches(self, slots: torch.Tensor, longest: int) -> Caches:
        """The caches of some requests.

        Args:
            slots: As for :class:`Inputs`.
            longest: As for :class:`Inputs`.
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
        raise NotImplementedError("the steps of DeepSeek-V4.1 are captured by StepBackend.capture")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1
