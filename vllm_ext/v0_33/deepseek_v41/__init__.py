"""DeepSeek-V4.1-Flash as vLLM loads it: a thin adapter around ``deepinfer_plugins.model``.

It turns vLLM's batch into a :class:`~deepinfer_plugins.model.step.Step`. It computes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from deepinfer_plugins.model.caches import cache_specs
from deepinfer_plugins.model.step import NO_POSITION, Caches, Paged, Step
from deepinfer_plugins.vllm_ext.v0_33 import api
from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41 import caches, weights
from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41.state import DeepseekV41State


class DeepseekV41ForCausalLM(torch.nn.Module):
    """The model under the name that vLLM knows it by.

    Args:
        vllm_config: vLLM's configuration of everything.
        prefix: Where vLLM would nest it; not supported, it is always the whole model.

    Raises:
        ValueError: If the checkpoint is not one that the model can load; nothing is allocated then.
    """

    def __init__(self, *, vllm_config: api.VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.checkpoint = weights.find(vllm_config)
        self.model = weights.build(self.checkpoint, vllm_config)
        self.config = self.model.config
        drafts = vllm_config.speculative_config is not None
        self.caches = caches.register(cache_specs(self.config, drafts), vllm_config)
        self.context_depth: int = self.config.engram_max_ngram_size - 1
        self._is_loaded = False
        self._shows_progress: bool = vllm_config.load_config.use_tqdm_on_load and sys.stdout.isatty()

    @staticmethod
    def get_model_state_cls() -> type[DeepseekV41State]:
        return DeepseekV41State

    @classmethod
    def get_kv_cache_groups(
        cls, vllm_config: api.VllmConfig, kv_cache_spec: dict[str, api.KVCacheSpec]
    ) -> list[api.KVCacheGroupSpec]:
        return caches.group(vllm_config, kv_cache_spec)

    def load_weights(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the checkpoint found at construction.

        vLLM's own iterator is left untouched: it would read whole tensors of all ranks, unchecked.

        Raises:
            NotImplementedError: The second time: what vLLM then hands over would be left untouched too.
        """
        if self._is_loaded:
            raise NotImplementedError(
                "deepinfer_plugins reads the checkpoint by itself, once: it does not take weights while it runs yet; "
                "start vLLM anew with the other --model"
            )
        weights.load(self.model, self.checkpoint, progress=self._shows_progress)
        self._is_loaded = True
        return {name for name, _ in self.named_parameters()}

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(
            "prompt embeddings are not supported: n-grams need the tokens; send token ids"
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        context_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states, ``[len(input_ids), hidden]``; those of rows of padding have no meaning.

        ``context_ids`` comes from :class:`DeepseekV41State`; the other arguments are vLLM's usual ones. Captured in a
        CUDA graph, all of them and vLLM's metadata lie where every replay finds them; how many rows are padding is
        known on the device only.
        """
        metadata = api.get_forward_context().attn_metadata
        if metadata is None:
            return self._measure(input_ids)
        start = metadata[self.caches[0].name].query_start_loc
        row = torch.arange(input_ids.shape[0], dtype=start.dtype, device=start.device)
        # Of the first request that ends behind the row; of any for a row of padding, which is behind them all.
        request = torch.searchsorted(start[1:], row, right=True).clamp(max=start.shape[0] - 2)
        step = Step(
            # Where a draft is due and none was made, vLLM has -1: any token will do, it is not accepted.
            token_ids=input_ids.long().clamp(min=0),
            positions=torch.where(row < start[-1], positions.long(), NO_POSITION),
            request=request,
            context_ids=context_ids,
        )
        return self.model(step, caches.caches(self.caches, metadata))

    def _measure(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Run without caches, for vLLM to see how much memory a full step takes."""
        num_rows = input_ids.shape[0]
        length = min(num_rows, self.max_model_len)
        row = torch.arange(num_rows, device=input_ids.device)
        num_requests = -(-num_rows // length)
        step = Step(
            token_ids=input_ids.long(),
            positions=row % length,
            request=row // length,
            context_ids=input_ids.new_zeros((num_requests, self.context_depth), dtype=torch.int64),
        )
        return self.model(step, self.scratch_caches(num_requests, length))

    def scratch_caches(self, num_requests: int, length: int) -> Caches:
        """Caches for requests of some length that exist for one call."""
        return caches.scratch(self.caches, num_requests, length, self.model.embed.device)

    def draft_caches(self, tables: Mapping[str, torch.Tensor]) -> Mapping[int, Paged]:
        """The draft's caches as the step sees them, by draft layer, with block tables by layer name."""
        return {
            layer.cache.layer: layer.paged(tables[layer.name])
            for layer in self.caches
            if layer.cache.kind == "draft"
        }

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden_states)


class DSparkV41DraftModel(torch.nn.Module):
    """The name that vLLM looks up when it configures the draft.

    There is nothing of its own to load: :class:`DeepseekV41ForCausalLM` holds the draft layers, and
    :class:`~deepinfer_plugins.vllm_ext.v0_33.deepseek_v41.speculator.Speculator` runs them.
    """

    def __init__(self, *, vllm_config: api.VllmConfig, prefix: str = "") -> None:
        raise NotImplementedError(
            "the draft is a part of DeepSeek-V4.1-Flash: load that, with "
            '--speculative-config \'{"method": "dspark", "num_speculative_tokens": 5}\''
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError
