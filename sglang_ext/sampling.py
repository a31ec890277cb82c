"""``features.sampling`` in the place of SGLang's sampler: requests and batches translated, nothing computed."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from deepinfer_plugins.features.sampling import (
    Rows,
    SamplingOps,
    SamplingParams,
    SamplingState,
    Verify,
    choose_verify,
    fresh_seed,
)
from deepinfer_plugins.sglang_ext.seeds import SEED_KEY


def translate(params: Any, stop_ids: set[int], seed: int, verify: Verify) -> SamplingParams:
    """A request's parameters as ``features.sampling`` takes them.

    Args:
        params: SGLang's, after it has filled in its defaults: greedy is ``top_k=1`` there.
        stop_ids: What ends the request: barred before ``min_new_tokens``.
        seed: 64 bits.
        verify: How its drafts are verified.
    """
    greedy = params.top_k == 1
    return SamplingParams(
        seed=seed,
        temperature=0.0 if greedy else params.temperature,
        top_k=0 if greedy or params.top_k == TOP_K_ALL else params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias={int(token): value for token, value in (params.logit_bias or {}).items()},
        min_tokens=params.min_new_tokens,
        suppressed=sorted(stop_ids) if params.min_new_tokens else (),
        # Without noise both ways are one; the first needs no record of the draft.
        verify="coupling" if greedy else verify,
    )


def stop_ids(req: Any) -> set[int]:
    """The tokens that end a request of SGLang's."""
    found = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        found |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return {token for token in found if token is not None}


class Sampling:
    """One token for each request, by ``features.sampling``.

    A request lives in the slot that SGLang gives it in its table of token slots.

    Args:
        ops: The operators chosen for this process.
        setting: ``DEEPINFER_PLUGINS_VERIFY``.
        invariant: Whether the batch-invariant mode is on.
    """

    def __init__(self, ops: SamplingOps, setting: str, invariant: bool) -> None:
        self._ops, self._setting, self._invariant = ops, setting, invariant
        self._state: SamplingState | None = None

    @property
    def state(self) -> SamplingState:
        if self._state is None:
            raise RuntimeError("no batch was admitted yet")
        return self._state

    @property
    def may_reject(self) -> bool:
        """Whether some request may be verified by rejection."""
        return choose_verify(self._setting, False, self._invariant) == "rejection"

    def prepare(self, runner: Any) -> SamplingState:
        """Make the state, with a slot for each row of SGLang's table of token slots; once."""
        if self._state is None:
            num_slots = runner.req_to_token_pool.req_to_token.shape[0]
            self._state = SamplingState(num_slots, runner.model_config.vocab_size, runner.device, self._ops)
        return self._state

    def admit(self, runner: Any, batch: Any) -> None:
        """Take in the requests whose prompt, or a part of it, a batch brings; only its requests are sampled next.

        A chunk of a prompt ends in a token that nobody wants; the next chunk admits the request anew. So does
        a request that was retracted: the tokens it has by then are all it had.

        Args:
            runner: SGLang's ``ModelRunner``.
            batch: A ``ScheduleBatch`` that is about to run, on the stream that it runs on: whoever had the slots
                before is done with them there.
        """
        if batch.forward_mode.is_extend():
            self.prepare(runner)
            decoding = {id(req) for req in batch.decoding_reqs or ()}
            for req in batch.reqs:
                if id(req) not in decoding:
                    self._add(req)
        if self._state is not None:
            self._state.attend(batch.req_pool_indices_cpu.tolist())

    def _add(self, req: Any) -> None:
        seed = req.sampling_params.sampling_seed
        reported = req.customized_info and req.customized_info.get(SEED_KEY)
        if reported:
            number = reported[0]
        else:
            number = fresh_seed() if seed is None else seed
            req.customized_info = {**(req.customized_info or {}), SEED_KEY: [number]}
        verify = choose_verify(self._setting, seed is not None, self._invariant)
        params = translate(req.sampling_params, stop_ids(req), number, verify)
        self.state.add(req.kv.req_pool_idx, params, req.origin_input_ids, req.output_ids)

    def sample(self, logits_output: Any, batch: Any) -> torch.Tensor:
        """In the place of ``ModelRunner.sample``.

        Args:
            logits_output: SGLang's; its ``next_token_logits`` and what it reports of logprobs change.
            batch: A ``ForwardBatch``.

        Returns:
            int64 ``[num_requests]``.
        """
        info, logits = batch.sampling_info, logits_output.next_token_logits.float()
        info.update_regex_vocab_mask()
        if info.grammar_mask is not None:
            info.grammar_mask.apply(logits)
            info.grammar_mask = None
        if info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, info)
        rows = Rows(
            slot=batch.req_pool_indices.long(),
            position=batch.seq_lens.long(),
            prefix=torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device),
            bitmask=None,  # applied
        )
        sampled = self.state.sample(logits, rows)
        self.state.commit(rows.slot, sampled.tokens[:, None])
        if batch.return_logprob:
            logits_output.next_token_logits = sampled.logits
            compute_spec_logprobs(batch, logits_output, sampled.tokens, chain_stride=1)
            logits_output.next_token_logprobs = logits_output.next_token_logprobs[:, 0]
        return sampled.tokens
