"""The architecture in a form that can be differentiated: whole sequences, no caches, straight-through casts.

Parameters carry the checkpoint's own names. Configuration, tensor names, Engram tables and formats are
those of ``deepinfer_plugins.model``; the arithmetic is the release's, with three liberties that training needs
and inference does not have: every expert computes every token (the router's weights are zero for most), sums are in
fp32, and the selection of the indexer is trained by a loss of its own, since choosing passes no gradient (and that
loss trains nothing but the indexer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.engram import CompressedVocabulary, engram_tables
from deepinfer_plugins.model.rope import rope_table
from deepinfer_plugins.model.tensors import expected_tensors
from training import quantise as q

VISION = ("vision.", "aligner.", "image_")


@dataclass
class Losses:
    """What a forward pass leaves behind besides its result.

    Args:
        index: How far each indexer's scores are from the attention they should predict, summed over layers.
        load: Tokens per expert of each layer, by prefix.
    """

    index: torch.Tensor | float = 0.0
    load: dict[str, torch.Tensor] = field(default_factory=dict)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Logical shape of every trained tensor; experts of a layer are stacked under ``experts``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, spec in expected_tensors(config).items():
        if name.startswith(VISION) or name.endswith((".scale", "bias_vl")):
            continue
        shape = (*spec.shape[:-1], spec.shape[-1] * 2) if spec.dtype == "I8" else spec.shape
        if ".experts." not in name:
            shapes[name] = shape
        elif ".experts.0." in name:
            draft = name.startswith("mtp.")
            count = config.dspark_n_routed_experts if draft else config.n_routed_experts
            shapes[name.replace(".experts.0.", ".experts.")] = (count, *shape)
    return shapes


def initial(name: str, shape: tuple[int, ...], depth: int) -> torch.Tensor:
    """Starting values: unit norms, small residual outputs, mHC at the release's initial values."""
    if name.endswith("_scale"):
        return torch.full(shape, 0.01)
    if name.endswith("_base"):
        streams = math.isqrt(shape[0] + 1) - 1
        return torch.cat(
            [torch.full((streams,), -1.1), torch.zeros(streams), 3.0 * torch.eye(streams).flatten()]
        )
    if name.endswith(("bias", "attn_sink")):
        return torch.zeros(shape)
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return torch.ones(shape)
    if name == "embed.weight":
        return torch.randn(shape)
    if name.endswith("engram.embed.weight"):
        return torch.randn(shape)
    std = shape[-1] ** -0.5
    if name.endswith(("wo_b.weight", "w2.weight")):
        std /= math.sqrt(2 * depth)
    if name == "head.weight":
        std *= 0.5
    return std * torch.randn(shape)


def mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mixing weights of ``streams [..., s, d]``: ``pre [..., s]``, ``post [..., s]``, ``comb [..., s, s]``."""
    s = streams.shape[-2]
    flat = streams.flatten(-2)
    z = (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(z[..., :s] * scale[0] + base[:s]) + hc_eps
    post = 2 * torch.sigmoid(z[..., s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (z[..., 2 * s :] * scale[2] + base[2 * s :]).unflatten(-1, (s, s)).softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return pre, post, comb


def merge(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Write a sublayer's output into the streams; the first index of ``comb`` is the source stream."""
    return q.bf16(post.unsqueeze(-1) * x.unsqueeze(-2) + torch.einsum("...ms,...md->...sd", comb, streams))


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    return q.bf16((pre.unsqueeze(-1) * streams).sum(-2))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return q.bf16(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the trailing ``2 * cos.shape[-1]`` dims of ``x``, in interleaved pairs."""
    size = 2 * cos.shape[-1]
    still, moving = x[..., :-size], x[..., -size:].unflatten(-1, (-1, 2))
    a, b = moving.unbind(-1)
    return q.bf16(torch.cat([still, torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)], -1))


class Network(nn.Module):
    """Backbone and draft.

    Args:
        config: The model.
        vocabulary: Compressed ids, for Engram.
        dropout: Share of every sublayer's output that is dropped in training.
    """

    def __init__(self, config: ModelConfig, vocabulary: CompressedVocabulary, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.dropout = dropout
        self.specs = expected_tensors(config)
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(initial(name, shape, config.num_hidden_layers))
                for name, shape in parameter_shapes(config).items()
            }
        )
        length = min(config.max_position_embeddings, 4096)
        device = torch.device("cpu")
        self.register_buffer("plain_rope", rope_table(config, False, length, device), persistent=False)
        self.register_buffer("long_rope", rope_table(config, True, length, device), persistent=False)
        self.register_buffer("compressed_ids", torch.from_numpy(vocabulary.map), persistent=False)
        self.tables = engram_tables(config, vocabulary.size)
        self.pad = int(vocabulary.map[config.engram_pad_token_id])
        self._rounded: dict[str, torch.Tensor] = {}

    def raw(self, name: str) -> torch.Tensor:
        return self.weights[name.replace(".", "/")]

    def w(self, name: str) -> torch.Tensor:
        """A weight as the checkpoint's format would hold it; rounded once per :meth:`begin`."""
        if name not in self._rounded:
            weight = self.raw(name)
            stacked = name.replace(".experts.", ".experts.0.") if ".shared_experts." not in name else name
            dtype = self.specs[stacked].dtype
            if dtype == "F8_E4M3":
                rows = name.endswith("engram.embed.weight")
                weight = q.mxfp8(weight) if rows else q.fp8_block(weight)
            elif dtype == "I8":
                weight = q.mxfp4(weight)
            elif dtype == "BF16":
                weight = q.bf16(weight)
            self._rounded[name] = weight
        return self._rounded[name]

    def begin(self) -> None:
        """Forget rounded weights: parameters have changed."""
        self._rounded.clear()

    # -- Pieces --

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.w(f"{name}.weight"), self.config.rms_norm_eps)

    def fp8(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """An FP8 linear; ``x`` is rounded to MXFP8 already."""
        return q.bf16(x @ self.w(f"{name}.weight").T)

    def rotate(
        self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, sign: int = 1
    ) -> torch.Tensor:
        """Rotate ``x [..., t, d]``, or ``[..., t, h, d]`` if positions have a last 1; back if ``sign`` is -1."""
        cos, sin = table[positions].chunk(2, -1)
        return rotate(x, cos, sign * sin)

    def mixes(self, streams: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Next ``pre``, ``post`` and ``comb``."""
        config = self.config
        fn, scale, base = (self.w(f"{name}_{part}") for part in ("fn", "scale", "base"))
        return mix(streams, fn, scale, base, config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)

    def moe(self, y: torch.Tensor, prefix: str, topk: int, losses: Losses) -> torch.Tensor:
        config = self.config
        logits = y @ self.w(f"{prefix}.gate.weight").T
        score = F.softplus(logits).sqrt()
        chosen = (score + self.raw(f"{prefix}.gate.bias")).detach().topk(topk, -1).indices
        mask = torch.zeros_like(score).scatter_(-1, chosen, 1.0)
        losses.load[prefix] = mask.detach().flatten(0, -2).sum(0)
        weights = score * mask
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        x = q.mxfp8(y)
        out = self._expert(
            q.bf16(torch.einsum("...d,eid->...ei", x, self.w(f"{prefix}.experts.w1.weight"))),
            q.bf16(torch.einsum("...d,eid->...ei", x, self.w(f"{prefix}.experts.w3.weight"))),
            weights.unsqueeze(-1),
        )
        routed = torch.einsum("...ei,edi->...d", out, self.w(f"{prefix}.experts.w2.weight"))
        shared = f"{prefix}.shared_experts"
        inner = self._expert(self.fp8(x, f"{shared}.w1"), self.fp8(x, f"{shared}.w3"), 1.0)
        return q.bf16(routed + self.fp8(inner, f"{shared}.w2"))

    def _expert(self, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
        limit = self.config.swiglu_limit
        return q.mxfp8(F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weight)

    def engram_rows(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        """Rows of the layer's table that each position reads, ``[b, t, columns]``."""
        table, size = self.tables[layer], self.config.engram_max_ngram_size
        ids = self.compressed_ids[tokens]
        context = torch.stack(
            [F.pad(ids, (r, 0), value=self.pad)[:, : ids.shape[1]] for r in range(size)], -1
        )
        columns, mixed = [], context[..., 0] * table.multipliers[0]
        for n in range(1, size):
            mixed = mixed ^ (context[..., n] * table.multipliers[n])
            for prime, offset in zip(table.primes[n - 1], table.offsets[n - 1], strict=True):
                columns.append(mixed % prime + offset)
        return torch.stack(columns, -1)

    def engram(self, streams: torch.Tensor, rows: torch.Tensor, prefix: str) -> torch.Tensor:
        config, s = self.config, self.config.hc_mult
        found = F.embedding(rows, self.w(f"{prefix}.embed.weight")).flatten(-2)
        parts = self.fp8(found, f"{prefix}.wkv").unflatten(-1, (s + 1, config.hidden_size))
        keys, value = parts[..., :s, :], parts[..., s:, :]
        eps = config.rms_norm_eps
        weight = self.w(f"{prefix}.q_weight") * self.w(f"{prefix}.k_weight")
        dot = (streams * weight * keys).sum(-1, keepdim=True) * config.hidden_size**-0.5
        dot = dot * torch.rsqrt(streams.square().mean(-1, keepdim=True) + eps)
        dot = dot * torch.rsqrt(keys.square().mean(-1, keepdim=True) + eps)
        gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
        return q.bf16(streams + gate * value)

    # -- Attention --

    def projections(
        self, y: torch.Tensor, prefix: str, table: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[..., h, d]``, window keys ``[..., d]``, and the low-rank query."""
        x = q.mxfp8(y)
        low = q.mxfp8(self.norm(self.fp8(x, f"{prefix}.wq_a"), f"{prefix}.q_norm"))
        heads = self.fp8(low, f"{prefix}.wq_b").unflatten(-1, (self.config.num_attention_heads, -1))
        query = self.rotate(heads, table, positions.unsqueeze(-1))
        return query, self.window_key(x, prefix, table, positions), low

    def window_key(
        self, x: torch.Tensor, prefix: str, table: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        key = self.norm(self.fp8(x, f"{prefix}.wkv"), f"{prefix}.kv_norm")
        return q.mxfp8(self.rotate(key, table, positions))

    def attention_output(
        self, out: torch.Tensor, prefix: str, table: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Turn back, then the grouped low-rank projection; ``out`` is ``[..., h, d]``."""
        out = self.rotate(q.bf16(out), table, positions.unsqueeze(-1), sign=-1)
        grouped = q.mxfp8(out.flatten(-2).unflatten(-1, (self.config.o_groups, -1)))
        weight = self.w(f"{prefix}.wo_a.weight").unflatten(0, (self.config.o_groups, -1))
        low = q.bf16(torch.einsum("...gk,gmk->...gm", grouped, weight)).flatten(-2)
        return self.fp8(q.mxfp8(low), f"{prefix}.wo_b")

    def compress(
        self, y: torch.Tensor, prefix: str, ratio: int, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compressed keys and index keys, ``[b, t // ratio, d]``."""
        latent = y @ self.w(f"{prefix}.compressor.wkv.weight").T
        if ratio == 2:
            even = latent.shape[1] // 2 * 2
            gate = (y @ self.w(f"{prefix}.compressor.wgate.weight").T)[:, :even].unflatten(1, (-1, 2))
            latent = (gate.softmax(2) * latent[:, :even].unflatten(1, (-1, 2))).sum(2)
        latent = self.norm(q.bf16(latent), f"{prefix}.compressor.norm")
        positions = torch.arange(latent.shape[1], device=y.device) * ratio
        keys = q.fp4(self.rotate(latent, table, positions))
        index = self.norm(
            q.bf16(latent.detach() @ self.w(f"{prefix}.indexer.wk.weight").T), f"{prefix}.indexer.k_norm"
        )
        return keys, q.mxfp4(self.rotate(index, table, positions))

    def attention(
        self, y: torch.Tensor, layer: int, memory: dict[str, torch.Tensor], losses: Losses
    ) -> torch.Tensor:
        """One layer's attention; ``memory`` carries compressed keys, index keys and the selection onwards."""
        config, prefix, ratio = self.config, f"layers.{layer}.attn", self.config.compress_ratios[layer]
        table = self.long_rope if ratio else self.plain_rope
        positions = torch.arange(y.shape[1], device=y.device)
        query, window, low = self.projections(y, prefix, table, positions)
        distance = positions[:, None] - positions[None]
        scale = config.head_dim**-0.5
        scores = torch.einsum("bthd,bjd->bhtj", query, window) * scale
        scores = scores.masked_fill((distance < 0) | (distance >= config.sliding_window), -torch.inf)
        values = window
        if ratio:
            if layer in config.kv_source_layer_ids:
                memory["keys"], memory["index"] = self.compress(y, prefix, ratio, table)
            if layer in config.index_source_layer_ids:
                memory["scores"] = self.index_scores(
                    y.detach(), low.detach(), prefix, table, positions, memory["index"], ratio
                )
                memory["chosen"] = self.choose(memory["scores"].detach())
            far = torch.einsum("bthd,bjd->bhtj", query, memory["keys"]) * scale
            scores = torch.cat([scores, far.masked_fill(~memory["chosen"][:, None], -torch.inf)], -1)
            values = torch.cat([window, memory["keys"]], 1)
        sink = self.w(f"{prefix}.attn_sink")[None, :, None, None].expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        if ratio and self.training:
            losses.index = losses.index + self.index_loss(shares.detach()[..., y.shape[1] :], memory)
        out = torch.einsum("bhtj,bjd->bthd", shares, values)
        return self.attention_output(out, prefix, table, positions)

    def index_scores(
        self,
        y: torch.Tensor,
        low: torch.Tensor,
        prefix: str,
        table: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        ratio: int,
    ) -> torch.Tensor:
        """Scores ``[b, t, j]``, minus infinity for entries that are not complete."""
        query = self.fp8(low, f"{prefix}.indexer.wq_b").unflatten(-1, (self.config.index_n_heads, -1))
        query = q.mxfp4(self.rotate(query, table, positions.unsqueeze(-1)))
        weights = q.bf16(y @ self.w(f"{prefix}.indexer.weights_proj.weight").T)
        heads = torch.einsum("bthd,bjd->bthj", query, keys).relu()
        scores = q.bf16(torch.einsum("bth,bthj->btj", weights, heads))
        complete = torch.arange(keys.shape[1], device=y.device) < ((positions + 1) // ratio)[:, None]
        return scores.masked_fill(~complete, -torch.inf)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Entries chosen, bool ``[b, t, j]``. Candidate blocks do not bite at the lengths trained on."""
        count = min(self.config.index_topk, scores.shape[-1])
        best = scores.topk(count, -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & scores.isfinite()

    @staticmethod
    def index_loss(shares: torch.Tensor, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        """Divergence of the scores, over the entries chosen, from the attention those entries got."""
        target = shares.sum(1)
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-9)
        scores = memory["scores"].masked_fill(~memory["chosen"], -1e4)
        return (target * (target.clamp(min=1e-9).log() - scores.log_softmax(-1))).sum(-1).mean()

    # -- Whole --

    def forward(self, tokens: torch.Tensor, losses: Losses) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states after the final norm ``[b, t, d]``, and the draft's taps (detached)."""
        config = self.config
        streams = self.w("embed.weight")[tokens].unsqueeze(-2).expand(-1, -1, config.hc_mult, -1)
        pre = torch.zeros(config.hc_mult, device=tokens.device).index_fill(
            0, torch.zeros(1, dtype=torch.long, device=tokens.device), 1.0
        )
        memory: dict[str, torch.Tensor] = {}
        taps = []
        for layer in range(config.num_hidden_layers):
            prefix = f"layers.{layer}"
            if layer in config.engram_layer_ids:
                streams = self.engram(streams, self.engram_rows(tokens, layer), f"{prefix}.engram")
            if layer in config.dspark_target_layer_ids:
                taps.append(q.bf16(streams.mean(-2)).detach())
            streams, pre = self.block(
                streams,
                pre,
                prefix,
                config.num_experts_per_tok,
                losses,
                lambda y, layer=layer: self.attention(y, layer, memory, losses),
            )
        return self.norm(collapse(streams, pre), "norm"), taps

    def block(self, streams, pre, prefix, topk, losses, attention):  # type: ignore[no-untyped-def]
        """Attention and experts, each between hyper-connections."""
        next_pre, post, comb = self.mixes(streams, f"{prefix}.hc_attn")
        x = attention(self.norm(collapse(streams, pre), f"{prefix}.attn_norm"))
        x = F.dropout(x, self.dropout, self.training)
        streams, pre = merge(x, streams, post, comb), next_pre
        next_pre, post, comb = self.mixes(streams, f"{prefix}.hc_ffn")
        x = self.moe(self.norm(collapse(streams, pre), f"{prefix}.ffn_norm"), f"{prefix}.ffn", topk, losses)
        x = F.dropout(x, self.dropout, self.training)
        return merge(x, streams, post, comb), next_pre

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.w("head.weight").T
