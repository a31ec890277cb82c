"""DeepSeek-V4.1 under the name SGLang gives its architecture, so that the engine treats it as what it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import nn

from deepinfer_plugins.sglang_ext import runtime


class _Head:
    """What SGLang's logits processor takes for the language model head: ours, with float32 logits.

    A quantisation method is the processor's own way to a head that is not a plain matrix.
    """

    def __init__(self, network: Any) -> None:
        self.weight = network.head.weight
        self.quant_method = self
        self._logits = network.logits

    def apply(self, layer: _Head, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is not None:
            raise ValueError("the head has no bias")
        return self._logits(hidden)


class DeepseekV4ForCausalLM(nn.Module):
    """Builds and loads the model, and runs it on what :class:`StepBackend` read from the batch."""

    # SGLang asks for this before it replaces weights of a running model, and refuses with it. Its weights would pass
    # by :meth:`load_weights` unread, and it would report success.
    _derived_weight_cache_error = (
        "deepinfer_plugins reads the checkpoint by itself, once: it does not take weights while it runs yet; start "
        "SGLang anew with the other --model-path"
    )

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        # Allocated where the loader said: it made that the default device.
        device = torch.empty(0).device
        self.checkpoint = runtime.open_checkpoint()
        self.network = runtime.build(self.checkpoint, device)
        self.sampling = runtime.sampling(self.network)
        self.logits_processor = LogitsProcessor(config)
        self.lm_head = _Head(self.network)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Stream the checkpoint by our own reader; SGLang's iterator is left untouched and so reads nothing."""
        runtime.load_weights(self.network, self.checkpoint)

    def set_dspark_layers_to_capture(self, layer_ids: list[int]) -> None:
        """SGLang names the layers whose inputs the draft wants; the model knows them and keeps those to itself."""

    def get_attention_sliding_window_size(self) -> int:
        return self.network.config.sliding_window

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any
    ) -> LogitsProcessorOutput:
        backend = get_attn_backend()
        if backend.forward_metadata is None:
            hidden = torch.empty(
                0, self.network.config.hidden_size, dtype=torch.bfloat16, device=input_ids.device
            )
        else:
            hidden = backend.run(backend.forward_metadata)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)


EntryClass = DeepseekV4ForCausalLM
