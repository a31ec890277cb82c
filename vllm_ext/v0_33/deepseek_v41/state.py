"""What the model needs of each request beyond vLLM's usual inputs."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_plugins.core.settings import Settings
from deepinfer_plugins.features.sampling import choose_verify
from deepinfer_plugins.model.step import NO_TOKEN
from deepinfer_plugins.vllm_ext.v0_33 import api
from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41.sampling import Sampler, Verifier


def tokens_before(
    all_token_ids: torch.Tensor, rows: torch.Tensor, first: torch.Tensor, depth: int
) -> torch.Tensor:
    """The tokens before each request's first row of a step, nearest first.

    Args:
        all_token_ids: ``[max_requests, max_model_len]``, prompt and everything sampled so far.
        rows: ``[num_requests]``, int64, the row of each request there.
        first: ``[num_requests]``, int64, position of its first row in the step.
        depth: How many.

    Returns:
        int64 ``[num_requests, depth]``; ``NO_TOKEN`` before a request's start.
    """
    position = first[:, None] - 1 - torch.arange(depth, device=first.device)
    tokens = all_token_ids[rows[:, None], position.clamp(min=0)].long()
    return torch.where(position < 0, NO_TOKEN, tokens)


class DeepseekV41State(api.DefaultModelState):
    """Adds the tokens that n-grams reach back to, and our sampler.

    They come from vLLM's own record of each request on the device, which is right after a chunk, a
    prefix hit and a preemption, and under async scheduling, where the host does not know them yet.
    """

    supports_prompt_embeds = False
    # Drafts of a request whose distributions are to be kept from the start; 0: no such room is needed by then.
    _record_depth = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Where a captured graph finds them.
        self._context_ids = torch.full(
            (self.max_num_reqs, self.model.context_depth), NO_TOKEN, dtype=torch.int64, device=self.device
        )

    def prepare_inputs(self, input_batch: api.InputBatch, req_states: api.RequestState) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)
        first = input_batch.positions[input_batch.query_start_loc[: input_batch.num_reqs].long()]
        self._context_ids[: input_batch.num_reqs] = tokens_before(
            req_states.all_token_ids.gpu, input_batch.idx_mapping, first, self.model.context_depth
        )
        inputs["context_ids"] = self._context_ids[: input_batch.num_reqs_after_padding]
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        # Here, since it is before the step by which vLLM measures what is left for caches.
        if self._record_depth:
            self.sampler.state.reserve_record(self._record_depth)
        inputs: dict[str, Any] = super().prepare_dummy_inputs(num_reqs, num_tokens)
        inputs["context_ids"] = self._context_ids[:num_reqs]
        return inputs

    def custom_sampler(self, sampler: api.Sampler) -> tuple[Sampler, Verifier | None]:
        setting, invariant = Settings.from_env().verify, bool(api.envs.VLLM_BATCH_INVARIANT)
        self.sampler = Sampler(sampler, self.model.model.ops, setting)
        if (
            self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
            and choose_verify(setting, False, invariant) == "rejection"
        ):
            # Graphs of drafts write to a table of them.
            self._record_depth = self.vllm_config.num_speculative_tokens
        return self.sampler, Verifier(self.sampler) if self.vllm_config.num_speculative_tokens else None

    def add_request(self, req_index: int, new_req_data: api.NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        # A request that was preempted comes back with the tokens that it had generated behind its prompt.
        tokens, length = new_req_data.prefill_token_ids or [], new_req_data.prompt_len
        self.sampler.expect(req_index, tokens[:length], tokens[length:])

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self.sampler.forget(req_id)
