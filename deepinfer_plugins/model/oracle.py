"""The whole model again: plain torch, no caches, every token recomputed. To be read beside the formulas.

The model that runs (``network.py``) is tested against this one, so the two share nothing but ``config.py``
and the checkpoint: every cast, hash, rotation and selection is spelled out here again, differently where
there is a choice. Sources: the release's published formulas, and the rounding table in ``README.md``
beside this file.

Every value is carried in float64. What a value may hold is decided by the rounding functions (``_bf16``,
``_fp32``, ``_e4m3``, ``_e2m1``), so where a value is rounded can be read off the code. Products of rounded
operands are exact in float64.

One sequence at a time; row ``i`` is position ``i``. Sizes in shapes: ``n`` rows, ``s`` streams, ``d`` hidden
size, ``h`` heads, ``k`` width of a key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from deepinfer_plugins.model.config import ModelConfig

# Rows handled at a time where memory grows with rows times keys. Changes no result.
_ROWS = 128

Trace = dict[str, torch.Tensor]


# ---- Rounding. Each takes and returns float64; the result is representable in the format named. ----


def _round(x: torch.Tensor, bits: int, min_exponent: int) -> torch.Tensor:
    """To ``bits`` significant bits, ties to even, with subnormals below ``2**min_exponent``."""
    exponent = (x.view(torch.int64) >> 52 & 0x7FF).clamp(min=min_exponent + 1023)
    # Next to one and a half times 2**52 quanta nothing finer than a quantum has room: the addition rounds.
    large = 1.5 * (exponent + 53 - bits << 52).view(torch.float64)
    return (x + large - large).copysign(x)


def _fp32(x: torch.Tensor) -> torch.Tensor:
    return x.float().double()


def _bf16(x: torch.Tensor) -> torch.Tensor:
    """By way of fp32, as on every chip: one in 1e5 values differs from rounding at once."""
    return _round(_fp32(x), 8, -126)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return _round(x, 4, -6).clamp(-448, 448)


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    return _round(x, 2, 0).clamp(-6, 6)


# ---- Casts by group. Each returns what was rounded and the scale, apart: their product is the value. ----


def _power_of_two_at_least(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))


def _mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., k]`` to e4m3 values ``[..., k/32, 32]`` and scales ``[..., k/32, 1]``, powers of two."""
    groups = x.unflatten(-1, (-1, 32))
    amax = (
        groups.abs().amax(-1, keepdim=True).clamp(min=_fp32(torch.tensor(1e-4, dtype=torch.float64)).item())
    )
    scale = _power_of_two_at_least(_fp32(amax / 448))
    return _e4m3(groups / scale), scale


def _mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., k]`` to e2m1 values ``[..., k/32, 32]`` and scales ``[..., k/32, 1]``, powers of two."""
    groups = x.unflatten(-1, (-1, 32))
    scale = _power_of_two_at_least(_fp32(groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6))
    return _e2m1(groups / scale), scale


def _fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., k]`` to e2m1 values ``[..., k/16, 16]`` and scales ``[..., k/16, 1]``, e4m3 numbers."""
    groups = x.unflatten(-1, (-1, 16))
    sixth = _fp32(torch.tensor(1 / 6, dtype=torch.float64, device=x.device))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9)
    scale = _e4m3(_fp32(amax * sixth))
    # The product with the rounded reciprocal is itself rounded: ties of e2m1 are decided by it.
    return _e2m1(_fp32(groups * _fp32(1 / scale))), scale


def _value(rounded: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    values, scale = rounded
    return (values * scale).flatten(-2)


def _e4m3_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8)


def _ue8m0_bytes(scale: torch.Tensor) -> torch.Tensor:
    return (torch.frexp(scale.flatten(-2))[1] - 1 + 127).to(torch.uint8)


def _e2m1_bytes(x: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=x.device)
    code = torch.searchsorted(magnitudes, x.abs().flatten(-2)) + 8 * torch.signbit(x.flatten(-2))
    return (code[..., 0::2] + 16 * code[..., 1::2]).to(torch.uint8)


def _mxfp8_record(rounded: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.cat([_e4m3_bytes(rounded[0]), _ue8m0_bytes(rounded[1])], -1)


def _mxfp4_record(rounded: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.cat([_e2m1_bytes(rounded[0]), _ue8m0_bytes(rounded[1])], -1)


def _fp4_record(rounded: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.cat([_e2m1_bytes(rounded[0]), _e4m3_bytes(rounded[1])], -1)


# ---- Rotary positions ----


def rotary_frequencies(config: ModelConfig, compressed: bool) -> torch.Tensor:
    """Radians per position of each rotary pair, float64 ``[rope/2]``.

    Compressed layers have their own base and YaRN's blend of frequencies, with amplitude 1; the others are
    plain.
    """
    rope = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    base = theta ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
    yarn = config.rope_scaling
    if not compressed or yarn is None:
        return base

    def pair_that_turns(times: float) -> float:
        return (
            rope
            * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high: float = min(math.ceil(pair_that_turns(yarn.beta_slow)), rope - 1)
    if high == low:
        high += 0.001
    stretched = ((torch.arange(rope // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return base / yarn.factor * stretched + base * (1 - stretched)


def _rotate(
    x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """Rotate interleaved pairs of the trailing dims of ``[n, h, k]``; bf16."""
    angle = positions.double()[:, None, None] * frequencies.to(x.device)
    cos, sin = _fp32(angle.cos()), _fp32(angle.sin())
    if inverse:
        sin = -sin
    split = x.shape[-1] - 2 * frequencies.shape[0]
    even, odd = x[..., split::2], x[..., split + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return _bf16(torch.cat([x[..., :split], turned], -1))


# ---- Hyper-connections ----


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """``[..., s, s]``: rows, then columns, are made to sum to one, ``iterations`` times in all."""
    a = logits.softmax(-1) + eps
    a = a / (a.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        a = a / (a.sum(-1, keepdim=True) + eps)
        a = a / (a.sum(-2, keepdim=True) + eps)
    return a


def _merge(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """``post[t] * x + sum_m comb[m, t] * streams[m]`` for each stream ``t``."""
    return _bf16(post[:, :, None] * x[:, None, :] + torch.einsum("nmt,nmd->ntd", comb, streams))


def _collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    return _bf16(torch.einsum("nm,nmd->nd", pre, streams))


# ---- Selection ----


def _largest(score: torch.Tensor, valid: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` best valid columns of each row, ascending, then -1. Ties: the lower column.

    Args:
        score: ``[n, m]``.
        valid: ``[n, m]``, bool.

    Returns:
        int64, ``[n, count]``.
    """
    rows, columns = score.shape
    best = score.masked_fill(~valid, -math.inf).sort(dim=-1, descending=True, stable=True).indices[:, :count]
    best = torch.where(valid.gather(1, best), best, columns).sort(dim=-1).values
    chosen = torch.full((rows, count), -1, dtype=torch.int64, device=score.device)
    chosen[:, : best.shape[1]] = torch.where(best < columns, best, -1)
    return chosen


def gate(
    logits: torch.Tensor, bias: torch.Tensor, topk: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each row and their weights: chosen with the bias, weighed without it.

    Args:
        logits: ``[n, e]``, fp32 values.
        bias: ``[n, e]`` or ``[e]``, fp32 values.

    Returns:
        ids int64 ``[n, topk]``, best first, ties to the lower id; weights ``[n, topk]``, fp32 values.
    """
    score = _fp32((logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs()))).sqrt())
    order = _fp32(score + bias).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    chosen = score.gather(1, order)
    return order, _fp32(chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling)


# ---- Engram: compressed vocabulary and hashing ----

# Unicode's White_Space. Python's own strip() also takes the four separators U+001C to U+001F.
_WHITE_SPACE = "".join(
    map(
        chr,
        [
            *range(0x09, 0x0E),
            0x20,
            0x85,
            0xA0,
            0x1680,
            *range(0x2000, 0x200B),
            0x2028,
            0x2029,
            0x202F,
            0x205F,
            0x3000,
        ],
    )
)


def _normalize(text: str) -> str:
    from tokenizers import normalizers

    # These four are the library's, not Python's: the release's ids come from its (older) tables of characters.
    for step in (normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()):
        text = step.normalize_str(text)
    spaced = ""
    for c in text:
        c = " " if c in " \t\r\n" else c
        if c != " " or not spaced.endswith(" "):
            spaced += c
    # A lone space outlives the stripping by standing as this character, which therefore reads as a space.
    return (spaced if spaced == " " else spaced.strip(_WHITE_SPACE)).replace("\ue000", " ")


def compressed_vocab(tokenizer_json: str | Path) -> torch.Tensor:
    """The compressed id of every token id: ids whose texts read alike share one.

    Args:
        tokenizer_json: Path of the release's ``tokenizer.json``.

    Returns:
        int64, ``[num_ids]``. Compressed ids are dense and numbered by first appearance.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    known: dict[str, int] = {}
    compressed = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        # Part of a character only: no text to normalize.
        key = (
            str(tokenizer.id_to_token(token))
            if "\N{REPLACEMENT CHARACTER}" in text
            else _normalize(text) or text
        )
        compressed.append(known.setdefault(key, len(known)))
    return torch.tensor(compressed)


def engram_multipliers(layer: int, ngram: int, vocab_size: int) -> torch.Tensor:
    """One odd int64 factor for each place of an n-gram, ``[ngram]``; times an id, none overflows."""
    bound = max(1, (2**63 - 1) // vocab_size // 2)
    return torch.from_numpy(
        2 * np.random.default_rng(10007 * layer).integers(0, bound, ngram, dtype=np.int64) + 1
    )


def engram_primes(config: ModelConfig) -> dict[int, torch.Tensor]:
    """Table sizes of each Engram layer, ``[ngram - 1, heads]``: the primes from ``engram_vocab_size`` up."""
    per_layer = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    primes: list[int] = []
    number = config.engram_vocab_size
    while len(primes) < per_layer * len(config.engram_layer_ids):
        if number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            primes.append(number)
        number += 1
    shape = (len(config.engram_layer_ids), config.engram_max_ngram_size - 1, config.engram_n_heads)
    return dict(zip(config.engram_layer_ids, torch.tensor(primes).view(shape), strict=True))


def engram_rows(ids: torch.Tensor, pad: int, multipliers: torch.Tensor, primes: torch.Tensor) -> torch.Tensor:
    """Rows of a layer's table that each position reads.

    Args:
        ids: int64 ``[n]``, compressed; -1 for a token that is in no n-gram (an image).
        pad: Compressed id that stands in for tokens before the start and behind a -1.
        multipliers: int64 ``[ngram]``.
        primes: int64 ``[ngram - 1, heads]``.

    Returns:
        int64 ``[n, (ngram - 1) * heads]``; -1 where the position itself is -1.
    """
    offsets = (primes.flatten().cumsum(0) - primes.flatten()).view_as(primes)
    rows = torch.empty(len(ids), *primes.shape, dtype=torch.int64)
    dead = torch.zeros(len(ids), dtype=torch.bool)
    mixed = torch.zeros(len(ids), dtype=torch.int64)
    for back, multiplier in enumerate(multipliers.tolist()):
        earlier = torch.full_like(ids, pad)
        earlier[back:] = ids[: max(len(ids) - back, 0)]
        dead |= earlier == -1
        mixed ^= torch.where(dead, pad, earlier) * multiplier
        if back > 0:
            rows[:, back - 1] = mixed[:, None] % primes[back - 1] + offsets[back - 1]
    return rows.flatten(1).masked_fill((ids == -1)[:, None], -1)


# ---- The model ----


@dataclass(slots=True)
class _Shared:
    """What source layers leave for the layers after them. An entry is a block of ``ratio`` positions.

    Args:
        compressed: ``[entries, head_dim]``, dequantised, by source layer.
        index: ``[entries, index_head_dim]``, dequantised, by source layer.
        selected: int64 ``[n, index_topk]``, the last index source's choice of entries: ascending, then -1.
        candidates: int64 ``[n, candidate_topk_blocks]``, blocks of entries: ascending, then -1.
    """

    compressed: dict[int, torch.Tensor] = field(default_factory=dict)
    index: dict[int, torch.Tensor] = field(default_factory=dict)
    selected: torch.Tensor | None = None
    candidates: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A drafted block: one row per drafted token.

    Args:
        tokens: int64 ``[depth]``.
        logits: fp32 ``[depth, vocab]``, with the Markov head's part.
        confidence: fp32 ``[depth]``; that the row's token is right, given the token before it.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor


def replay_start(prompt_length: int, keep: int | None) -> int:
    """First position of a prompt that the decoder side runs on, if it is given the last ``keep``; None gives all.

    The last row is always kept: its logits are the next token's.
    """
    return 0 if keep is None else prompt_length - min(max(keep, 1), prompt_length)


class Oracle:
    """The model of one checkpoint.

    Args:
        config: Its configuration.
        tensors: Its tensors by release name (no ``model.`` prefix): e4m3 weights, UE8M0 scales as bytes or
            ``float8_e8m0fnu``, experts as packed bytes, the rest as released. On any device; never changed.
        compressed_vocab_map: Compressed id of every token id, see :func:`compressed_vocab`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        compressed_vocab_map: torch.Tensor | Sequence[int],
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.device = tensors["embed.weight"].device
        self.compressed_vocab = torch.as_tensor(compressed_vocab_map, dtype=torch.int64).cpu()
        vocab_size = int(self.compressed_vocab.max()) + 1
        self.multipliers = {
            layer: engram_multipliers(layer, config.engram_max_ngram_size, vocab_size)
            for layer in config.engram_layer_ids
        }
        self.primes = engram_primes(config)

    # -- What callers use --

    def logits(
        self,
        token_ids: Sequence[int] | torch.Tensor,
        image: torch.Tensor | None = None,
        *,
        decoder_from: int = 0,
        trace: Trace | None = None,
    ) -> torch.Tensor:
        """Logits of every position.

        Args:
            token_ids: ``[n]``, one sequence from its start.
            image: bool ``[n]``: tokens of image spans (they route by ``bias_vl`` and are in no n-gram).
            decoder_from: First position that the decoder side runs on; its windows reach no further back.
            trace: Filled with intermediates by name, in the formats that the running model keeps them in.

        Returns:
            fp32 ``[n - decoder_from, vocab]``.
        """
        hidden, _ = self._backbone(token_ids, image, decoder_from, trace)
        return self._linear("head", hidden).float()

    def verify(
        self, prompt: Sequence[int], generated: Sequence[int], *, replay_keep: int | None = None
    ) -> int | None:
        """Check a greedy continuation with one forward.

        Args:
            prompt: At least one token.
            generated: What followed it.
            replay_keep: Prompt rows that the decoder side was given; None for all.

        Returns:
            Index of the first generated token that isn't the best (lowest id among equals); None if all are.
        """
        start = replay_start(len(prompt), replay_keep)
        logits = self.logits([*prompt, *generated], decoder_from=start)
        best = logits[len(prompt) - 1 - start : -1].argmax(-1).tolist()
        return next(
            (i for i, (got, want) in enumerate(zip(generated, best, strict=True)) if got != want), None
        )

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, *, replay_keep: int | None = None
    ) -> list[int]:
        """Continue greedily, a whole forward per token; ties to the lowest id. No token stops it."""
        start = replay_start(len(prompt), replay_keep)
        tokens = list(prompt)
        for _ in range(max_new_tokens):
            tokens.append(int(self.logits(tokens, decoder_from=start)[-1].argmax()))
        return tokens[len(prompt) :]

    def draft(
        self,
        token_ids: Sequence[int],
        golden: int,
        depth: int,
        chain: Sequence[int] | None = None,
    ) -> Draft:
        """Draft ``depth`` tokens after ``golden``.

        Args:
            token_ids: The tokens that have been through the backbone.
            golden: The token after them.
            chain: The token before each drafted one, ``golden`` first; None drafts greedily.
        """
        _, taps = self._backbone(token_ids, None, 0, None)
        states = self._draft_states(taps, golden, depth)
        base = self._linear(
            "head", self._norm(f"mtp.{self.config.num_nextn_predict_layers - 1}.norm", states)
        )
        head = f"mtp.{self.config.num_nextn_predict_layers - 1}"
        confidence_weight = _bf16(self._raw(f"{head}.confidence_head.proj.weight"))
        tokens, logits, confidences = [], [], []
        before = golden
        for row in range(depth):
            before = before if chain is None else chain[row]
            embedding = self._raw(f"{head}.markov_head.embed.weight", torch.tensor([before]))
            logits.append(_fp32(base[row] + self._linear(f"{head}.markov_head.head", embedding)[0]))
            evidence = _fp32(torch.cat([states[row], embedding[0]]) @ confidence_weight[0])
            confidences.append(evidence.clamp(-60, 60).sigmoid())
            before = int(logits[-1].argmax())
            tokens.append(before)
        return Draft(torch.tensor(tokens), torch.stack(logits).float(), torch.stack(confidences).float())

    # -- Weights --

    def _raw(self, name: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor, or some of its rows, in float64. Not for quantised ones."""
        tensor = self.tensors[name]
        return (tensor if rows is None else tensor[rows.to(tensor.device)]).double()

    def _scale(self, name: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        """UE8M0 scales, as powers of two in float64."""
        stored = self.tensors[name]
        exponent = (stored if rows is None else stored[rows.to(stored.device)]).view(torch.uint8).int() - 127
        return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)

    def _weight(self, name: str) -> torch.Tensor:
        """The matrix ``{name}.weight`` in float64 ``[out, in]``, whatever it is stored as."""
        stored = self.tensors[f"{name}.weight"]
        if stored.dtype == torch.float8_e4m3fn:
            scale = self._scale(f"{name}.scale").repeat_interleave(32, 0).repeat_interleave(32, 1)
            return stored.double() * scale[: stored.shape[0], : stored.shape[1]]
        if stored.dtype in (torch.int8, torch.uint8):
            packed = stored.view(torch.uint8).long()
            codes = torch.stack([packed % 16, packed // 16], -1).flatten(-2)
            magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=codes.device)
            values = torch.where(codes < 8, 1.0, -1.0) * magnitudes[codes % 8]
            return values * self._scale(f"{name}.scale").repeat_interleave(32, 1)
        return stored.double()

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``x W^T`` of a bf16 matrix, fp32."""
        return _fp32(x @ self._weight(name).T)

    def _bf16_linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``x W^T`` of a bf16 matrix, bf16 (from the sum itself, not from its fp32 rounding)."""
        return _bf16(x @ self._weight(name).T)

    def _quantised_linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``cast(x) W^T`` of an FP8 or FP4 matrix, bf16."""
        return _bf16(_value(_mxfp8(x)) @ self._weight(name).T)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return _bf16(x * torch.rsqrt(mean + self.config.rms_norm_eps) * self._raw(f"{name}.weight"))

    # -- The trunk --

    def _backbone(
        self,
        token_ids: Sequence[int] | torch.Tensor,
        image: torch.Tensor | None,
        decoder_from: int,
        trace: Trace | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised hidden states ``[rows, d]``, and the draft's taps of the same rows, side by side."""
        config = self.config
        tokens = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        if tokens.dim() != 1 or len(tokens) == 0:
            raise ValueError(
                f"token_ids must be one sequence of at least one token, not of shape {tuple(tokens.shape)}"
            )
        if not 0 <= decoder_from < len(tokens):
            raise ValueError(f"decoder_from={decoder_from} must be one of the rows 0 to {len(tokens) - 1}")
        if image is None:
            image = torch.zeros_like(tokens, dtype=torch.bool)
        image = image.to(self.device)
        trace = {} if trace is None else trace

        positions = torch.arange(len(tokens), device=self.device)
        streams = self._raw("embed.weight", tokens)[:, None].repeat(1, config.hc_mult, 1)
        pre = self._first_stream(len(tokens))
        shared = _Shared()
        taps = []
        for layer in range(config.num_hidden_layers):
            name = f"layers.{layer}"
            if layer in config.engram_layer_ids:
                streams = self._engram(layer, streams, tokens, image)
            y, next_pre, post, comb = self._enter(name, "attn", streams, pre)
            if layer in config.kv_source_layer_ids:
                self._make_keys(layer, y, shared, trace)
            if layer == config.decoder_start:
                # Keys come from every row; from here on everything else is of the rows kept.
                kept = slice(decoder_from, None)
                streams, y, next_pre, post, comb = (
                    streams[kept],
                    y[kept],
                    next_pre[kept],
                    post[kept],
                    comb[kept],
                )
                positions, image = positions[kept], image[kept]
            if layer in config.dspark_target_layer_ids:
                taps.append(_bf16(streams.mean(1)))
            trace[f"{name}.streams"], trace[f"{name}.attn_norm"] = streams.bfloat16(), y.bfloat16()
            x = self._attention(layer, y, positions, shared, trace)
            trace[f"{name}.attn"] = x.bfloat16()
            streams = _merge(x, streams, post, comb)

            y, pre, post, comb = self._enter(name, "ffn", streams, next_pre)
            trace[f"{name}.ffn_norm"] = y.bfloat16()
            x = self._experts(name, y, image, config.num_experts_per_tok, trace)
            trace[f"{name}.ffn"] = x.bfloat16()
            streams = _merge(x, streams, post, comb)
        hidden = self._norm("norm", _collapse(streams, pre))
        trace["hidden"] = hidden.bfloat16()
        return hidden, torch.cat([hidden[:, :0], *(tap[-len(hidden) :] for tap in taps)], -1)

    def _first_stream(self, rows: int) -> torch.Tensor:
        """The mix in front of the first sublayer: it reads stream 0."""
        pre = torch.zeros(rows, self.config.hc_mult, dtype=torch.float64, device=self.device)
        pre[:, 0] = 1
        return pre

    def _enter(
        self, name: str, sublayer: str, streams: torch.Tensor, pre: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A sublayer's normalised input, by the mix of the sublayer before, and its own mixes.

        Args:
            name: The layer.
            sublayer: ``attn`` or ``ffn``.
            streams: ``[n, s, d]``.
            pre: ``[n, s]``.

        Returns:
            input ``[n, d]``; ``pre`` of the next sublayer ``[n, s]``; ``post`` ``[n, s]`` and ``comb``
            ``[n, s, s]`` with which this one's output joins the streams.
        """
        s = self.config.hc_mult
        fn, base, scale = (self._raw(f"{name}.hc_{sublayer}_{part}") for part in ("fn", "base", "scale"))
        flat = streams.flatten(1)
        mean = flat.square().mean(-1, keepdim=True)
        z = _fp32(flat @ fn.T * torch.rsqrt(mean + self.config.rms_norm_eps))
        next_pre = _fp32((z[:, :s] * scale[0] + base[:s]).sigmoid() + self.config.hc_eps)
        post = _fp32(2 * (z[:, s : 2 * s] * scale[1] + base[s : 2 * s]).sigmoid())
        square = (z[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(-1, (s, s))
        comb = _fp32(sinkhorn(square, self.config.hc_sinkhorn_iters, self.config.hc_eps))
        return self._norm(f"{name}.{sublayer}_norm", _collapse(streams, pre)), next_pre, post, comb

    def _engram(
        self, layer: int, streams: torch.Tensor, tokens: torch.Tensor, image: torch.Tensor
    ) -> torch.Tensor:
        """Add what the n-gram tables hold for the last tokens, gated, to each stream ``[n, s, d]``."""
        config, name = self.config, f"layers.{layer}.engram"
        known = (tokens < len(self.compressed_vocab)) & ~image
        ids = torch.where(
            known.cpu(), self.compressed_vocab[tokens.cpu().clamp(max=len(self.compressed_vocab) - 1)], -1
        )
        pad = int(self.compressed_vocab[config.engram_pad_token_id])
        rows = engram_rows(ids, pad, self.multipliers[layer], self.primes[layer]).to(self.device)
        table = self._raw(f"{name}.embed.weight", rows.clamp(min=0)).unflatten(-1, (-1, 32))
        scale = self._scale(f"{name}.embed.scale", rows.clamp(min=0))[..., None]
        memory = _value((table, scale)).masked_fill((rows < 0)[..., None], 0).flatten(1)
        projected = _bf16(memory @ self._weight(f"{name}.wkv").T).unflatten(-1, (config.hc_mult + 1, -1))
        keys, value = projected[:, :-1], projected[:, -1:]

        def inverse_rms(x: torch.Tensor) -> torch.Tensor:
            return torch.rsqrt(x.square().mean(-1) + config.rms_norm_eps)

        weight = _fp32(self._raw(f"{name}.q_weight") * self._raw(f"{name}.k_weight"))
        likeness = (
            (streams * weight * keys).sum(-1)
            * inverse_rms(streams)
            * inverse_rms(keys)
            / math.sqrt(config.hidden_size)
        )
        opening = (likeness.sign() * likeness.abs().clamp(min=1e-6).sqrt()).sigmoid()
        return torch.where(image[:, None, None], streams, _bf16(streams + opening[..., None] * value))

    # -- Attention --

    def _make_keys(self, layer: int, y: torch.Tensor, shared: _Shared, trace: Trace) -> None:
        """Compressed keys and index keys of every full block of ``ratio`` rows of ``y`` ``[n, d]``."""
        config, name = self.config, f"layers.{layer}.attn"
        ratio = config.compress_ratios[layer]
        entries = len(y) // ratio
        frequencies = rotary_frequencies(config, compressed=True)
        first_positions = torch.arange(entries, device=self.device) * ratio
        if ratio == 1:
            latent = self._bf16_linear(f"{name}.compressor.wkv", y)
        else:
            blocks = y[: entries * ratio]
            gates = self._linear(f"{name}.compressor.wgate", blocks).unflatten(0, (entries, ratio))
            latents = self._linear(f"{name}.compressor.wkv", blocks).unflatten(0, (entries, ratio))
            latent = _bf16((gates.softmax(1) * latents).sum(1))
        latent = self._norm(f"{name}.compressor.norm", latent)
        compressed = _fp4(_rotate(latent[:, None], first_positions, frequencies)[:, 0])
        shared.compressed[layer] = _value(compressed)
        trace[f"layers.{layer}.compressed"] = _fp4_record(compressed)
        if layer in config.index_k_source_layer_ids:
            index = self._norm(f"{name}.indexer.k_norm", self._bf16_linear(f"{name}.indexer.wk", latent))
            index_key = _mxfp4(_rotate(index[:, None], first_positions, frequencies)[:, 0])
            shared.index[layer] = _value(index_key)
            trace[f"layers.{layer}.index_key"] = _mxfp4_record(index_key)

    def _attention(
        self, layer: int, y: torch.Tensor, positions: torch.Tensor, shared: _Shared, trace: Trace
    ) -> torch.Tensor:
        """A backbone layer's attention, ``[n, d]`` to ``[n, d]``. No window starts before row 0."""
        config, name = self.config, f"layers.{layer}.attn"
        ratio = config.compress_ratios[layer]
        frequencies = rotary_frequencies(config, compressed=ratio > 0)
        queries_latent = self._norm(f"{name}.q_norm", self._quantised_linear(f"{name}.wq_a", y))
        if layer in config.index_source_layer_ids:
            self._select(layer, queries_latent, y, positions, shared, trace)
        queries = self._queries(name, queries_latent, positions, frequencies)
        window = self._window_keys(name, y, positions, frequencies)
        trace[f"layers.{layer}.window"] = _mxfp8_record(window)
        rows = torch.arange(len(y), device=self.device)
        seen = rows[:, None] + torch.arange(1 - config.sliding_window, 1, device=self.device)
        keys, ids = [_value(window)], [seen.clamp(min=-1)]
        source = config.kv_source(layer)
        if source is not None and shared.selected is not None:
            keys.append(shared.compressed[source])
            ids.append(torch.where(shared.selected < 0, -1, shared.selected + len(y)))
        output = self._attend(queries, torch.cat(keys), torch.cat(ids, 1), self._raw(f"{name}.attn_sink"))
        return self._attention_output(name, output, positions, frequencies)

    def _queries(
        self, name: str, latent: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor
    ) -> torch.Tensor:
        heads = self._quantised_linear(f"{name}.wq_b", latent).unflatten(
            -1, (self.config.num_attention_heads, -1)
        )
        return _rotate(heads, positions, frequencies)

    def _window_keys(
        self, name: str, y: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (which are the values too) of rows ``[n, d]``, as MXFP8."""
        latent = self._norm(f"{name}.kv_norm", self._quantised_linear(f"{name}.wkv", y))
        return _mxfp8(_rotate(latent[:, None], positions, frequencies)[:, 0])

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor, sinks: torch.Tensor
    ) -> torch.Tensor:
        """Softmax attention of each row over keys of its own, with a sink that has no value.

        Args:
            queries: ``[n, h, k]``.
            keys: ``[m, k]``.
            ids: int64 ``[n, c]``, the keys each row sees; -1 for none.
            sinks: ``[h]``.

        Returns:
            ``[n, h, k]``, bf16.
        """
        outputs = []
        for q, chosen in zip(queries.split(_ROWS), ids.split(_ROWS), strict=True):
            own = keys[chosen.clamp(min=0)]
            score = (q @ own.mT / math.sqrt(self.config.head_dim)).masked_fill(
                (chosen < 0)[:, None], -math.inf
            )
            sink = sinks[:, None].expand(len(q), -1, 1)
            share = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
            outputs.append(_bf16(share @ own))
        return torch.cat(outputs)

    def _attention_output(
        self, name: str, output: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor
    ) -> torch.Tensor:
        """Undo the rotation that values carry, then project in two steps; ``[n, h, k]`` to ``[n, d]``."""
        groups = self.config.o_groups
        output = _rotate(output, positions, frequencies, inverse=True).flatten(1).unflatten(-1, (groups, -1))
        weight = self._weight(f"{name}.wo_a").unflatten(0, (groups, -1))
        low = _bf16(torch.einsum("ngk,grk->ngr", _value(_mxfp8(output)), weight))
        return self._quantised_linear(f"{name}.wo_b", low.flatten(1))

    def _select(
        self,
        layer: int,
        queries_latent: torch.Tensor,
        y: torch.Tensor,
        positions: torch.Tensor,
        shared: _Shared,
        trace: Trace,
    ) -> None:
        """Choose the entries that this layer and those that share with it attend to."""
        config, name = self.config, f"layers.{layer}.attn.indexer"
        source = config.index_k_source(layer)
        if source is None:
            raise ValueError(f"layer {layer} is an index source but attends to no compressed keys")
        heads = self._quantised_linear(f"{name}.wq_b", queries_latent).unflatten(
            -1, (config.index_n_heads, -1)
        )
        queries = _value(_mxfp4(_rotate(heads, positions, rotary_frequencies(config, compressed=True))))
        weights = self._bf16_linear(f"{name}.weights_proj", y)
        score = torch.cat(
            [
                _bf16((w[:, None] @ (q @ shared.index[source].T).relu())[:, 0])
                for q, w in zip(queries.split(_ROWS), weights.split(_ROWS), strict=True)
            ]
        )
        lengths = (positions + 1) // config.compress_ratios[layer]
        valid = torch.arange(score.shape[1], device=self.device) < lengths[:, None]
        first = config.candidate_source_layer_id
        if first is not None and layer > first and shared.candidates is not None:
            # The last column gathers the -1s.
            blocks = torch.zeros(
                len(y),
                score.shape[1] // config.candidate_block_size + 2,
                dtype=torch.bool,
                device=self.device,
            )
            blocks.scatter_(1, shared.candidates.remainder(blocks.shape[1]), True)
            valid &= blocks[:, :-1].repeat_interleave(config.candidate_block_size, 1)[:, : score.shape[1]]
        shared.selected = _largest(score, valid, config.index_topk)
        trace[f"layers.{layer}.selected"] = shared.selected
        if layer == first:
            shared.candidates = self._candidates(score, valid, lengths)
            trace[f"layers.{layer}.candidates"] = shared.candidates

    def _candidates(self, score: torch.Tensor, valid: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Blocks that later index sources may choose from: the newest, then those with the best entry."""
        size = self.config.candidate_block_size
        missing = -score.shape[1] % size
        score = torch.nn.functional.pad(score.masked_fill(~valid, -math.inf), (0, missing), value=-math.inf)
        best = score.unflatten(-1, (-1, size)).amax(-1)
        blocks = torch.arange(best.shape[1], device=score.device)
        newest = (lengths - 1).div(size, rounding_mode="floor")
        best[blocks == newest[:, None]] = math.inf
        return _largest(best, blocks <= newest[:, None], self.config.candidate_topk_blocks)

    # -- Experts --

    def _experts(
        self, name: str, y: torch.Tensor, image: torch.Tensor, topk: int, trace: Trace
    ) -> torch.Tensor:
        """The chosen experts and the shared one, ``[n, d]`` to ``[n, d]``."""
        name = f"{name}.ffn"
        bias = torch.where(image[:, None], self._raw(f"{name}.gate.bias_vl"), self._raw(f"{name}.gate.bias"))
        ids, weights = gate(self._linear(f"{name}.gate", y), bias, topk, self.config.routed_scaling_factor)
        trace[f"{name.removesuffix('.ffn')}.experts"] = ids
        total = self._expert(f"{name}.shared_experts", y, torch.ones_like(y[:, 0]))
        for expert in ids.unique().tolist():
            rows, place = (ids == expert).nonzero(as_tuple=True)
            total[rows] += self._expert(f"{name}.experts.{expert}", y[rows], weights[rows, place])
        return _bf16(total)

    def _expert(self, name: str, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        limit = self.config.swiglu_limit
        opened = torch.nn.functional.silu(self._quantised_linear(f"{name}.w1", y).clamp(max=limit))
        up = self._quantised_linear(f"{name}.w3", y).clamp(-limit, limit)
        return self._quantised_linear(f"{name}.w2", _fp32(opened * up * weight[:, None]))

    # -- Drafting --

    def _draft_states(self, taps: torch.Tensor, golden: int, depth: int) -> torch.Tensor:
        """States ``[depth, d]`` of the block after ``golden``, before the last norm.

        The block's rows see the window of the last token of the backbone, and all of the block.
        """
        config = self.config
        known, window = len(taps), config.sliding_window
        context = self._norm("mtp.0.main_norm", self._quantised_linear("mtp.0.main_proj", taps))[-window:]
        context_positions = torch.arange(known, device=self.device)[-window:]
        positions = torch.arange(known, known + depth, device=self.device)
        frequencies = rotary_frequencies(config, compressed=False)
        tokens = torch.full((depth,), config.dspark_noise_token_id, device=self.device)
        tokens[0] = golden
        streams = self._raw("embed.weight", tokens)[:, None].repeat(1, config.hc_mult, 1)
        pre = self._first_stream(depth)
        for layer in range(config.num_nextn_predict_layers):
            name = f"mtp.{layer}"
            y, next_pre, post, comb = self._enter(name, "attn", streams, pre)
            latent = self._norm(f"{name}.attn.q_norm", self._quantised_linear(f"{name}.attn.wq_a", y))
            keys = torch.cat(
                [
                    _value(self._window_keys(f"{name}.attn", context, context_positions, frequencies)),
                    _value(self._window_keys(f"{name}.attn", y, positions, frequencies)),
                ]
            )
            output = self._attend(
                self._queries(f"{name}.attn", latent, positions, frequencies),
                keys,
                torch.arange(len(keys), device=self.device).expand(depth, -1),
                self._raw(f"{name}.attn.attn_sink"),
            )
            x = self._attention_output(f"{name}.attn", output, positions, frequencies)
            streams = _merge(x, streams, post, comb)
            y, pre, post, comb = self._enter(name, "ffn", streams, next_pre)
            text = torch.zeros(depth, dtype=torch.bool, device=self.device)
            x = self._experts(name, y, text, config.dspark_num_experts_per_tok, {})
            streams = _merge(x, streams, post, comb)
        return _collapse(streams, pre)
