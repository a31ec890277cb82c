"""Drafts for vLLM: after each step, a block of tokens per request from the model's own draft layers.

vLLM's DSpark speculator stores context keys, runs a draft model of its own and draws from it. Our main forward stores
the keys, and :meth:`DeepseekV41.draft` does the rest, with the tokens drawn by ``features.sampling``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepinfer_plugins.core.settings import Settings
from deepinfer_plugins.features.calibration import AcceptanceLog, per_position
from deepinfer_plugins.features.cost_curve import Clock, Mark
from deepinfer_plugins.features.graphs import DraftGraphs, sizes_up_to
from deepinfer_plugins.features.sampling import NO_SLOT, choose_verify
from deepinfer_plugins.model.step import NO_POSITION, Caches, Paged, Step
from deepinfer_plugins.vllm_ext.v0_33 import api
from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41.budget import NO_CONFIDENCE

if TYPE_CHECKING:
    import numpy as np

    from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41 import DeepseekV41ForCausalLM
    from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41.state import DeepseekV41State

# The block that vLLM puts where a request has none.
_NULL_BLOCK = 0
NO_DRAFT = -1


def window_floor(cache: Paged, positions: torch.Tensor, window: int) -> torch.Tensor:
    """The first position of each request's draft window that has a key.

    Draft keys of a prefix hit may be gone while the other caches still have theirs; vLLM's null block stands for them.

    Args:
        cache: A cache of the draft, one table row per request.
        positions: int64 ``[num_requests]``, of the token to draft after.
        window: Positions before it that a draft reads.

    Returns:
        int64 ``[num_requests]``, at most ``positions``.
    """
    size = cache.page_size
    first = (positions - window).clamp(min=0) // size
    pages = first[:, None] + torch.arange(-(-window // size) + 1, device=positions.device)
    before = pages * size < positions[:, None]
    blocks = cache.table.gather(1, torch.where(before, pages, 0))
    missing = before & (blocks == _NULL_BLOCK)
    return torch.where(missing, (pages + 1) * size, 0).amax(dim=1).minimum(positions)


def at_requests(caches: Mapping[int, Paged], requests: torch.Tensor, last: int) -> dict[int, Paged]:
    """The draft's caches with the tables of some requests.

    Positions past the longest request vLLM has pages for go to its null block: what is drafted there is not used.

    Args:
        caches: By draft layer, tables by request of the step.
        requests: int64 ``[n]``.
        last: The highest position that a draft may write.
    """
    tables: dict[int, torch.Tensor] = {}
    made = {}
    for layer, cache in caches.items():
        # Layers of a group share one table, and the model their slots by its identity.
        if id(cache.table) not in tables:
            table = cache.table[requests].long()
            missing = last // cache.page_size + 1 - table.shape[1]
            tables[id(cache.table)] = torch.nn.functional.pad(table, (0, max(0, missing)), value=_NULL_BLOCK)
        made[layer] = replace(cache, table=tables[id(cache.table)])
    return made


class Outcomes:
    """Confidences and what became of their drafts, for ``deepinfer-plugins calibrate``. Waits for the device.

    Args:
        path: ``DEEPINFER_PLUGINS_ACCEPTANCE_LOG``.
        vllm_config: Of the run, for whoever reads the file.
        like: ``[max_requests, depth]``.
    """

    def __init__(self, path: str, vllm_config: api.VllmConfig, like: torch.Tensor) -> None:
        self._log = AcceptanceLog(path, model=vllm_config.model_config.model, engine=f"vllm {api.VERSION}")
        # NaN: nothing was drafted. By slot.
        self._logits = torch.full_like(like, torch.nan)

    def keep(self, slots: torch.Tensor, logits: torch.Tensor) -> None:
        """Note what was drafted with, logits ``[n, depth]`` at most as deep as the table."""
        depth = self._logits.shape[1]
        self._logits[slots] = torch.nn.functional.pad(
            logits.float(), (0, depth - logits.shape[1]), value=torch.nan
        )

    def write(self, slots: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Write what became of it, and forget it: the drafts of a step are verified in the next one or never."""
        logits = self._logits[slots]
        drafted = logits.isfinite().cumprod(dim=1).sum(dim=1)
        verified = (num_sampled + num_rejected - 1).clamp(min=0).minimum(drafted)
        accepted = (num_sampled - 1).clamp(min=0).minimum(verified)
        self._log.write(logits.cpu(), verified.cpu(), accepted.cpu())
        self._logits[slots] = torch.nan


class Drafts(NamedTuple):
    """What is drafted for some requests.

    Args:
        tokens: int64 ``[n, depth]``.
        confidences: fp32 ``[n, depth]``.
        confidence_logits: fp32 ``[n, depth]``.
    """

    tokens: torch.Tensor
    confidences: torch.Tensor
    confidence_logits: torch.Tensor


class Speculator(api.DraftModelSpeculator):
    """What the model runner calls ``speculator``.

    vLLM's base class is there for what the runner asks of it; its buffers, for a draft that vLLM runs, are not made.

    Args:
        vllm_config: vLLM's configuration of everything.
        device: Where the model is.
        req_states: The runner's record of every request.
    """

    def __init__(  # pylint: disable=super-init-not-called
        self, vllm_config: api.VllmConfig, device: torch.device, req_states: api.RequestState
    ) -> None:
        config = vllm_config.speculative_config
        assert config is not None and config.num_speculative_tokens is not None
        self.vllm_config = vllm_config
        self.speculative_config = config
        self.device = device
        self.req_states = req_states
        self.depth: int = config.num_speculative_tokens
        self.enable_adaptive_verification = config.enable_adaptive_verification
        # What the runner reads, with the answers of a draft that is a part of the target.
        self.draft_logits = None
        self.draft_attn_layer_names: set[str] = set()
        self.attn_groups: list[Any] = []
        self.dcp_size = 1
        self.pcp_manager = None
        self.supports_mm_inputs = False
        self.draft_token_confidence_probs = torch.full(
            (req_states.max_num_reqs, self.depth), NO_CONFIDENCE, device=device
        )
        settings = Settings.from_env()
        self._clock = Clock(device)
        # When drafting for the last step began and ended.
        self.drafting: tuple[Mark, Mark] | None = None
        self._temperatures = torch.tensor(
            per_position(settings.confidence_temperatures or (1.0,), self.depth),
            dtype=torch.float64,
            device=device,
        )
        # Where a captured graph finds which requests of the batch it drafts for, and their slots.
        self._requests = torch.zeros(req_states.max_num_reqs, dtype=torch.int64, device=device)
        self._slots = torch.full_like(self._requests, NO_SLOT)
        self._graphs: DraftGraphs[Drafts] | None = None
        # Any request may be verified by rejection, where none has to be verified by coupling.
        self._rejection = (
            choose_verify(settings.verify, False, bool(api.envs.VLLM_BATCH_INVARIANT)) == "rejection"
        )
        path = settings.acceptance_log
        self._log = None if path is None else Outcomes(path, vllm_config, self.draft_token_confidence_probs)

    def load_model(self, target_model: DeepseekV41ForCausalLM) -> None:
        self.model = target_model

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> Any:
        raise NotImplementedError("the draft is loaded with the model that it belongs to")

    def set_attn(
        self,
        model_state: DeepseekV41State,
        kv_cache_config: Any,
        block_tables: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.model_state = model_state
        # The batch's tables, by layer; vLLM fills them in place.
        self._tables = {
            name: table
            for group, table in zip(
                kv_cache_config.kv_cache_groups, block_tables.input_block_tables, strict=True
            )
            for name in group.layer_names
        }

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        self._graphs = None
        if cudagraph_mode.has_full_cudagraphs():
            self._graphs = DraftGraphs(
                lambda count: self._block(count, self.depth),
                sizes_up_to(self.req_states.max_num_reqs),
                self.model_state.sampler.state,
                self.depth,
                rejection=self._rejection,
            )

    @torch.inference_mode()
    def capture(self) -> None:
        if self._graphs is not None:
            self._requests.zero_()
            self._slots.fill_(NO_SLOT)
            self._graphs.capture(api.current_platform.get_global_graph_pool())

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        if self._log is not None:
            self._log.write(idx_mapping, num_sampled, num_rejected)

    def propose(
        self,
        input_batch: api.InputBatch,
        attn_metadata: dict[str, Any] | None,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft after the last token of every request that has one by now.

        Returns:
            int64 ``[num_requests, depth]``; :data:`NO_DRAFT` where nothing was drafted.
        """
        start = self._clock.mark()
        drafts = self._draft(input_batch, attn_metadata, dummy_run, num_speculative_tokens)
        self.drafting = start, self._clock.mark()
        return drafts

    def _draft(
        self,
        input_batch: api.InputBatch,
        attn_metadata: dict[str, Any] | None,
        dummy_run: bool,
        num_speculative_tokens: int | None,
    ) -> torch.Tensor:
        depth = self.depth if num_speculative_tokens is None else num_speculative_tokens
        self.draft_token_confidence_probs[: input_batch.num_reqs] = NO_CONFIDENCE
        drafts = torch.full(
            (input_batch.num_reqs, self.depth), NO_DRAFT, dtype=torch.int64, device=self.device
        )
        if dummy_run:
            if attn_metadata is None:
                self._measure(input_batch.num_reqs)
            return drafts
        reached = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        sampled: np.ndarray[Any, Any] = (reached >= input_batch.prefill_len_np).nonzero()[0]
        count = len(sampled)
        if depth == 0 or not count:
            return drafts
        requests = torch.from_numpy(sampled).to(self.device, non_blocking=True)
        slots = input_batch.idx_mapping[requests].long()
        self._requests[:count], self._slots[:count] = requests, slots
        found = None if self._graphs is None or depth != self.depth else self._graphs.find(count)
        if found is None:
            drafted = self._block(count, depth)
        else:
            graphs, size = found
            self._requests[count:size], self._slots[count:size] = 0, NO_SLOT
            drafted = graphs.replay(size)
        drafts[requests, :depth] = drafted.tokens[:count]
        # What was not drafted is never accepted.
        self.draft_token_confidence_probs[requests] = torch.nn.functional.pad(
            drafted.confidences[:count], (0, self.depth - depth)
        )
        if self._log is not None:
            self._log.keep(slots, drafted.confidence_logits[:count])
        return drafts

    def _block(self, count: int, depth: int) -> Drafts:
        """Draft for the first requests in the buffers, of which those without a slot are padding."""
        requests, slots = self._requests[:count], self._slots[:count]
        computed = self.req_states.num_computed_tokens.gpu[slots].long()
        positions = torch.where(slots == NO_SLOT, NO_POSITION, computed)
        caches = at_requests(
            self.model.draft_caches(self._tables), requests, self.model.max_model_len + self.depth
        )
        window = self.model.config.sliding_window
        floors = [window_floor(cache, positions, window) for cache in caches.values()]
        step = Step(
            token_ids=self.req_states.last_sampled_tokens[slots, 0].long(),
            positions=positions,
            request=torch.arange(count, device=self.device),
            context_ids=positions.new_zeros((count, self.model.context_depth)),
            window_floor=torch.stack(floors).amax(dim=0),
        )
        sample = self.model_state.sampler.state.draft_sampler(slots, positions + 1)
        drafted = self.model.model.draft(step, Caches({}, {}, {}, {}, caches), depth, sample)
        confidences = drafted.confidences(self._temperatures[:depth])
        return Drafts(drafted.tokens, confidences, drafted.confidence_logits)

    def _measure(self, num_requests: int) -> None:
        """Draft without caches, for vLLM to see how much memory it takes."""
        row = torch.arange(num_requests, device=self.device)
        zeros = torch.zeros_like(row)
        step = Step(
            token_ids=zeros,
            positions=zeros,
            request=row,
            context_ids=zeros.new_zeros((num_requests, self.model.context_depth)),
        )
        caches = self.model.scratch_caches(num_requests, self.depth)
        self.model.model.draft(
            step, replace(caches, window={}), self.depth, lambda logits, index: logits.argmax(1)
        )
