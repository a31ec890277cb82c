"""Position-keyed sampling: a token is a function of its logits, the request's parameters, seed and position.

The order is the same for every row: logit bias, allowed tokens, tokens barred before ``min_tokens``, bad words,
penalties, grammar mask; then temperature, min-p, top-k, top-p; then the highest ``logit / temperature + gumbel``,
ties to the lower id. Whatever looks at the tokens before a row sees the row's own draft prefix, so that a position
gets the same token whether or not it was speculated on. The noise is documented in ``kernels/noise.py``, the filters
in ``kernels/filtering.py``.

Nothing here waits for the device, and a feature that no request uses costs nothing: which are used is known from
``add``, and which requests a step is of from ``attend``.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol

import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.kernels import catalogue, noise

Verify = Literal["coupling", "rejection"]

# A temperature below it samples greedily, in both engines.
GREEDY_BELOW = 1e-5
# A coupled draft divides its temperature by this. A draft is flatter than its target, as it averages over what it does
# not know, so what noise picks from its tail is seldom the target's token. Any value is lossless; what is kept with
# which: benchmarks/draft_coupling.py.
DRAFT_SHARPENING = 1.15
# A padding row: greedy, without any feature.
NO_SLOT = -1
_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled, in no engine's words.

    Args:
        seed: 64 bits, signed or not. Where a request has none: :func:`fresh_seed`, and the output reports it.
        temperature: 0: greedy.
        top_k: Entries kept; 0: all.
        top_p: Probability kept; 1: all.
        min_p: Least probability kept, relative to the most probable entry's; 0: all.
        repetition_penalty: Divides positive logits, multiplies negative ones, of tokens of prompt and output; 1: off.
        presence_penalty: Taken once from the logits of tokens of the output.
        frequency_penalty: Taken from them once for each time that the token occurs in the output.
        logit_bias: Added to the logits of these tokens.
        allowed_token_ids: All that may be sampled; None: everything.
        bad_words: Token sequences that the output must not contain.
        min_tokens: Outputs before which ``suppressed`` are barred.
        suppressed: Tokens that end a request.
        verify: How its drafts are verified.

    Raises:
        ValueError: If a value is out of range.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    suppressed: Sequence[int] = ()
    verify: Verify = "coupling"

    def __post_init__(self) -> None:
        bounds = [
            ("seed", -_SEEDS // 2 <= self.seed < _SEEDS, "64 bits"),
            ("temperature", 0 <= self.temperature < math.inf, "finite and at least 0"),
            ("top_k", self.top_k >= 0, "at least 0, 0 for off"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "finite and above 0"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "finite"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "finite"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("verify", self.verify in ("coupling", "rejection"), "coupling or rejection"),
        ]
        for name, holds, supported in bounds:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {supported}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def fresh_seed() -> int:
    """A random seed for a request that has none: 63 bits, so that every engine takes it back as a seed."""
    return secrets.randbits(63)


def child_seed(seed: int, index: int) -> int:
    """The seed of the ``index``-th of ``n`` parallel samples: ``seed + index``, as vLLM numbers them."""
    return (seed + index) % _SEEDS


def signed_seed(seed: int) -> int:
    """A seed's 64 bits as engines hold them: a signed number."""
    return (seed + _SEEDS // 2) % _SEEDS - _SEEDS // 2


def choose_verify(setting: str, seeded: bool, invariant: bool) -> Verify:
    """How a request's drafts are verified.

    Args:
        setting: ``DEEPINFER_PLUGINS_VERIFY``. ``auto``: by coupling if the request has a seed or results must not
            depend on the batch, else by rejection, which accepts more when sampling is hot.
        seeded: Whether the request came with a seed.
        invariant: Whether batch invariance is on.

    Raises:
        ValueError: If the setting is not ``auto``, ``coupling`` or ``rejection``.
    """
    if setting == "coupling" or (setting == "auto" and (seeded or invariant)):
        return "coupling"
    if setting in ("auto", "rejection"):
        return "rejection"
    raise ValueError(f"DEEPINFER_PLUGINS_VERIFY={setting!r}: supported are auto, coupling, rejection")


class Rows(NamedTuple):
    """The rows of a step; each is one distribution to sample from.

    Args:
        slot: ``[n]``, int64: which request's; ``NO_SLOT`` for padding.
        position: ``[n]``, int64: absolute position of the token to be chosen.
        prefix: ``[n, depth]``, int64: the tokens between the request's committed ones and this row, its drafts,
            padded with -1 at the end; the width may be 0.
        bitmask: ``[n, ceil(vocab_size / 32)]``, int32, or None: what a grammar allows, bit ``v mod 32`` of word ``v
            div 32``.
    """

    slot: torch.Tensor
    position: torch.Tensor
    prefix: torch.Tensor
    bitmask: torch.Tensor | None = None


class Sampled(NamedTuple):
    """Tokens, and what they were sampled from.

    Args:
        tokens: ``[n]``, int64.
        logits: ``[n, vocab_size]``, fp32: processed, before temperature and filters. The rows' own where nothing was
            to do.
    """

    tokens: torch.Tensor
    logits: torch.Tensor


class DraftRecord(NamedTuple):
    """What the drafts of each slot were sampled from; all that rejection needs of them.

    Args:
        position: ``[num_slots + 1, depth]``, int64: the draft's position; -1: none.
        tokens: ``[num_slots + 1, depth]``, int64.
        log_probs: ``[num_slots + 1, depth, vocab_size]``, fp32, after the filters.
    """

    position: torch.Tensor
    tokens: torch.Tensor
    log_probs: torch.Tensor


class SamplingOps(Protocol):
    """The operators used here; those of ``catalogue.Ops`` are such."""

    @property
    def sample(self) -> Callable[..., torch.Tensor]: ...
    @property
    def filter_log_probs(self) -> Callable[..., torch.Tensor]: ...
    @property
    def accept_or_resample(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class _DefaultOps:
    sample: Any
    filter_log_probs: Any
    accept_or_resample: Any


def _default_ops() -> SamplingOps:
    """The providers that run on every device."""
    chosen = catalogue.choices(Want(Arch.CPU))
    return _DefaultOps(**{field.name: chosen[field.name].load() for field in fields(_DefaultOps)})


# Rows of the tables of parameters, which have a column for each slot: so what is taken of some slots is contiguous.
_TEMPERATURE, _MIN_P, _TOP_P, _REPETITION, _PRESENCE, _FREQUENCY = range(6)
_SEED, _TOP_K, _REJECTION, _MIN_POSITION = range(4)
_NEUTRAL_FLOATS = (0.0, 0.0, 1.0, 1.0, 0.0, 0.0)
_NEUTRAL_INTS = (0, 0, 0, 0)


class SamplingState:
    """What sampling keeps of each request, on the device, by slot.

    Tables as wide as the vocabulary exist from the first request on that uses them.

    Args:
        num_slots: Requests at a time.
        vocab_size: Entries of a row of logits.
        device: Where logits are.
        ops: Operators to use; None: those that run everywhere.
        draft_sharpening: What a coupled draft's temperature is divided by. It alters which drafts are kept, never a
            token.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device | str,
        ops: SamplingOps | None = None,
        draft_sharpening: float = DRAFT_SHARPENING,
    ) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.ops = ops or _default_ops()
        # On the device: by a number of the host's, a GPU would divide in another way than a CPU.
        self._sharpening = torch.tensor(draft_sharpening, dtype=torch.float64, device=self.device)
        # One column more than there are slots: padding rows find neutral parameters there.
        self._floats = self._table(_NEUTRAL_FLOATS, torch.float64)
        self._ints = self._table(_NEUTRAL_INTS, torch.int64)
        # What the request of each slot uses; which slots count, None for all; and what those use, None if not known.
        self._uses: dict[int, frozenset[str]] = {}
        self._attended: frozenset[int] | None = None
        self._used: frozenset[str] | None = None
        self._bias: torch.Tensor | None = None
        self._suppressed: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._bad_words = torch.full((num_slots + 1, 0, 0), -1, device=self.device)
        # The last outputs of each slot, as many as a bad word has tokens but its last; -1 before the first.
        self._tail = torch.full((num_slots + 1, 0), -1, device=self.device)
        self._record: DraftRecord | None = None

    def _table(self, row: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        column = torch.tensor(row, dtype=dtype, device=self.device)
        return column[:, None].repeat(1, self.num_slots + 1)

    def _wide(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.num_slots + 1, self.vocab_size, dtype=dtype, device=self.device)

    def _send(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    def attend(self, slots: Iterable[int]) -> None:
        """From now on only these slots' requests are sampled; what others use, finished ones too, costs nothing.

        Without a call to it, those of all slots are.
        """
        self._attended, self._used = frozenset(slots), None

    def features(self) -> frozenset[str]:
        """What the requests use that are sampled, as :meth:`uses` names it."""
        if self._used is None:
            slots = self._uses if self._attended is None else self._attended & self._uses.keys()
            self._used = frozenset().union(*(self._uses[slot] for slot in slots))
        return self._used

    @contextmanager
    def assuming(self, features: frozenset[str]) -> Iterator[None]:
        """Compute what requests with these features would need, as when a graph is captured that is to serve them.

        A request without a feature has the value that is neutral to it, so its tokens are what they are without.
        """
        self._used = features
        try:
            yield
        finally:
            self._used = None

    def uses(self, feature: str) -> bool:
        """Whether a request that is sampled uses ``feature``."""
        return feature in self.features()

    def add(
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> None:
        """Give a slot to a request; nothing of its former owner is left.

        Args:
            slot: From 0 on, below ``num_slots``.
            params: The request's.
            prompt: Its prompt.
            output: What it has generated already, as when it resumes after a preemption.

        Raises:
            ValueError: If a token id or the slot is out of range.
        """
        self._check(slot, params)
        used = _features(params)
        self._uses[slot], self._used = used, None
        temperature = 0.0 if params.greedy else params.temperature
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        floats = (temperature, params.min_p, params.top_p, *penalties)
        min_position = len(prompt) + params.min_tokens
        ints = (
            signed_seed(params.seed),
            min(params.top_k, self.vocab_size),
            int("rejection" in used),
            min_position,
        )
        self._floats[:, slot] = self._send(floats, torch.float64)
        self._ints[:, slot] = self._send(ints)
        self._set_bias(slot, params)
        self._set_suppressed(slot, params)
        self._set_counts(slot, "penalties" in used, prompt, output)
        self._set_bad_words(slot, params.bad_words, output)
        if self._record is not None:
            self._record.position[slot] = -1

    def remove(self, slot: int) -> None:
        """Forget which features the slot uses. Not needed for correctness; it saves work until the slot is reused."""
        self._uses.pop(slot, None)
        self._used = None

    def _check(self, slot: int, params: SamplingParams) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot}: there are {self.num_slots}, from 0 on")
        named = {
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "suppressed": params.suppressed,
            "bad_words": [token for word in params.bad_words for token in word],
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name}: token {token} is not in the vocabulary of {self.vocab_size}")
        if params.allowed_token_ids is not None and not params.allowed_token_ids:
            raise ValueError(
                "allowed_token_ids: empty, so nothing could be sampled; leave it out for everything"
            )

    def _set_bias(self, slot: int, params: SamplingParams) -> None:
        if not params.logit_bias and params.allowed_token_ids is None:
            if self._bias is not None:
                self._bias[slot].zero_()
            return
        if self._bias is None:
            self._bias = self._wide(torch.float32)
        row = torch.zeros(self.vocab_size)
        for token, bias in params.logit_bias.items():
            row[token] = bias
        if params.allowed_token_ids is not None:
            allowed = torch.zeros(self.vocab_size, dtype=torch.bool)
            allowed[torch.tensor(params.allowed_token_ids)] = True
            row[~allowed] = -math.inf
        self._bias[slot] = row.to(self.device, non_blocking=True)

    def _set_suppressed(self, slot: int, params: SamplingParams) -> None:
        if self._suppressed is not None:
            self._suppressed[slot].zero_()
        if params.min_tokens and params.suppressed:
            if self._suppressed is None:
                self._suppressed = self._wide(torch.bool)
            self._suppressed[slot, self._send(params.suppressed)] = True

    def _set_counts(self, slot: int, used: bool, prompt: Sequence[int], output: Sequence[int]) -> None:
        if self._counts is None:
            if not used:
                return
            self._counts, self._in_prompt = self._wide(torch.int32), self._wide(torch.bool)
        assert self._in_prompt is not None
        self._counts[slot].zero_()
        self._in_prompt[slot].zero_()
        if used:
            self._in_prompt[slot, self._send(prompt)] = True
            # Counted here: on a GPU, counting would wait for it.
            counts = torch.tensor(output, dtype=torch.int64).bincount(minlength=self.vocab_size)
            self._counts[slot] = counts.int().to(self.device, non_blocking=True)

    def _set_bad_words(self, slot: int, words: Sequence[Sequence[int]], output: Sequence[int]) -> None:
        words = [word for word in words if word]
        longest = max(map(len, words), default=0)
        count, length = max(len(words), self._bad_words.shape[1]), max(longest, self._bad_words.shape[2])
        if (count, length) != self._bad_words.shape[1:]:
            # Words are aligned to their ends, so a longer row gets its padding in front.
            grown = self._bad_words.new_full((self.num_slots + 1, count, length), -1)
            grown[:, : self._bad_words.shape[1], length - self._bad_words.shape[2] :] = self._bad_words
            self._bad_words = grown
        if length and self._tail.shape[1] < length - 1:
            grown = self._tail.new_full((self.num_slots + 1, length - 1), -1)
            grown[:, length - 1 - self._tail.shape[1] :] = self._tail
            self._tail = grown
        if count:
            padded = [[-1] * (length - len(word)) + list(word) for word in words]
            padded += [[-1] * length] * (count - len(words))
            self._bad_words[slot] = self._send(padded)
        if width := self._tail.shape[1]:
            last = list(output[-width:])
            self._tail[slot] = self._send([-1] * (width - len(last)) + last)

    def commit(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append tokens to the outputs of their requests.

        Args:
            slots: ``[B]``, int64; no slot twice but ``NO_SLOT``.
            tokens: ``[B, w]``, int64, padded with -1 at the end.
        """
        if self._counts is not None and self.uses("penalties"):
            # A slot counts whether or not it has penalties: which slots do is not known without a look at the device.
            row = (slots % (self.num_slots + 1))[:, None] * self.vocab_size
            places = (row + tokens.clamp(min=0)).flatten()
            self._counts.view(-1).scatter_add_(0, places, (tokens >= 0).flatten().int())
        if width := self._tail.shape[1]:
            joined = torch.cat([self._tail[slots], tokens], dim=1)
            last = (tokens >= 0).sum(dim=1, keepdim=True) + torch.arange(width, device=self.device)
            self._tail[slots] = joined.gather(1, last)

    def sample(self, logits: torch.Tensor, rows: Rows) -> Sampled:
        """The model's own token of each row.

        Args:
            logits: ``[n, vocab_size]``, fp32.
            rows: The same rows.
        """
        processed = self.process(logits, rows)
        return Sampled(self.choose(processed, rows.slot, rows.position), processed)

    def choose(self, processed: torch.Tensor, slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 ``[n]``, from processed logits, with the noise that is the model's own."""
        if not self.uses("noise"):
            return self._choose_greedily(processed, position)
        seed = self.seeds(slot)
        stream = torch.full_like(seed, noise.TARGET)
        return self.ops.sample(processed, *self.filters(slot), seed, position, stream)

    def _choose_greedily(self, processed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Without noise, whose seed and stream may then be anything."""
        return self.ops.sample(processed, None, None, None, None, position, position, position)

    def filters(
        self, slot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Temperature, min-p, top-k and top-p of each row, as the operators want them."""
        temperature, min_p, top_p = self._floats[: _TOP_P + 1, slot]
        return (
            temperature,
            min_p if self.uses("min_p") else None,
            self._ints[_TOP_K, slot] if self.uses("top_k") else None,
            top_p if self.uses("top_p") else None,
        )

    def seeds(self, slot: torch.Tensor) -> torch.Tensor:
        """Seeds, int64 ``[n]``."""
        return self._ints[_SEED, slot]

    def by_rejection(self, slot: torch.Tensor) -> torch.Tensor:
        """Whether a row's drafts are verified by rejection, bool ``[n]``."""
        return self._ints[_REJECTION, slot] == 1

    def log_probs(self, processed: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """What rows are sampled from, as fp32 log-probabilities after temperature and filters.

        Args:
            processed: ``[n, vocab_size]``, fp32: :attr:`Sampled.logits`.
            slot: ``[n]``, int64.

        Returns:
            ``[n, vocab_size]``, fp32; -inf for what was removed.
        """
        return self.ops.filter_log_probs(processed, *self.filters(slot))

    def process(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Logits after bias, allowed tokens, barred tokens, bad words, penalties and grammar, before temperature.

        Args:
            logits: ``[n, vocab_size]``, fp32; not written to.
            rows: The same rows.

        Returns:
            ``[n, vocab_size]``, fp32; ``logits`` itself if no request uses any of this.
        """
        slot = rows.slot
        if self._bias is not None and self.uses("bias"):
            logits = logits + self._bias[slot]
        if self._suppressed is not None and self.uses("min_tokens"):
            early = rows.position < self._ints[_MIN_POSITION, slot]
            logits = logits.masked_fill(self._suppressed[slot] & early[:, None], -math.inf)
        if self.uses("bad_words"):
            logits = self._bar_bad_words(logits, rows)
        if self._counts is not None and self.uses("penalties"):
            logits = self._penalize(logits, rows)
        if rows.bitmask is not None:
            bits = torch.arange(32, device=logits.device, dtype=torch.int32)
            allowed = (rows.bitmask[:, :, None] >> bits & 1).flatten(1)[:, : self.vocab_size]
            logits = logits.masked_fill(allowed == 0, -math.inf)
        return logits

    def _bar_bad_words(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        words = self._bad_words[rows.slot]
        start, last = words[:, :, :-1], words[:, :, -1]
        joined = torch.cat([self._tail[rows.slot], rows.prefix], dim=1)
        drafts = (rows.prefix >= 0).sum(dim=1, keepdim=True)
        history = joined.gather(1, drafts + torch.arange(start.shape[2], device=self.device))
        follows = ((start == history[:, None]) | (start < 0)).all(dim=2) & (last >= 0)
        bar = torch.where(follows, -math.inf, math.inf).to(logits.dtype)
        return logits.scatter_reduce(1, last.clamp(min=0), bar, "amin")

    def _penalize(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        assert self._counts is not None and self._in_prompt is not None
        drafts = rows.prefix >= 0
        counts = self._counts[rows.slot].scatter_add_(1, rows.prefix.clamp(min=0), drafts.int())
        in_output = counts > 0
        # Neutral values leave the bits of a row as they are, so rows without penalties need no selection.
        repetition, presence, frequency = self._floats[_REPETITION:, rows.slot, None].float()
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(in_output | self._in_prompt[rows.slot], scaled, logits)
        logits = logits - frequency * counts
        return logits - presence * in_output

    def draft_sampler(self, slots: torch.Tensor, first_position: torch.Tensor) -> DraftSampler:
        """What samples the drafts of a block; the ``sample`` argument of the model's ``draft``. After ``commit``.

        Args:
            slots: ``[B]``, int64.
            first_position: ``[B]``, int64: the position of each request's first draft.
        """
        return DraftSampler(self, slots, first_position)

    @property
    def record(self) -> DraftRecord | None:
        """What the slots' last drafts were sampled from; None if no request is verified by rejection."""
        return self._record if self.uses("rejection") else None

    def choose_draft(
        self, processed: torch.Tensor, slots: torch.Tensor, position: torch.Tensor, index: int
    ) -> torch.Tensor:
        """Draft ``index`` of each slot, int64 ``[B]``, from processed logits; recorded where rejection needs it."""
        if not self.uses("noise"):
            return self._choose_greedily(processed, position)
        seeds = self.seeds(slots)
        stream = torch.full_like(seeds, noise.TARGET)
        temperature, *filters = self.filters(slots)
        sharpened = temperature / self._sharpening
        if not self.uses("rejection"):
            return self.ops.sample(processed, sharpened, *filters, seeds, position, stream)
        by_rejection = self.by_rejection(slots)
        stream = torch.where(by_rejection, noise.DRAFT, stream)
        temperature = torch.where(by_rejection, temperature, sharpened)
        tokens = self.ops.sample(processed, temperature, *filters, seeds, position, stream)
        log_probs = self.ops.filter_log_probs(processed, temperature, *filters)
        self._keep_draft(slots, index, position, tokens, log_probs)
        return tokens

    def _keep_draft(
        self,
        slots: torch.Tensor,
        index: int,
        position: torch.Tensor,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
    ) -> None:
        """Record draft ``index`` of each slot."""
        record = self.reserve_record(index + 1)
        record.position[slots, index] = position
        record.tokens[slots, index] = tokens
        record.log_probs[slots, index] = log_probs

    @staticmethod
    def record_bytes(num_slots: int, depth: int, vocab_size: int) -> int:
        """How much memory the distributions take that :meth:`reserve_record` makes room for."""
        return (num_slots + 1) * depth * vocab_size * torch.float32.itemsize

    def reserve_record(self, depth: int) -> DraftRecord:
        """Room for what ``depth`` drafts of each slot are sampled from: it stays where it is until more is needed."""
        old = self._record
        if old is not None and old.tokens.shape[1] >= depth:
            return old
        shape = (self.num_slots + 1, depth)
        new = DraftRecord(
            torch.full(shape, -1, device=self.device),
            torch.full(shape, -1, device=self.device),
            torch.zeros(*shape, self.vocab_size, device=self.device),
        )
        if old is not None:
            for table, known in zip(new, old, strict=True):
                table[:, : known.shape[1]] = known
        self._record = new
        return new


class DraftSampler:
    """Samples a block's drafts one after another, each after those before it.

    A request that is verified by coupling gets the target's noise, so that draft and target agree as often as their
    distributions allow, and a sharper temperature. One that is verified by rejection gets noise of its own, and its
    distributions are kept in the state.
    """

    def __init__(self, state: SamplingState, slots: torch.Tensor, first_position: torch.Tensor) -> None:
        self._state = state
        self._slots = slots
        self._first_position = first_position
        self._drafts: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, index: int) -> torch.Tensor:
        """Sample draft ``index`` of each request.

        Args:
            logits: ``[B, vocab_size]``, fp32.
            index: From 0 on, rising by one.

        Returns:
            ``[B]``, int64.
        """
        state, slots = self._state, self._slots
        if index != len(self._drafts):
            raise ValueError(f"draft {index} is out of turn: {len(self._drafts)} were sampled")
        prefix = torch.stack(self._drafts, dim=1) if index else slots.new_empty(len(slots), 0)
        position = self._first_position + index
        processed = state.process(logits, Rows(slots, position, prefix))
        tokens = state.choose_draft(processed, slots, position, index)
        self._drafts.append(tokens)
        return tokens


def _features(params: SamplingParams) -> frozenset[str]:
    """What the request uses, as far as it costs something."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    used = {
        "bias": bool(params.logit_bias) or params.allowed_token_ids is not None,
        "min_tokens": bool(params.min_tokens and params.suppressed),
        "bad_words": any(params.bad_words),
        "penalties": penalties != (1.0, 0.0, 0.0),
        "noise": not params.greedy,
        "min_p": not params.greedy and params.min_p > 0,
        "top_k": not params.greedy and params.top_k > 0,
        "top_p": not params.greedy and params.top_p < 1,
        "rejection": not params.greedy and params.verify == "rejection",
    }
    return frozenset(name for name, is_used in used.items() if is_used)
