"""The model run without an engine: batches, paged caches, DSpark at any depth. It is written to be read.

A step computes the pending tokens of every running request and, behind the last of them, its drafts; the
drafts are judged by the logits of their own rows, and the next ones are drafted at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepinfer_plugins.core.target import Want
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.caches import cache_specs
from deepinfer_plugins.model.checkpoint import Checkpoint
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.loading import load
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.model.step import NO_TOKEN, Caches, Paged, Step
from deepinfer_plugins.platforms.chip import Chip
from deepinfer_plugins.platforms.cpu import CPU

MAX_DEPTH = 8
# Prompt rows of one step: enough that what a step costs whatever its size no longer counts.
PROMPT_ROWS = 512


@dataclass(frozen=True, slots=True)
class Verification:
    """What became of one request's drafts in one step.

    Args:
        confidence_logits: The draft's, one for each of its tokens.
        verified: How many of them were judged: all, or those up to the end of the text.
        accepted: How many of those were accepted, from the first on.
        whole: Whether the text went on behind them.
    """

    confidence_logits: tuple[float, ...]
    verified: int
    accepted: int
    whole: bool


@dataclass(slots=True)
class Generated:
    """What a prompt became."""

    token_ids: list[int] = field(default_factory=list)
    verifications: list[Verification] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Request:
    """A running request.

    Args:
        slot: Its place in the caches.
        tokens: The prompt and what was generated.
        goal: How long it may become.
        computed: Tokens whose keys are in the caches.
        drafts: Tokens to verify behind the last one.
        confidence_logits: Of the drafts.
    """

    slot: int
    tokens: list[int]
    goal: int
    result: Generated
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    confidence_logits: list[float] = field(default_factory=list)


class ReferenceEngine:
    """Runs a checkpoint.

    Args:
        folder: The checkpoint.
        chip: What it runs on.
        max_positions: Tokens of a sequence, at most; there is a page of that size for each request.
        max_requests: Requests that run at once.
        progress: Whether to show a bar while weights are read.

    Raises:
        ValueError: The checkpoint is not one that the model can run; the message says why.
    """

    def __init__(
        self,
        folder: Path,
        chip: type[Chip] = CPU,
        max_positions: int = 1024,
        max_requests: int = 8,
        progress: bool = False,
    ) -> None:
        checkpoint = Checkpoint.open(folder)
        self.config = checkpoint.config
        self.device = torch.device(chip.torch_device)
        self.max_positions, self.max_requests = max_positions, max_requests
        self.model = DeepseekV41(
            self.config,
            load_ops(Want(chip.arch)),
            device=self.device,
            # Drafts lie beyond the last token.
            max_positions=max_positions + MAX_DEPTH,
            vocabulary=CompressedVocabulary.from_folder(folder, self.config.vocab_size),
            draft=self.config.num_nextn_predict_layers > 0,
        )
        load(self.model, checkpoint, progress)
        self._pages = {
            (spec.kind, spec.layer): torch.zeros(
                max_requests,
                -(-(max_positions + MAX_DEPTH) // spec.ratio),
                spec.record_bytes,
                dtype=torch.uint8,
                device=self.device,
            )
            for spec in cache_specs(self.config, draft=self.model.draft_model is not None)
        }

    # -- What callers use --

    def log_probabilities(
        self, sequences: Sequence[Sequence[int]], on_tokens: Callable[[int], None] = lambda count: None
    ) -> list[torch.Tensor]:
        """Natural logarithms of the probability of every token but the first, given those before it.

        Args:
            sequences: Each at most ``max_positions`` long.
            on_tokens: Told how many more tokens are done.

        Returns:
            Of each sequence, fp64 ``[n - 1]``, on the CPU.
        """
        found = []
        for sequence in sequences:
            request = _Request(0, list(sequence), self._checked(sequence, 0), Generated())
            hidden = []
            while request.computed < len(request.tokens):
                rows = request.tokens[request.computed :][:PROMPT_ROWS]
                hidden.append(self._forward([(request, rows)], depth=0))
                request.computed += len(rows)
                on_tokens(len(rows))
            logits = self.model.logits(torch.cat(hidden)[:-1]).double()
            after = torch.tensor(request.tokens[1:], device=self.device)
            found.append(logits.log_softmax(-1).gather(1, after[:, None])[:, 0].cpu())
        return found

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        depth: int = 0,
        stop: Sequence[int] = (),
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> list[Generated]:
        """Continue every prompt greedily; the tokens do not depend on ``depth``.

        Args:
            prompts: At least one token each. As many run at once as there is room for.
            max_tokens: New tokens for each.
            depth: Drafts per step, 0 to 8; 0 drafts nothing.
            stop: Tokens that end a text; they belong to it.
            on_tokens: Told how many more tokens are there.
        """
        if not 0 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth is {depth}; it must be 0 to {MAX_DEPTH}")
        if depth and self.model.draft_model is None:
            raise ValueError(f"depth is {depth}, but the checkpoint has no draft layers")
        results = [Generated() for _ in prompts]
        waiting = deque(
            (list(prompt), self._checked(prompt, max_tokens), result)
            for prompt, result in zip(prompts, results, strict=True)
        )
        free = list(range(self.max_requests))
        running: list[_Request] = []
        while waiting or running:
            while waiting and free:
                running.append(_Request(free.pop(), *waiting.popleft()))
            before = sum(len(request.tokens) for request in running)
            self._step(running, depth, frozenset(stop))
            on_tokens(sum(len(request.tokens) for request in running) - before)
            free += [request.slot for request in running if _ended(request, stop)]
            running = [request for request in running if not _ended(request, stop)]
        return results

    # -- A step --

    def _step(self, running: Sequence[_Request], depth: int, stop: frozenset[int]) -> None:
        """Compute some tokens of every request, and choose new ones where all are computed."""
        plan: list[tuple[_Request, list[int]]] = []
        room = PROMPT_ROWS
        for request in running:
            rows = request.tokens[request.computed :]
            if len(rows) > 1:
                rows = rows[:room]
                room -= len(rows)
            if rows:
                plan.append((request, rows + request.drafts))
        hidden = self._forward(plan, depth)
        chosen: list[_Request] = []
        start = 0
        for request, rows in plan:
            end = start + len(rows)
            request.computed += len(rows) - len(request.drafts)
            if request.computed == len(request.tokens):
                logits = self.model.logits(hidden[end - len(request.drafts) - 1 : end])
                self._choose(request, logits, stop)
                chosen.append(request)
            start = end
        going_on = [request for request in chosen if not _ended(request, stop)]
        if depth and going_on:
            self._draft(going_on, depth)

    def _forward(self, plan: Sequence[tuple[_Request, Sequence[int]]], depth: int) -> torch.Tensor:
        """Hidden states of the requests' next rows, ``[num_rows, hidden]``, whose keys are then in the caches."""
        tokens: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        contexts: list[list[int]] = []
        width = self.config.engram_max_ngram_size - 1
        for owner, (request, rows) in enumerate(plan):
            first = request.computed
            tokens += rows
            positions += range(first, first + len(rows))
            owners += [owner] * len(rows)
            before = request.tokens[max(0, first - width) : first][::-1]
            contexts.append(before + [NO_TOKEN] * (width - len(before)))
        step = Step(
            self._ints(tokens), self._ints(positions), self._ints(owners), context_ids=self._ints(contexts)
        )
        return self.model(step, self._caches([request for request, _ in plan], with_draft=depth > 0))

    def _choose(self, request: _Request, logits: torch.Tensor, stop: frozenset[int]) -> None:
        """Judge the request's drafts and append what they and the row behind them became.

        Args:
            request: All its tokens are computed, and its drafts.
            logits: Of its last token and its drafts.
        """
        tokens = logits.argmax(-1).tolist()
        drafts = request.drafts
        accepted = next((i for i, (d, t) in enumerate(zip(drafts, tokens)) if d != t), len(drafts))
        new = tokens[: accepted + 1]
        kept = next((i for i, token in enumerate(new, 1) if token in stop), len(new))
        kept = min(kept, request.goal - len(request.tokens))
        if drafts:
            whole = kept == len(new)
            verified = len(drafts) if whole else kept
            logged = tuple(request.confidence_logits)
            request.result.verifications.append(
                Verification(logged, verified, min(accepted, verified), whole)
            )
        request.computed += accepted
        request.tokens += new[:kept]
        request.result.token_ids += new[:kept]
        request.drafts, request.confidence_logits = [], []

    def _draft(self, requests: Sequence[_Request], depth: int) -> None:
        """Draft behind each request's last token."""
        step = Step(
            self._ints([request.tokens[-1] for request in requests]),
            self._ints([request.computed for request in requests]),
            torch.arange(len(requests), device=self.device),
            # Drafting reads no n-grams.
            torch.empty(len(requests), 0, dtype=torch.int64, device=self.device),
        )
        caches = self._caches(requests, with_draft=True)
        drafted = self.model.draft(step, caches, depth, lambda logits, _: logits.argmax(-1))
        for request, tokens, confidence in zip(
            requests, drafted.tokens.tolist(), drafted.confidence_logits.tolist(), strict=True
        ):
            request.drafts, request.confidence_logits = tokens, confidence

    # -- Tensors --

    def _checked(self, prompt: Sequence[int], max_tokens: int) -> int:
        """The length that a sequence may reach."""
        goal = len(prompt) + max_tokens
        if not prompt or goal > self.max_positions:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_tokens} new ones: there must be a prompt, and no more "
                f"than {self.max_positions} tokens in all"
            )
        return goal

    def _ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _caches(self, requests: Sequence[_Request], with_draft: bool) -> Caches:
        table = self._ints([[request.slot] for request in requests])
        caches: dict[str, dict[int, Paged]] = {kind: {} for kind in Caches.__dataclass_fields__}
        for (kind, layer), pages in self._pages.items():
            if with_draft or kind != "draft":
                caches[kind][layer] = Paged(pages, table)
        return Caches(**caches)


def _ended(request: _Request, stop: Sequence[int] | frozenset[int]) -> bool:
    """Whether nothing more is generated for the request."""
    generated = request.result.token_ids
    return len(request.tokens) >= request.goal or bool(generated and generated[-1] in stop)
