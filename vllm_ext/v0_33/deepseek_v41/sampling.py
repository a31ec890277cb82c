"""``features.sampling`` and ``features.verification`` in the place of vLLM's sampler and rejection sampler.

vLLM's own sampler stays underneath for what is not sampling: how many logprobs a request wants and of which
tokens, processors of logits that a user plugged in, and a budget of thinking tokens.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_plugins.features.sampling import Rows, SamplingOps, SamplingState, signed_seed
from deepinfer_plugins.features.verification import verify
from deepinfer_plugins.vllm_ext.v0_33 import api, requests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm import SamplingParams as VllmSamplingParams

_PROCESSED = ("processed_logprobs", "processed_logits")
_LOGITS = ("raw_logits", "processed_logits")
# vLLM applies its bias, penalties and bad words first; what follows them in its list is the user's.
_BUILT_IN_PROCESSORS = 3


class Sampler:
    """What the model runner calls ``sampler``: one token for each request.

    Args:
        base: vLLM's own, with the state that every request has there.
        ops: The operators chosen for this process.
        setting: ``DEEPINFER_PLUGINS_VERIFY``.
    """

    def __init__(self, base: api.Sampler, ops: SamplingOps, setting: str) -> None:
        self.req_states = base.req_states
        self.sampling_states = base.sampling_states
        self.logprob_token_ids_state = base.logprob_token_ids_state
        self.get_logprobs_dims = base.get_logprobs_dims
        self.compute_nans = base.compute_nans
        self.logprobs_mode = base.logprobs_mode
        # Ours counts tokens itself; without this the runner would count them a second time.
        self.penalties_state = SimpleNamespace(output_bin_counts=None)
        self._thinking = base.thinking_budget_state
        self._processors = base.logits_processors[_BUILT_IN_PROCESSORS:]
        self._processes = [False] * base.req_states.max_num_reqs
        self._setting = setting
        self._arriving: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        states = base.req_states
        self.state = SamplingState(states.max_num_reqs, states.vocab_size, states.device, ops)

    def expect(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Note the tokens of a request that is about to be added; ``output`` is not empty if it is resumed."""
        self._arriving[slot] = prompt, output

    def add_request(self, slot: int, params: VllmSamplingParams) -> None:
        """Take a request into ``slot``, whoever was there before."""
        prompt, output = self._arriving.pop(slot, ((), ()))
        asked = requests.translate(
            params, self.req_states.vocab_size, self._setting, bool(api.envs.VLLM_BATCH_INVARIANT)
        )
        self.state.add(slot, asked, prompt, output)
        if self.req_states.num_speculative_steps:
            # vLLM verifies what it finds here even if nothing was drafted for this request: -1 is never accepted.
            self.req_states.draft_tokens[slot].fill_(-1)
        if params.seed is not None and params.seed != signed_seed(params.seed):
            # vLLM's own table, which we leave unread, holds signed numbers.
            params = copy.copy(params)
            params.seed = signed_seed(params.seed)
        self.sampling_states.add_request(slot, params)
        self.logprob_token_ids_state.add_request(slot, params)
        self._processes[slot] = self._thinking.add_request(slot, params)
        for processor in self._processors:
            self._processes[slot] |= processor.add_request(slot, params)

    def forget(self, request: str) -> None:
        """Let a request's features cost nothing from now on."""
        slot = self.req_states.req_id_to_index.get(request)
        if slot is not None:
            self.state.remove(slot)
            self._processes[slot] = False

    def apply_staged_writes(self) -> None:
        self.sampling_states.apply_staged_writes()
        self.logprob_token_ids_state.apply_staged_writes()
        self._thinking.apply_staged_writes()
        for processor in self._processors:
            processor.apply_staged_writes()

    def attend(self, batch: api.InputBatch) -> None:
        """Only the requests of this batch are sampled next."""
        self.state.attend(batch.idx_mapping_np.tolist())

    def processed(self, logits: torch.Tensor, batch: api.InputBatch) -> torch.Tensor:
        """fp32 ``[rows, vocab_size]``: a copy, after the user's processors and the thinking budget if any applies."""
        logits = logits.float()
        if not any(self._processes[slot] for slot in batch.idx_mapping_np):
            return logits
        logits = logits.clone()
        context = api.LogitsContext(
            expanded_idx_mapping=batch.expanded_idx_mapping,
            idx_mapping=batch.idx_mapping,
            idx_mapping_np=batch.idx_mapping_np,
            expanded_local_pos=batch.expanded_local_pos,
            input_ids=batch.input_ids[batch.logits_indices],
            pos=batch.positions[batch.logits_indices],
            seq_lens_upper_bound_np=batch.seq_lens_cpu_upper_bound.numpy(),
        )
        for processor in self._processors:
            logits = processor.apply(logits, context)
        self._thinking.apply(logits, context)
        return logits

    def commit(
        self, tokens: torch.Tensor, num_tokens: torch.Tensor, batch: api.InputBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append what a step chose to each request's output, except within a prompt.

        Args:
            tokens: int64 ``[requests, width]``.
            num_tokens: int32 ``[requests]``: how many of them count.

        Returns:
            int32 ``[requests]`` each: tokens that count now, and rows of the step that were for nothing.
        """
        num_sampled, num_rejected = api.get_num_sampled_and_rejected(
            num_tokens,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        column = torch.arange(tokens.shape[1], device=tokens.device)
        counted = tokens.masked_fill(column >= num_sampled[:, None], -1)
        self.state.commit(batch.idx_mapping, counted)
        return num_sampled, num_rejected

    def scores(
        self, raw: torch.Tensor, processed: torch.Tensor, tokens: torch.Tensor, batch: api.InputBatch
    ) -> Any:
        """What vLLM reports of each row's distribution; None if no request asks.

        Args:
            raw: ``[rows, vocab_size]``; the model's, masked by a grammar.
            processed: fp32 ``[rows, vocab_size]``; what ``features.sampling`` made of them.
            tokens: int64 ``[rows]``; the one chosen there, anything where none was.
        """
        dims = self.get_logprobs_dims(batch.idx_mapping_np)
        if dims is None:
            return None
        num_logprobs, num_ids = dims
        several = tokens.shape[0] != batch.num_reqs
        return api.compute_topk_scores(
            self._filtered(processed, batch.expanded_idx_mapping)
            if self.logprobs_mode in _PROCESSED
            else raw,
            num_logprobs,
            tokens,
            # On the device, since a schedule may have trimmed rows that the host still counts.
            batch.cu_num_logits.clone() if several else None,
            logprob_token_ids_state=self.logprob_token_ids_state,
            expanded_idx_mapping=batch.expanded_idx_mapping,
            max_per_req_token_ids=num_ids,
            logits_mode=self.logprobs_mode in _LOGITS,
        )

    def _filtered(self, processed: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Processed logits as vLLM means it: over the temperature, -inf where filtered; a greedy row's as they are."""
        temperature = self.sampling_states.temperature.gpu[slot][:, None]
        removed = self.state.log_probs(processed, slot).isneginf()
        sampled = (processed / temperature).masked_fill(removed, -torch.inf)
        return torch.where(temperature == 0, processed, sampled)

    def __call__(self, logits: torch.Tensor, batch: api.InputBatch) -> api.SamplerOutput:
        self.attend(batch)
        num_nans = api.get_num_nans(logits) if self.compute_nans else None
        no_drafts = torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
        sampled = self.state.sample(self.processed(logits, batch), rows(batch, no_drafts))
        tokens = sampled.tokens[:, None]
        num_sampled, num_rejected = self.commit(tokens, batch.seq_lens.new_ones(batch.num_reqs), batch)
        return api.SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=self.scores(logits, sampled.logits, sampled.tokens, batch),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )


def rows(batch: api.InputBatch, prefix: torch.Tensor) -> Rows:
    """The batch's rows of logits; a grammar has masked these by now."""
    return Rows(
        slot=batch.expanded_idx_mapping.long(),
        position=batch.positions[batch.logits_indices].long() + 1,
        prefix=prefix,
    )


def prefixes(
    drafts: torch.Tensor, request: torch.Tensor, offset: torch.Tensor, invalid: torch.Tensor | None
) -> torch.Tensor:
    """The drafts before each row, as ``Rows`` wants them.

    Args:
        drafts: int64 ``[num_requests, depth]``; -1 where none was made.
        request: int64 ``[rows]``.
        offset: ``[rows]``, of a row in its request: how many drafts are before it.
        invalid: bool ``[rows]``, or None: rows whose input draft a grammar does not know.

    Returns:
        int64 ``[rows, depth]``, padded with -1 from the first draft on that can't be kept.
    """
    if invalid is not None:
        bad = torch.zeros((drafts.shape[0], drafts.shape[1] + 1), dtype=torch.bool, device=drafts.device)
        bad[request, offset.long()] = invalid
        # A request's first row comes after none of them.
        drafts = drafts.masked_fill(bad[:, 1:], -1)
    usable = (drafts >= 0).cumprod(dim=1).bool()
    before = torch.arange(drafts.shape[1], device=drafts.device) < offset[:, None]
    return torch.where(before & usable[request], drafts[request], -1)


class Verifier:
    """What the model runner calls ``rejection_sampler``: the drafts that each request keeps, and a token more."""

    # vLLM's warm-up switches it; here it makes no difference.
    enable_adaptive_verification = False

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(
        self,
        logits: torch.Tensor,
        batch: api.InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> api.SamplerOutput:
        sampler, states = self._sampler, self._sampler.req_states
        sampler.attend(batch)
        num_nans = api.get_num_nans(logits) if sampler.compute_nans else None
        offsets = batch.cu_num_logits[: batch.num_reqs + 1].long()
        request = torch.repeat_interleave(offsets.diff(), output_size=logits.shape[0])
        drafts = states.draft_tokens[batch.idx_mapping]
        prefix = prefixes(drafts, request, batch.expanded_local_pos, invalid_drafts)
        verified = verify(sampler.state, sampler.processed(logits, batch), rows(batch, prefix), offsets)
        num_tokens = (verified.num_accepted + 1).to(batch.seq_lens.dtype)
        num_sampled, num_rejected = sampler.commit(verified.tokens, num_tokens, batch)
        scores = None
        if sampler.get_logprobs_dims(batch.idx_mapping_np) is not None:
            chosen = torch.zeros(logits.shape[0] + 1, dtype=torch.int64, device=logits.device)
            chosen[verified.row_of_token] = verified.tokens
            scores = sampler.scores(logits, verified.logits, chosen[:-1].clamp(min=0), batch)
        return api.SamplerOutput(
            sampled_token_ids=verified.tokens,
            logprobs_tensors=scores,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
