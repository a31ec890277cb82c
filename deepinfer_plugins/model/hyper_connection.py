"""Manifold-constrained hyper-connections around a sublayer, in the shifted form of the release.

A sublayer reads a mix of the residual streams that the sublayer *before* it chose (``pre``), and
writes its output back with a mix chosen from the streams it read (``post``, ``comb``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from deepinfer_plugins.kernels.catalogue import Ops
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.layers import Target, Targets, weight


class Trunk(NamedTuple):
    """What passes from one sublayer to the next.

    Args:
        streams: ``[n, hc_mult, hidden]``, bf16.
        pre: ``[n, hc_mult]``, fp32; the mix of streams that the next sublayer reads.
    """

    streams: torch.Tensor
    pre: torch.Tensor


def start(x: torch.Tensor, hc_mult: int) -> Trunk:
    """The trunk before the first layer: every stream is the embedding, the first one is read.

    Args:
        x: ``[n, hidden]``, bf16.
        hc_mult: Number of streams.
    """
    pre = torch.zeros((x.shape[0], hc_mult), dtype=torch.float32, device=x.device)
    pre[:, 0] = 1
    return Trunk(x[:, None].expand(-1, hc_mult, -1).contiguous(), pre)


class HyperConnection(nn.Module):
    """The mixes of one sublayer."""

    def __init__(self, config: ModelConfig, ops: Ops, device: torch.device) -> None:
        super().__init__()
        self.ops = ops
        self.norm_eps = config.rms_norm_eps
        self.hc_eps = config.hc_eps
        self.iters = config.hc_sinkhorn_iters
        mixes = config.hc_mult * (2 + config.hc_mult)
        self.fn = weight((mixes, config.hc_mult * config.hidden_size), torch.float32, device)
        self.base = weight((mixes,), torch.float32, device)
        self.scale = weight((3,), torch.float32, device)

    def targets(self, prefix: str) -> Targets:
        for name, tensor in (("fn", self.fn), ("base", self.base), ("scale", self.scale)):
            yield f"{prefix}_{name}", Target(tensor)

    def read(self, trunk: Trunk) -> torch.Tensor:
        """The sublayer's input before its norm, bf16 ``[n, hidden]``."""
        return self.ops.hc_collapse(trunk.streams, trunk.pre)

    def mixes(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``pre`` for the next sublayer, ``post`` and ``comb`` for :meth:`write`; fp32."""
        return self.ops.hc_mix(
            streams, self.fn, self.base, self.scale, self.norm_eps, self.hc_eps, self.iters
        )

    def write(
        self,
        x: torch.Tensor,
        streams: torch.Tensor,
        mixes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> Trunk:
        """The trunk after the sublayer, whose output is ``x``, bf16 ``[n, hidden]``."""
        pre, post, comb = mixes
        return Trunk(self.ops.hc_merge(x, streams, post, comb), pre)
