"""One transformer block, of the backbone or of the draft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from deepinfer_plugins.kernels.catalogue import Ops
from deepinfer_plugins.model.attention import Attention
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.engram_layer import Engram
from deepinfer_plugins.model.hyper_connection import HyperConnection, Trunk
from deepinfer_plugins.model.layers import Norm, Targets
from deepinfer_plugins.model.moe import MoE


class Layer(nn.Module):
    """Attention and mixture of experts, each between hyper-connections."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        attention: Attention,
        moe: MoE,
        engram: Engram | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.engram = engram
        self.attn_hc = HyperConnection(config, ops, device)
        self.attn_norm = Norm(ops, config.hidden_size, config.rms_norm_eps, device)
        self.attn = attention
        self.ffn_hc = HyperConnection(config, ops, device)
        self.ffn_norm = Norm(ops, config.hidden_size, config.rms_norm_eps, device)
        self.ffn = moe

    def targets(self, prefix: str) -> Targets:
        if self.engram is not None:
            yield from self.engram.targets(f"{prefix}engram.")
        yield from self.attn_hc.targets(f"{prefix}hc_attn")
        yield from self.attn_norm.targets(f"{prefix}attn_norm")
        yield from self.attn.targets(f"{prefix}attn.")
        yield from self.ffn_hc.targets(f"{prefix}hc_ffn")
        yield from self.ffn_norm.targets(f"{prefix}ffn_norm")
        yield from self.ffn.targets(f"{prefix}ffn.")

    def attention_input(self, trunk: Trunk) -> torch.Tensor:
        """What attention and the compressor read, bf16 ``[n, hidden]``."""
        return self.attn_norm(self.attn_hc.read(trunk))

    def feed_forward(self, trunk: Trunk, image: torch.Tensor | None) -> Trunk:
        """The second half of the layer."""
        y = self.ffn_norm(self.ffn_hc.read(trunk))
        mixes = self.ffn_hc.mixes(trunk.streams)
        return self.ffn_hc.write(self.ffn(y, image), trunk.streams, mixes)


class Layers(nn.ModuleList):
    """A list of layers that a type checker knows to be one."""

    def __iter__(self) -> Iterator[Layer]:
        return cast(Iterator[Layer], super().__iter__())
