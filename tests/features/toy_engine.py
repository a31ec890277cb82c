"""A Markov chain for a model, and an engine around it that drafts, trims, preempts and moves requests at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from deepinfer_plugins.features.sampling import DRAFT_SHARPENING, Rows, SamplingParams, SamplingState
from deepinfer_plugins.features.verification import verify

VOCAB = 37


class Model:
    """Logits from the last two tokens, and a draft's that are near them.

    Args:
        seed: Of the tables.
        error: Standard deviation of what the draft's logits differ by.
    """

    def __init__(self, seed: int = 0, error: float = 0.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * 2
        self.draft_table = self.table + error * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)

    def logits(self, tokens: list[int], draft: bool = False) -> torch.Tensor:
        return (self.draft_table if draft else self.table)[tokens[-2], tokens[-1]]


def grammar_mask(tokens: list[int]) -> torch.Tensor:
    """A toy grammar: after an even token, only tokens that differ from it by less than 12."""
    words = torch.zeros((VOCAB + 31) // 32, dtype=torch.int64)
    for token in range(VOCAB):
        if tokens[-1] % 2 or abs(token - tokens[-1]) < 12:
            words[token // 32] |= 1 << token % 32
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@dataclass
class Request:
    params: SamplingParams
    prompt: list[int]
    length: int
    grammar: bool = False
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def done(self) -> bool:
        return len(self.output) >= self.length


@dataclass
class Counts:
    drafted: int = 0
    accepted: int = 0


def everything_allowed() -> torch.Tensor:
    return torch.full(((VOCAB + 31) // 32,), -1, dtype=torch.int32)


def generate(
    model: Model,
    requests: list[Request],
    depth: int,
    chaos: random.Random | None = None,
    replace_draft: Callable[[int, list[int]], list[int]] = lambda index, drafts: drafts,
    batch: int = 4,
    sharpening: float = DRAFT_SHARPENING,
) -> Counts:
    """Run all requests to their lengths, ``batch`` slots at a time.

    Args:
        model: The model.
        requests: Their outputs are extended.
        depth: Drafts per step; 0: none.
        chaos: Trims drafts, skips and preempts requests, and reuses slots in any order; None: none of it.
        replace_draft: From a request's index and its drafts to the drafts that are verified.
        batch: Number of slots.
        sharpening: Of drafts.
    """
    state = SamplingState(batch, VOCAB, "cpu", draft_sharpening=sharpening)
    waiting = list(range(len(requests)))
    running: dict[int, int] = {}
    drafts: dict[int, list[int]] = {}
    counts = Counts()
    while waiting or running:
        free = [slot for slot in range(batch) if slot not in running]
        if chaos:
            chaos.shuffle(free)
        for slot in free:
            if waiting:
                request = requests[waiting[0]]
                running[slot] = waiting.pop(0)
                state.add(slot, request.params, request.prompt, request.output)
        step = list(running.items())
        if chaos:
            chaos.shuffle(step)
            # One request may sit this step out, with its drafts.
            step = step[chaos.random() < 0.2 and len(step) > 1 :]
        slots, positions, prefixes, logits, masks, offsets = [], [], [], [], [], [0]
        for slot, index in step:
            request = requests[index]
            mine = replace_draft(index, drafts.get(slot, []))
            mine = mine[: chaos.randint(0, len(mine))] if chaos else mine
            counts.drafted += len(mine)
            for row in range(len(mine) + 1):
                # An engine that pads drafts with -1 feeds some token there.
                context = request.tokens + [max(token, 0) for token in mine[:row]]
                slots.append(slot)
                positions.append(len(context))
                prefixes.append(mine[:row] + [-1] * (depth - row))
                logits.append(model.logits(context))
                masks.append(grammar_mask(context) if request.grammar else everything_allowed())
            offsets.append(len(slots))
        rows = Rows(
            torch.tensor(slots),
            torch.tensor(positions),
            torch.tensor(prefixes).reshape(len(slots), depth),
            torch.stack(masks) if any(request.grammar for request in requests) else None,
        )
        verified = verify(state, torch.stack(logits), rows, torch.tensor(offsets))
        step_slots = torch.tensor([slot for slot, _ in step])
        state.commit(step_slots, verified.tokens)
        counts.accepted += int(verified.num_accepted.sum())
        for (_, index), tokens in zip(step, verified.tokens.tolist()):
            requests[index].output += [token for token in tokens if token >= 0]
        if depth:
            sampler = state.draft_sampler(
                step_slots, torch.tensor([len(requests[index].tokens) for _, index in step])
            )
            proposed: list[list[int]] = [[] for _ in step]
            for number in range(depth):
                contexts = [requests[index].tokens + mine for (_, index), mine in zip(step, proposed)]
                sampled = sampler(torch.stack([model.logits(c, draft=True) for c in contexts]), number)
                for mine, token in zip(proposed, sampled.tolist()):
                    mine.append(token)
            drafts.update({slot: mine for (slot, _), mine in zip(step, proposed)})
        for slot, index in step:
            request = requests[index]
            preempted = chaos is not None and chaos.random() < 0.1
            if request.done or preempted:
                # What runs past the end is dropped by every engine.
                del request.output[request.length :]
                del running[slot]
                drafts.pop(slot, None)
                if not request.done:
                    waiting.append(index)
    return counts
