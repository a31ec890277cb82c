"""The DSpark draft: context keys written by the main forward, and a block of drafted tokens.

Source: section 2.11 of the model's fact sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from deepinfer_plugins.kernels.catalogue import Ops
from deepinfer_plugins.model import hyper_connection
from deepinfer_plugins.model.attention import Attention
from deepinfer_plugins.model.checkpoint import Placement
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.layer import Layer, Layers
from deepinfer_plugins.model.layers import Fp8Linear, Linear, Norm, Reduce, Target, Targets, quantize, weight
from deepinfer_plugins.model.moe import MoE
from deepinfer_plugins.model.rows import Rows
from deepinfer_plugins.model.step import NO_POSITION, Caches, Step

# Keeps the exponential of a confidence's logit finite, as in the release.
LOGIT_BOUND = 60.0


class Block(NamedTuple):
    """A block of drafts before its tokens are chosen: all that needs caches.

    Args:
        token_ids: ``[num_requests]``, int64; the tokens drafted after.
        states: ``[num_requests, depth, hidden]``, bf16.
        logits: ``[num_requests, depth, vocab_size]``, fp32; without what a drafted token says about the next.
    """

    token_ids: torch.Tensor
    states: torch.Tensor
    logits: torch.Tensor


class Drafted(NamedTuple):
    """What a draft block proposes for each request.

    Args:
        tokens: ``[num_requests, depth]``, int64.
        logits: ``[num_requests, depth, vocab_size]``, fp32; what each token was sampled from.
        confidence_logits: ``[num_requests, depth]``, fp32; the sigmoid of it, over a temperature, is the
            probability that the target accepts the token, given that it accepts those before it.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    confidence_logits: torch.Tensor

    def confidences(self, temperatures: torch.Tensor | float = 1.0) -> torch.Tensor:
        """Confidences, fp32 ``[num_requests, depth]``; one temperature for all, or float64 ``[depth]``."""
        return confidences(self.confidence_logits, temperatures)


def confidences(logits: torch.Tensor, temperatures: torch.Tensor | float) -> torch.Tensor:
    """See :meth:`Drafted.confidences`; ``logits`` are its ``confidence_logits``."""
    return (logits.double() / temperatures).clamp(-LOGIT_BOUND, LOGIT_BOUND).sigmoid().float()


class Draft(nn.Module):
    """The draft layers and their heads. Embedding and head are the backbone's."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        rope_table: torch.Tensor,
        placement: Placement,
        reduce: Reduce | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        hidden, eps, num_experts = config.hidden_size, config.rms_norm_eps, config.dspark_n_routed_experts
        taps = len(config.dspark_target_layer_ids)
        self.main_proj = Fp8Linear(ops, {"main_proj": hidden}, taps * hidden, device)
        self.main_norm = Norm(ops, hidden, eps, device)
        self.layers = Layers()
        for index in range(config.num_nextn_predict_layers):
            attention = Attention(config, config.num_hidden_layers + index, ops, rope_table, device)
            experts = placement.experts(num_experts)
            moe = MoE(config, ops, num_experts, config.dspark_num_experts_per_tok, experts, reduce, device)
            self.layers.append(Layer(config, ops, attention, moe, None, device))
        self.norm = Norm(ops, hidden, eps, device)
        rank = config.dspark_markov_rank
        self.markov_embed = weight((config.vocab_size, rank), torch.bfloat16, device)
        self.markov_head = Linear(ops, {"markov_head.head": config.vocab_size}, rank, device, torch.float32)
        self.confidence = Linear(ops, {"confidence_head.proj": 1}, hidden + rank, device, torch.float32)

    def targets(self) -> Targets:
        yield from self.main_proj.targets("mtp.0.")
        yield from self.main_norm.targets("mtp.0.main_norm")
        for index, layer in enumerate(self.layers):
            yield from layer.targets(f"mtp.{index}.")
        last = f"mtp.{len(self.layers) - 1}."
        yield from self.norm.targets(f"{last}norm")
        yield f"{last}markov_head.embed.weight", Target(self.markov_embed)
        yield from self.markov_head.targets(last)
        yield from self.confidence.targets(last)

    def store_context(self, taps: Sequence[torch.Tensor], rows: Rows, caches: Caches) -> None:
        """Write every draft layer's key of the main forward's rows.

        Args:
            taps: bf16 ``[num_local, hidden]`` for each target layer: the mean of its streams.
            rows: The main step.
            caches: Written: ``draft``.
        """
        main = self.main_norm(self.main_proj(quantize(self.ops, torch.cat(list(taps), dim=1))))
        main = quantize(self.ops, main)
        for index, layer in enumerate(self.layers):
            layer.attn.store(layer.attn.key_latent(main), rows, caches.draft[index])

    def forward(self, step: Step, caches: Caches, depth: int, embed: torch.Tensor, head: Linear) -> Block:
        """Compute a block of ``depth`` drafts after the last token of each request.

        Args:
            step: One row per request, in order: the token sampled last and its position; or a row of
                padding. Its keys are not in the caches yet; those of all positions before it are.
            caches: Written and read: ``draft``, at ``depth`` positions from the row's own.
            depth: Tokens to draft; any number, whatever block size the checkpoint was trained with.
            embed: Token embeddings.
            head: The backbone's head.
        """
        num_requests, device = step.num_rows, step.token_ids.device
        offsets = torch.arange(depth, device=device)
        tokens = torch.full((num_requests, depth), self.config.dspark_noise_token_id, device=device)
        tokens[:, 0] = step.token_ids
        padding = step.positions == NO_POSITION
        positions = (step.positions[:, None] + offsets).masked_fill(padding[:, None], NO_POSITION)
        block = replace(
            step,
            token_ids=tokens.flatten(),
            positions=positions.flatten(),
            request=step.request.repeat_interleave(depth),
            image=None,
            window_floor=None,
        )
        rows = Rows(block, self.config.sliding_window)
        # Every row of a block sees all of it, and the same window before it.
        start = (step.positions - self.config.sliding_window).clamp(min=0)
        if step.window_floor is not None:
            start = torch.maximum(start, step.window_floor)
        rows.window_start = start.repeat_interleave(depth)
        window_end = positions[:, -1:].expand(-1, depth).flatten()
        trunk = hyper_connection.start(embed[block.token_ids], self.config.hc_mult)
        for index, layer in enumerate(self.layers):
            mixes = layer.attn_hc.mixes(trunk.streams)
            q_lora, kv = layer.attn.project(layer.attention_input(trunk))
            layer.attn.store(kv, rows, caches.draft[index])
            x = layer.attn.attend(q_lora, rows, caches.draft[index], window_end, None, None)
            trunk = layer.feed_forward(layer.attn_hc.write(x, trunk.streams, mixes), None)
        states = self.ops.hc_collapse(trunk.streams, trunk.pre)
        logits = head(self.norm(states))
        shape = (num_requests, depth)
        return Block(step.token_ids, states.unflatten(0, shape), logits.unflatten(0, shape))

    def chain(self, block: Block, sample: Callable[[torch.Tensor, int], torch.Tensor]) -> Drafted:
        """Sample a block from left to right, each token with a bias from the one before it.

        Args:
            block: From :meth:`forward`.
            sample: From logits, fp32 ``[num_requests, vocab_size]``, and which draft they are for,
                counted from 0, to tokens, int64 ``[num_requests]``.
        """
        token = block.token_ids
        tokens, all_logits, confidences = [], [], []
        for index in range(block.states.shape[1]):
            embedding = self.markov_embed[token]
            logits = block.logits[:, index] + self.markov_head(embedding)
            # How likely the drafted token is to be accepted is judged before it is drawn.
            confidences.append(self.confidence(torch.cat([block.states[:, index], embedding], dim=1))[:, 0])
            token = sample(logits, index)
            tokens.append(token)
            all_logits.append(logits)
        return Drafted(
            torch.stack(tokens, dim=1), torch.stack(all_logits, dim=1), torch.stack(confidences, dim=1)
        )
