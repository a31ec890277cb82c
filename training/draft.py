"""The DSpark draft in a form that can be differentiated.

Blocks are drafted at anchors spread over each sequence. The row of a block at offset ``i`` predicts the token
``i + 2`` after the anchor; its Markov head is fed the text's own previous token, its target is the frozen
backbone's distribution there, and its confidence is trained on whether the backbone's choice would have been drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from training import quantise as q
from training.network import Losses, Network, collapse


@dataclass
class Block:
    """What a draft says at ``[b, anchors, depth]``: logits (``vocab`` more) and logits of the confidence."""

    logits: torch.Tensor
    confidence: torch.Tensor


def context_keys(net: Network, taps: list[torch.Tensor]) -> list[torch.Tensor]:
    """Keys of the context for each draft layer, ``[b, t, d]``."""
    main = net.norm(net.fp8(q.mxfp8(torch.cat(taps, -1)), "mtp.0.main_proj"), "mtp.0.main_norm")
    positions = torch.arange(main.shape[1], device=main.device)
    x = q.mxfp8(main)
    return [
        net.window_key(x, f"mtp.{layer}.attn", net.plain_rope, positions)
        for layer in range(net.config.num_nextn_predict_layers)
    ]


def draft(
    net: Network,
    keys: list[torch.Tensor],
    tokens: torch.Tensor,
    anchors: torch.Tensor,
    depths: torch.Tensor,
    width: int,
    losses: Losses,
) -> Block:
    """Draft a block after each anchor, teacher-forced.

    Args:
        net: Backbone and draft.
        keys: From :func:`context_keys`.
        tokens: ``[b, t]``.
        anchors: ``[b, a]``, the last accepted position; ``anchor + width`` must be inside the sequence.
        depths: ``[b, a]``, rows of each block; rows beyond are computed and seen by none.
        width: The most rows a block has.
        losses: Filled in.
    """
    config = net.config
    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    offsets = torch.arange(1, width + 1, device=tokens.device)
    positions = anchors.unsqueeze(-1) + offsets
    batch = torch.arange(tokens.shape[0], device=tokens.device)[:, None, None]
    previous = tokens[batch, positions]
    ids = torch.full_like(previous, config.dspark_noise_token_id)
    ids[..., 0] = previous[..., 0]
    streams = net.w("embed.weight").detach()[ids].unsqueeze(-2).expand(*ids.shape, config.hc_mult, -1)
    pre = F.one_hot(torch.zeros((), dtype=torch.long, device=tokens.device), config.hc_mult).float()
    for layer in range(config.num_nextn_predict_layers):
        streams, pre = net.block(
            streams,
            pre,
            f"mtp.{layer}",
            config.dspark_num_experts_per_tok,
            losses,
            lambda y, layer=layer: _attention(
                net, y, f"mtp.{layer}.attn", keys[layer], anchors, depths, positions
            ),
        )
    hidden = collapse(streams, pre)
    embedded = net.w(f"{last}.markov_head.embed.weight")[previous]
    base = net.norm(hidden, f"{last}.norm") @ net.w("head.weight").detach().T
    logits = base + embedded @ net.w(f"{last}.markov_head.head.weight").T
    weight = q.bf16(net.raw(f"{last}.confidence_head.proj.weight"))[0]
    confidence = torch.cat([hidden, embedded], -1).detach() @ weight
    return Block(logits, confidence)


def _attention(
    net: Network,
    y: torch.Tensor,
    prefix: str,
    context: torch.Tensor,
    anchors: torch.Tensor,
    depths: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Every row of a block sees the window before the anchor's end and the whole block."""
    config = net.config
    query, own, _ = net.projections(y, prefix, net.plain_rope, positions)
    scale = config.head_dim**-0.5
    before = torch.einsum("banhd,bjd->bahnj", query, context) * scale
    distance = anchors.unsqueeze(-1) - torch.arange(context.shape[1], device=y.device)
    seen = (distance >= 0) & (distance < config.sliding_window)
    before = before.masked_fill(~seen[:, :, None, None], -torch.inf)
    inside = torch.einsum("banhd,bamd->bahnm", query, own) * scale
    in_block = torch.arange(own.shape[2], device=y.device) < depths.unsqueeze(-1)
    inside = inside.masked_fill(~in_block[:, :, None, None], -torch.inf)
    sink = net.w(f"{prefix}.attn_sink")[:, None, None].expand(*before.shape[:-1], 1)
    shares = torch.cat([before, inside, sink], -1).softmax(-1)
    count = context.shape[1]
    out = torch.einsum("bahnj,bjd->banhd", shares[..., :count], context)
    out = out + torch.einsum("bahnm,bamd->banhd", shares[..., count:-1], own)
    return net.attention_output(out, prefix, net.plain_rope, positions)


def draft_loss(
    block: Block, target_logits: torch.Tensor, depths: torch.Tensor, decay: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of the tokens, loss of the confidence, and how often the choices agree, ``[width]``.

    Args:
        block: The draft's.
        target_logits: ``[b, a, width, vocab]``, the backbone's for the same tokens.
        depths: ``[b, a]``, how many rows of each block count.
        decay: Weight of a row over that of the row before it: later rows count only if earlier ones are accepted.
    """
    offsets = torch.arange(target_logits.shape[2], device=target_logits.device)
    counted = (offsets < depths.unsqueeze(-1)).float()
    weights = counted * decay**offsets
    cross = -(target_logits.softmax(-1) * block.logits.log_softmax(-1)).sum(-1)
    agree = (block.logits.detach().argmax(-1) == target_logits.argmax(-1)).float()
    confidence = F.binary_cross_entropy_with_logits(block.confidence, agree, reduction="none")
    return (
        (cross * weights).sum() / weights.sum(),
        (confidence * counted).sum() / counted.sum(),
        (agree * counted).sum((0, 1)) / counted.sum((0, 1)).clamp(min=1),
    )
