"""The model run without an engine: batches, paged caches, DSpark at any depth. It is written to be read.

A step computes the pending tokens of every running request and, behind the last of them, its drafts; the
drafts are judged by the logits of their own rows, and the next ones are drafted at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch

from deepinfer_plugins.core.target import Want
from deepinfer_plugins.features.sampling import Rows, SamplingParams, SamplingState
from deepinfer_plugins.features.verification import verify
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.caches import cache_specs
from deepinfer_plugins.model.loading import open_model
from deepinfer_plugins.model.step import NO_TOKEN, Caches, Paged, Step
from deepinfer_plugins.platforms.chip import Chip
from deepinfer_plugins.platforms.cpu import CPU

MAX_DEPTH = 8
# Prompt rows of one step, unless told: enough that what a step costs whatever its size no longer counts.
PROMPT_ROWS = 512
GREEDY = SamplingParams(seed=0, temperature=0)


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
    """What a prompt became.

    Args:
        token_ids: The new tokens.
        log_probs: Of each, natural, under the model's own logits, if asked for.
        verifications: Of its drafts.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
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
        prompt_rows: Rows of prompts in one step, at most.

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
        prompt_rows: int = PROMPT_ROWS,
    ) -> None:
        self.device = torch.device(chip.torch_device)
        self.max_positions, self.max_requests, self.prompt_rows = max_positions, max_requests, prompt_rows
        # Drafts lie beyond the last token.
        positions = max_positions + MAX_DEPTH
        self.model = open_model(folder, load_ops(Want(chip.arch)), self.device, positions, progress)
        self.config = self.model.config
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
            self._check(sequence, 0)
            request = _Request(0, list(sequence), len(sequence), Generated())
            hidden = []
            while request.computed < len(request.tokens):
                rows = request.tokens[request.computed :][: self.prompt_rows]
                hidden.append(self._forward([(request, rows)], with_draft=False))
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
        sampling: Sequence[SamplingParams] | None = None,
        stop: Sequence[int] = (),
        on_tokens: Callable[[int], None] = lambda count: None,
        log_probs: bool = False,
    ) -> list[Generated]:
        """Continue every prompt. The tokens do not depend on ``depth``, but where drafts are verified by rejection.

        Args:
            prompts: At least one token each. As many run at once as there is room for.
            max_tokens: New tokens for each.
            depth: Drafts per step, 0 to 8; 0 drafts nothing.
            sampling: How tokens are chosen, for each prompt; None: greedily.
            stop: Tokens that end a text; they belong to it.
            on_tokens: Told how many more tokens are there.
            log_probs: Whether to tell those of the new tokens.
        """
        if not 0 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth is {depth}; it must be 0 to {MAX_DEPTH}")
        if depth and self.model.draft_model is None:
            raise ValueError(f"depth is {depth}, but the checkpoint has no draft layers")
        for prompt in prompts:
            self._check(prompt, max_tokens)
        sampling = [GREEDY] * len(prompts) if sampling is None else sampling
        results = [Generated() for _ in prompts]
        waiting = deque(zip(prompts, sampling, results, strict=True))
        state = SamplingState(self.max_requests, self.config.vocab_size, self.device, self.model.ops)
        free = list(range(self.max_requests))
        running: list[_Request] = []
        while waiting or running:
            while waiting and free:
                prompt, params, result = waiting.popleft()
                request = _Request(free.pop(), list(prompt), len(prompt) + max_tokens, result)
                state.add(request.slot, params, prompt)
                running.append(request)
            before = sum(len(request.tokens) for request in running)
            self._step(running, state, depth, frozenset(stop), log_probs)
            on_tokens(sum(len(request.tokens) for request in running) - before)
            for request in running:
                if _ended(request, stop):
                    state.remove(request.slot)
                    free.append(request.slot)
            running = [request for request in running if not _ended(request, stop)]
        return results

    # -- A step --

    def _step(
        self,
        running: Sequence[_Request],
        state: SamplingState,
        depth: int,
        stop: frozenset[int],
        log_probs: bool,
    ) -> None:
        """Compute some tokens of every request, and choose new ones where all are computed."""
        plan: list[tuple[_Request, list[int]]] = []
        room = self.prompt_rows
        for request in running:
            rows = request.tokens[request.computed :]
            if len(rows) > 1:
                rows = rows[:room]
                room -= len(rows)
            if rows:
                plan.append((request, rows + request.drafts))
        hidden = self._forward(plan, with_draft=depth > 0)
        chosen: list[_Request] = []
        kept: list[torch.Tensor] = []
        end = 0
        for request, rows in plan:
            end += len(rows)
            request.computed += len(rows) - len(request.drafts)
            if request.computed == len(request.tokens):
                chosen.append(request)
                kept.append(hidden[end - len(request.drafts) - 1 : end])
        if not chosen:
            return
        self._choose(chosen, self.model.logits(torch.cat(kept)), state, depth, stop, log_probs)
        going_on = [request for request in chosen if not _ended(request, stop)]
        if depth and going_on:
            self._draft(going_on, state, depth)

    def _forward(self, plan: Sequence[tuple[_Request, Sequence[int]]], with_draft: bool) -> torch.Tensor:
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
        return self.model(step, self._caches([request for request, _ in plan], with_draft))

    def _choose(
        self,
        requests: Sequence[_Request],
        logits: torch.Tensor,
        state: SamplingState,
        depth: int,
        stop: frozenset[int],
        log_probs: bool,
    ) -> None:
        """Judge the requests' drafts and append what they and the rows behind them became.

        Args:
            requests: All their tokens are computed, and their drafts.
            logits: fp32 ``[num_rows, vocab]``, of the last token of each and its drafts.
            state: What sampling keeps of them.
            depth: Drafts of a request at most.
            stop: Tokens that end a text.
            log_probs: Whether to tell those of the new tokens.
        """
        rows = [(request, count) for request in requests for count in range(len(request.drafts) + 1)]
        offsets = [0, *accumulate(len(request.drafts) + 1 for request in requests)]
        judged = verify(
            state,
            logits,
            Rows(
                self._ints([request.slot for request, _ in rows]),
                self._ints([len(request.tokens) + count for request, count in rows]),
                self._ints([r.drafts[:count] + [NO_TOKEN] * (depth - count) for r, count in rows]),
            ),
            self._ints(offsets),
        )
        state.commit(self._ints([request.slot for request in requests]), judged.tokens)
        likely = logits.double().log_softmax(-1) if log_probs else None
        for first, request, tokens, accepted in zip(
            offsets[:-1], requests, judged.tokens.tolist(), judged.num_accepted.tolist(), strict=True
        ):
            new = tokens[: accepted + 1]
            kept = next((i for i, token in enumerate(new, 1) if token in stop), len(new))
            kept = min(kept, request.goal - len(request.tokens))
            if request.drafts:
                whole = kept == len(new)
                verified = len(request.drafts) if whole else kept
                logged = tuple(request.confidence_logits)
                record = Verification(logged, verified, min(accepted, verified), whole)
                request.result.verifications.append(record)
            request.computed += accepted
            request.tokens += new[:kept]
            request.result.token_ids += new[:kept]
            if likely is not None:
                after = self._ints(new[:kept])[:, None]
                request.result.log_probs += likely[first : first + kept].gather(1, after)[:, 0].tolist()
            request.drafts, request.confidence_logits = [], []

    def _draft(self, requests: Sequence[_Request], state: SamplingState, depth: int) -> None:
        """Draft behind each request's last token."""
        last = self._ints([request.computed for request in requests])
        step = Step(
            self._ints([request.tokens[-1] for request in requests]),
            last,
            torch.arange(len(requests), device=self.device),
            # Drafting reads no n-grams.
            torch.empty(len(requests), 0, dtype=torch.int64, device=self.device),
        )
        sample = state.draft_sampler(self._ints([request.slot for request in requests]), last + 1)
        drafted = self.model.draft(step, self._caches(requests, with_draft=True), depth, sample)
        for request, tokens, confidence in zip(
            requests, drafted.tokens.tolist(), drafted.confidence_logits.tolist(), strict=True
        ):
            request.drafts, request.confidence_logits = tokens, confidence

    # -- Tensors --

    def _check(self, prompt: Sequence[int], max_tokens: int) -> None:
        if not prompt or len(prompt) + max_tokens > self.max_positions:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_tokens} new ones: there must be a prompt, and no more "
                f"than {self.max_positions} tokens in all"
            )

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
