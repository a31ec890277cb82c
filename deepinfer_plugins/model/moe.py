"""Mixture of experts with one shared expert."""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_plugins.kernels.catalogue import Ops
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.layers import (
    Fp8Linear,
    Linear,
    Quantized,
    Reduce,
    Target,
    Targets,
    quantize,
    weight,
)

# Input channels of an expert's weight that share one scale.
EXPERT_GROUP = 32


class MoE(nn.Module):
    """Router, the routed experts this rank holds, and the shared expert.

    Args:
        config: The model.
        ops: Chosen operators.
        num_experts: Routed experts of this layer, over all ranks.
        topk: Routed experts per token.
        experts: Ids of the routed experts this rank holds.
        reduce: Sums a tensor over the ranks that hold experts; None if this rank holds all of them.
        device: Where the weights go.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        num_experts: int,
        topk: int,
        experts: range,
        reduce: Reduce | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.ops = ops
        self.topk = topk
        self.experts = experts
        self.reduce = reduce
        self.limit = config.swiglu_limit
        self.scaling = config.routed_scaling_factor
        self.inner = inner
        self.gate = Linear(ops, {"gate": num_experts}, hidden, device, out_dtype=torch.float32)
        self.bias = weight((num_experts,), torch.float32, device)
        self.bias_vl = weight((num_experts,), torch.float32, device)
        self.shared_w13 = Fp8Linear(ops, {"w1": inner, "w3": inner}, hidden, device)
        self.shared_w2 = Fp8Linear(ops, {"w2": hidden}, inner, device)
        local = len(experts)
        self.w13 = weight((local, 2 * inner, hidden // 2), torch.uint8, device)
        self.w13_scales = weight((local, 2 * inner, hidden // EXPERT_GROUP), torch.uint8, device)
        self.w2 = weight((local, hidden, inner // 2), torch.uint8, device)
        self.w2_scales = weight((local, hidden, inner // EXPERT_GROUP), torch.uint8, device)

    def targets(self, prefix: str) -> Targets:
        yield from self.gate.targets(prefix)
        yield f"{prefix}gate.bias", Target(self.bias)
        yield f"{prefix}gate.bias_vl", Target(self.bias_vl)
        yield from self.shared_w13.targets(f"{prefix}shared_experts.")
        yield from self.shared_w2.targets(f"{prefix}shared_experts.")
        for slot, expert in enumerate(self.experts):
            name = f"{prefix}experts.{expert}"
            for kind, w13, w2 in (
                ("weight", self.w13[slot], self.w2[slot]),
                ("scale", self.w13_scales[slot], self.w2_scales[slot]),
            ):
                yield f"{name}.w1.{kind}", Target(w13[: self.inner])
                yield f"{name}.w3.{kind}", Target(w13[self.inner :])
                yield f"{name}.w2.{kind}", Target(w2)

    def forward(self, y: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        """Route each row to its experts and add up what they return.

        Args:
            y: ``[n, hidden]``, bf16, normed.
            image: ``[n]``, bool; rows that are routed with the bias for images. None if there are none.

        Returns:
            ``[n, hidden]``, bf16.
        """
        bias = self.bias if image is None else torch.where(image[:, None], self.bias_vl, self.bias)
        ids, weights = self.ops.route(self.gate(y), bias, self.topk, self.scaling)
        x = quantize(self.ops, y)
        chosen = self.ops.experts(
            x.values,
            x.scales,
            ids,
            weights,
            self.w13,
            self.w13_scales,
            self.w2,
            self.w2_scales,
            self.experts.start,
            self.limit,
        )
        if self.reduce is not None:
            chosen = self.reduce(chosen)
        inner = Quantized(*self.ops.swiglu_and_cast(self.shared_w13(x), None, self.limit))
        return self.ops.combine(chosen, self.shared_w2(inner))
