"""Drafting and verification under SGLang: what its scheduler calls in the place of its own DSpark worker.

The draft layers are part of the one model object (they share its embedding, its head and its checkpoint, and read
keys that its own forward writes), so there is no second model runner, pool or backend for them. A step of the
scheduler drafts after each request's last token, verifies and accepts: between steps nothing of a draft is
kept, so that a request may be aborted, retracted or resumed at any time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from deepinfer_plugins.features.sampling import Rows
from deepinfer_plugins.features.verification import verify
from deepinfer_plugins.model.step import NO_TOKEN


class Window(NamedTuple):
    """The rows of one verification: each request's last token and, after it, some of its drafts.

    Args:
        request: int64 ``[rows]``.
        place: int64 ``[rows]``; 0 for the last token, ``i`` for draft ``i``, counted from 1.
        offsets: int64 ``[requests + 1]``; where the rows of each request start.
        token_ids: int64 ``[rows]``.
        prefix: int64 ``[rows, depth]``; the drafts before and at each row, -1 after them.
    """

    request: torch.Tensor
    place: torch.Tensor
    offsets: torch.Tensor
    token_ids: torch.Tensor
    prefix: torch.Tensor

    @classmethod
    def of(
        cls, last: torch.Tensor, drafts: torch.Tensor, lengths: torch.Tensor | None, num_rows: int
    ) -> Window:
        """Lay out the rows without looking at a number on the device.

        Args:
            last: int64 ``[requests]``.
            drafts: int64 ``[requests, depth]``.
            lengths: int64 ``[requests]``; drafts to verify of each; None: all.
            num_rows: The requests and the sum of ``lengths``.
        """
        num_requests, depth = drafts.shape
        device = drafts.device
        rows_each = torch.full_like(last, depth + 1) if lengths is None else lengths + 1
        offsets = torch.zeros(num_requests + 1, dtype=torch.int64, device=device)
        torch.cumsum(rows_each, dim=0, out=offsets[1:])
        numbers = torch.arange(num_requests, device=device)
        request = torch.repeat_interleave(numbers, rows_each, output_size=num_rows)
        place = torch.arange(num_rows, device=device) - offsets[request]
        token_ids = torch.cat([last[:, None], drafts], dim=1)[request, place]
        column = torch.arange(depth, device=device)
        prefix = drafts[request].masked_fill(column >= place[:, None], NO_TOKEN)
        return cls(request, place, offsets, token_ids, prefix)


class DraftingWorker(BaseSpecWorker):
    """One scheduler step: draft, verify, accept.

    Args:
        server_args, gpu_id, nccl_port: As SGLang gives them; there is nothing left to set up.
        target_worker: The worker that runs prompts, with our model.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._draft_worker = None
        self.speculative_num_draft_tokens = int(get_spec().speculative_num_draft_tokens)
        self.depth = self.speculative_num_draft_tokens - 1
        self._runner = target_worker.model_runner
        self._network = self._runner.model.network
        self._sampling = self._runner.model.sampling

    @property
    def preloaded_weights_bytes(self) -> int:
        return 0

    def get_confidence_budget_prepare(self) -> None:
        """SGLang's own schedule of verification; ours needs nothing from the scheduler."""

    def dump_info_records(self) -> None:
        """SGLang's own records of its worker's steps."""

    def block_accept_estimate_log_suffix(self) -> None:
        """SGLang's own estimate, in its log of a step."""

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, *, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Run a batch of SGLang's scheduler.

        Args:
            batch: A ``ScheduleBatch``.
            on_publish: Called with the new lengths as soon as they are known on the device.
            grammar_barrier: Called before grammars are read: brings them up to the last batch's tokens.
            pp_proxy_tensors: Of pipeline parallelism, which is refused.
        """
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _prefill(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        result = self._target_worker.forward_batch_generation(batch)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        result.next_draft_input = make_draft_input_v2(
            bonus_tokens=result.next_token_ids, new_seq_lens=batch.seq_lens
        )
        return result

    @torch.no_grad()
    def _decode(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        backend, state = self._runner.attn_backend, self._sampling.state
        # The last token's position is the number of tokens before it.
        last, positions = batch.spec_info.bonus_tokens.long(), batch.seq_lens.long()
        slots = batch.req_pool_indices.long()
        caches = backend.caches(slots, batch.spec_info.nxt_kv_lens_cpu.max().item())
        requests = torch.arange(slots.shape[0], device=slots.device)

        sampler = state.draft_sampler(slots, positions + 1)
        step = backend.step(slots, requests, last, positions, positions)
        drafted = self._network.draft(step, caches, self.depth, sampler)

        num_rows = slots.shape[0] * (self.depth + 1)
        window = Window.of(last, drafted.tokens, None, num_rows)
        tree = None
        if batch.has_grammar:
            # Starts a copy to the host that is awaited after the forward is on its way.
            tree = GrammarTree.from_linear_chain(torch.cat([last[:, None], drafted.tokens], dim=1))
        row_positions = positions[window.request] + window.place
        step = backend.step(slots, window.request, window.token_ids, row_positions, positions)
        logits = self._network.logits(self._network(step, caches))
        if tree is not None:
            self._apply_grammar(logits, window, batch, tree, grammar_barrier)

        rows = Rows(slots[window.request], row_positions + 1, window.prefix)
        verified = verify(state, logits, rows, window.offsets)
        accepted = verified.num_accepted
        state.commit(slots, verified.tokens)
        new_lengths = positions + accepted + 1
        if on_publish is not None:
            on_publish(new_lengths)
        output = LogitsProcessorOutput(next_token_logits=None)
        if batch.return_logprob:
            self._report_logprobs(output, verified, batch)
        bonus = verified.tokens.gather(1, accepted[:, None])[:, 0]
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=verified.tokens.flatten(),
            accept_lens=(accepted + 1).int(),
            next_draft_input=make_draft_input_v2(bonus_tokens=bonus, new_seq_lens=new_lengths),
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            speculative_output_stride=verified.tokens.shape[1],
            new_seq_lens=new_lengths,
        )

    def _apply_grammar(
        self, logits: torch.Tensor, window: Window, batch: Any, tree: GrammarTree, barrier: Any
    ) -> None:
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=tree,
            sampling_info=batch.sampling_info,
            device=logits.device,
            barrier=barrier,
        )
        if mask is not None:
            chosen = window.request * (self.depth + 1) + window.place
            mask._replace(vocab_mask=mask.vocab_mask[chosen]).apply(logits)

    def _report_logprobs(self, output: LogitsProcessorOutput, verified: Any, batch: Any) -> None:
        """SGLang reads the logprobs of token ``j`` of request ``b`` at row ``b * width + j``."""
        output.next_token_logits = verified.logits[verified.row_of_token.flatten().clamp(min=0)]
        tokens = verified.tokens.flatten().clamp(min=0)
        compute_spec_logprobs(batch, output, tokens, chain_stride=verified.tokens.shape[1])
