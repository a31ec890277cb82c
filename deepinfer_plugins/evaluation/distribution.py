"""Whether tokens under speculation have the target's distribution: Pearson's test of many draws against it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from deepinfer_plugins.features.sampling import Rows, SamplingOps, SamplingParams, SamplingState
from deepinfer_plugins.features.verification import Verified, verify

VOCAB = 7
# Requests at a time; each round continues them at positions of their own.
REQUESTS = 8192


@dataclass(frozen=True, slots=True)
class Fit:
    """What was drawn, against what should have been.

    Args:
        draws: Pairs of tokens.
        statistic: Pearson's, over all pairs.
        freedom: Its degrees of freedom.
        kept: Share of the first drafts that were accepted.
        most: The largest share that any scheme can accept: 1 minus the total variation of draft and target.
        overlap: What verification itself reports as that share; NaN under coupling.
    """

    draws: int
    statistic: float
    freedom: int
    kept: float
    most: float
    overlap: float

    @property
    def limit(self) -> float:
        """Six standard deviations above the mean."""
        return self.freedom + 6 * math.sqrt(2 * self.freedom)

    @property
    def fits(self) -> bool:
        return self.statistic < self.limit


def draw_pairs(
    way: Literal["coupling", "rejection"],
    draws: int,
    device: torch.device,
    ops: SamplingOps | None = None,
    **params: Any,
) -> Fit:
    """Two drafts are verified and the token after them sampled; the first two tokens' joint distribution is known.

    The target is a random table of seven tokens given the one before, the draft that table with noise.

    Args:
        way: How drafts are verified.
        draws: Pairs, rounded up to whole rounds of :data:`REQUESTS`.
        device: Where.
        ops: Operators; None: those that run everywhere.
        params: Of sampling.
    """
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(3, VOCAB, VOCAB, generator=generator).to(device)
    draft = target + 0.8 * torch.randn(3, VOCAB, VOCAB, generator=generator).to(device)
    state = SamplingState(REQUESTS, VOCAB, device, ops)
    for slot in range(REQUESTS):
        state.add(slot, SamplingParams(seed=slot * 1_000_003, verify=way, **params), [1])
    slots = torch.arange(REQUESTS, device=device)
    seen = torch.zeros(VOCAB * VOCAB, dtype=torch.float64, device=device)
    kept = torch.zeros((), dtype=torch.int64, device=device)
    rounds = -(-draws // REQUESTS)
    for number in range(rounds):
        first = torch.full_like(slots, 3 * number + 1)
        tokens, verified = _round(state, slots, first, target, draft)
        seen += (tokens[:, 0] * VOCAB + tokens[:, 1]).bincount(minlength=VOCAB * VOCAB)
        kept += (verified.num_accepted > 0).sum()
    one = state.log_probs(target[0, :1], slots[:1])[0].double().exp()
    two = state.log_probs(target[1], slots[:VOCAB]).double().exp()
    drafted = state.log_probs(draft[0, :1], slots[:1])[0].double().exp()
    total = rounds * REQUESTS
    expected = (total * one[:, None] * two).flatten()
    possible = expected > 0
    statistic = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    if bool(seen[~possible].any()):
        statistic = torch.full_like(statistic, torch.inf)
    overlap = float(verified.overlap[0])
    most = float(torch.minimum(one, drafted).sum())
    return Fit(total, float(statistic), int(possible.sum()) - 1, int(kept) / total, most, overlap)


def _round(
    state: SamplingState, slots: torch.Tensor, first: torch.Tensor, target: torch.Tensor, draft: torch.Tensor
) -> tuple[torch.Tensor, Verified]:
    """The first two tokens of each request from position ``first [n]`` on, ``[n, 2]``."""
    n = len(slots)
    last = torch.zeros_like(slots)
    sampler = state.draft_sampler(slots, first)
    one = sampler(draft[0, last], 0)
    two = sampler(draft[1, one], 1)
    # The request's rows: no draft, one, two.
    prefix = torch.full((n, 3, 2), -1, device=slots.device)
    prefix[:, 1, 0], prefix[:, 2, 0], prefix[:, 2, 1] = one, one, two
    logits = torch.stack([target[0, last], target[1, one], target[2, two]], dim=1)
    positions = first[:, None] + torch.arange(3, device=slots.device)
    rows = Rows(slots.repeat_interleave(3), positions.flatten(), prefix.flatten(0, 1))
    offsets = torch.arange(n + 1, device=slots.device) * 3
    verified = verify(state, logits.flatten(0, 1), rows, offsets)
    tokens = verified.tokens[:, :2].clone()
    # A request that kept nothing samples its second token in another step.
    again = Rows(slots, first + 1, prefix[:, 0, :0])
    later = state.sample(target[1, tokens[:, 0]], again).tokens
    tokens[:, 1] = torch.where(tokens[:, 1] < 0, later, tokens[:, 1])
    return tokens, verified
