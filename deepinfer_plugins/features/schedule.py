"""How many drafts of each request a step verifies: the number that yields the most tokens per second.

A verified draft costs a row and yields a token with the probability that it and all drafts before it are accepted: its
*rate*, the running product of the request's confidences. A step verifies the drafts of greatest rate,
as many of them as the *budget* says. Rates never rise along a request, so what is verified of it is a prefix. The rows
that an engine would run anyway (the token sampled last of each request, a prefill's tokens) are never trimmed.

Of one request's draft, whether token i is verified must not depend on what token i is, or the output's
distribution changes. Confidence i is computed before token i is drawn, the confidences behind it are computed after.
So the split of the budget may use the rates of the drafts themselves: those behind i never rank before it. The budget
may not, since it counts them all; it uses the rates of the drafts before those, from step N-2.

How an engine's adapter drives it
=================================
One :class:`VerificationSchedule` per worker; slots are the engine's own request slots. Each step::

    plan = schedule.plan(slots, available, rows, sampling)   # before the forward
    ...forward, verification, drafting...
    schedule.record(slots, confidences, plan.step)           # as soon as the host has them, however late
    schedule.forget(slot)                                    # when a request leaves its slot, or enters one

``plan`` is called for every step that runs any request, with all of the step's requests, also those without
drafts (a prefill); ``record`` only for the requests that drafted in that step. A step on which a request is skipped
leaves no trace of that request. Without ``confidences`` on the host in time, nothing waits: the
schedule takes the last ones that arrived, by their step. Requests that emitted their end in the step may be
recorded with zeros, so that a step which already runs ahead spends nothing on them.

*Synchronous*: record before the next plan and use ``plan.drafts``, the split on the host.

*Asynchronous* (the next step is prepared while this one runs): call ``plan(..., on_device=True)``; only
``plan.budget`` and so the total of rows is known on the host. On the device, :func:`split_on_device` gives
the drafts of each request from the confidences which the last draft left there. Copy confidences to the host without
waiting, and record them with their step when the copy has ended.

*vLLM*: an object with the methods of ``AdaptiveVerificationManager``, put on the model runner where that would be.
``add_request`` is ``forget`` of the slot; ``get_num_tokens`` is ``plan`` with ``on_device=True``,
``slots`` from ``req_id_to_index``, ``rows`` the scheduled tokens without drafts, ``sampling`` the requests whose
prefill ends in this step or before, ``max_drafts`` what the chunk of logits leaves, and returns ``rows + plan.budget``;
``compact_batch`` is vLLM's; ``reallocate_drafts`` is :func:`split_on_device` over the confidences of the batch's
slots; ``record_confidences`` stores them by slot and starts the copy to the host, and each ``get_num_tokens`` first
records every copy that has ended.

*SGLang*: in the planner. ``prepare_verify_budget`` first records what ``FutureMap.resolve_confidence_cpu`` has (the
ring holds confidences by slot; remember the plan's step beside the ring's position), calls ``forget`` for slots whose
``req_generation`` changed, then ``plan(req_pool_indices_cpu, available, on_device=True)`` and sets
``verify_token_budget`` to ``plan.budget``; ``schedule_layout`` turns :func:`split_on_device` into ``verify_lens``, one
more than the drafts. Without overlap, ``compute_budget_sync`` records and plans. Idle batches don't plan.

*Costs*: once the engine can run steps, ``cost_curve.measure`` the sizes that it pads to, or with ``padded=False`` a
sample of sizes if it runs without graphs; keep the curve in a ``CurveCache``. While running, give each step's times to
the ``CostModel``: ``observe_forward`` with the rows that ran, padding included, and ``observe_sampler`` with what the
step took besides (sampling, verification, drafting). A measured step must do what a real one does: read caches of a
usual length.

*Ranks*: those that share a forward must verify the same rows. ``plan`` is a function of what it, ``record`` and
``forget`` were given and of the cost model. Confidences are equal on ranks by construction; measured times are not:
see :class:`~deepinfer_plugins.features.cost_curve.CostModel`.

Source: section 4.2.1 of the model's fact sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer_plugins.core.settings import SettingError
from deepinfer_plugins.features.cost_curve import CostModel

if TYPE_CHECKING:
    import torch

Ints = NDArray[np.int64]
Rates = NDArray[np.float32]

# Below every rate, for drafts that do not exist.
_ABSENT = np.float32(-1.0)


def rates_of(confidences: ArrayLike) -> Rates:
    """Running products of confidences along each request.

    Args:
        confidences: ``[n, depth]``; what is not in [0, 1] is moved to its nearer end, NaN to 0.

    Returns:
        fp32 ``[depth, n]``, each product rounded to fp32, from the first to the last. Position first: numpy is
        several times faster along long rows than along many short ones.
    """
    values = np.ascontiguousarray(np.asarray(confidences, dtype=np.float32).T)
    rates = np.fmax(values, np.float32(0.0))
    np.fmin(rates, np.float32(1.0), out=rates)
    for position in range(1, len(rates)):
        rates[position] *= rates[position - 1]
    return rates


def choose_budget(expected: NDArray[np.float64], step_ms: NDArray[np.float64]) -> int:
    """The number of drafts that maximises expected tokens per millisecond.

    Every candidate is looked at: the times need not rise, and a dip behind a step of them is found. Of equal
    maxima the smallest number wins.

    Args:
        expected: ``[drafts + 1]``: entry k is the tokens that a step with k drafts yields.
        step_ms: ``[candidates]``, from 1 to drafts + 1 of them: entry k is its time.
    """
    return int(np.argmax(expected[: len(step_ms)] / step_ms))


def split(rates: Rates, available: Ints, budget: int) -> Ints:
    """Give the budget to the drafts of greatest rate.

    Among equal rates the earlier request comes first, and in it the earlier draft.

    Args:
        rates: ``[depth, n]``, in [0, 1], not rising along a request.
        available: ``[n]``: how many drafts a request has.
        budget: 0 or more; what exceeds the drafts that there are is left over.

    Returns:
        int64 ``[n]``: how many of its drafts each request verifies.
    """
    if budget <= 0:
        return np.zeros_like(available)
    total = int(available.sum())
    if budget >= total:
        return available.copy()
    values = _present(rates, available, total)
    # Everything from the budget-th greatest on, without the last of those that equal it, if these are too many.
    least = np.partition(values, values.size - budget, axis=None)[values.size - budget]
    verified = values >= least
    surplus = np.count_nonzero(verified) - budget
    if surplus:
        verified.T.flat[np.flatnonzero((values == least).T)[-surplus:]] = False
    return verified.sum(axis=0, dtype=np.int64)


def _present(rates: Rates, available: Ints, total: int) -> Rates:
    """Rates of the drafts that exist, total in number; what ranks behind all of them for the others."""
    if total == rates.size:
        return rates
    return np.where(np.arange(len(rates))[:, None] < available, rates, _ABSENT)


def split_on_device(
    confidences: torch.Tensor, available: torch.Tensor, budget: int | torch.Tensor
) -> torch.Tensor:
    """:func:`split` of :func:`rates_of`, in torch, bit for bit, without waiting for the device.

    Args:
        confidences: ``[n, depth]``, floating; converted to fp32.
        available: ``[n]``, integer, on the same device.
        budget: A number, or a tensor of one on the same device.

    Returns:
        ``[n]``, of the type of ``available``.
    """
    import torch

    num_requests, depth = confidences.shape
    values = confidences.float().nan_to_num(nan=0.0).clamp(0.0, 1.0)
    # Not cumprod: on some devices it multiplies in another order, which rounds differently.
    rates = [values[:, 0]]
    for index in range(1, depth):
        rates.append(rates[-1] * values[:, index])
    exists = torch.arange(depth, device=values.device) < available[:, None]
    flat = torch.stack(rates, dim=1).masked_fill(~exists, float(_ABSENT)).flatten()
    order = torch.sort(flat, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    verified = (rank < budget).view(num_requests, depth) & exists
    return verified.sum(dim=1, dtype=available.dtype)


class Plan(NamedTuple):
    """What a step verifies.

    Args:
        step: Number of the plan, from 0 on; what was drafted in this step is recorded under it.
        budget: Drafts that the step verifies.
        drafts: int64 ``[n]``: of each request, by the latest rates on the host; None if split on the device.
        expected: Tokens that the step yields, by the rates that the budget was chosen by.
        milliseconds: What it takes, by the cost model; NaN without one.
    """

    step: int
    budget: int
    drafts: Ints | None
    expected: float
    milliseconds: float


class VerificationSchedule:
    """Chooses what each step verifies. The module says how to drive it.

    Args:
        num_slots: Slots are 0 up to this.
        depth: Drafts per request at most.
        cost: What steps cost; None if nothing is known (no captured sizes), when every draft is verified.
        budget: ``DEEPINFER_PLUGINS_VERIFY_BUDGET``: ``"auto"`` for the best one, ``"all"``, ``"none"``, or
            ``"random:<seed>"``: for tests, an arbitrary one each step, a function of the seed and the step's number;
            one in eight is 0, one in eight everything, the others anything in between.
    """

    def __init__(self, num_slots: int, depth: int, cost: CostModel | None, budget: str = "auto") -> None:
        kind, _, seed = budget.partition(":")
        if budget not in ("auto", "all", "none") and not (kind == "random" and seed.isdigit()):
            raise SettingError(f"verify budget {budget!r}: supported are auto, all, none and random:<seed>")
        self.num_slots = num_slots
        self.depth = depth
        self.cost = cost
        self._kind = kind
        self._seed = int(seed or 0)
        self._next_step = 0
        # Two columns of rates for each slot, at slot and num_slots + slot: those recorded last, in the column that
        # _turn names, and those before. A request without rates counts on all of its drafts.
        self._rates = np.ones((depth, 2 * num_slots), dtype=np.float32)
        self._turn = np.zeros(num_slots, dtype=np.int64)
        # The step that the rates recorded last were drafted in.
        self._drafted_in = np.full(num_slots, -1)
        # The step which a slot was planned for last: its present drafts, if any, are from there. And the first step
        # that is its present owner's.
        self._planned_in = np.full(num_slots, -1)
        self._owned_from = np.zeros(num_slots, dtype=np.int64)

    def plan(
        self,
        slots: ArrayLike,
        available: ArrayLike,
        rows: int | None = None,
        sampling: int | None = None,
        max_drafts: int | None = None,
        on_device: bool = False,
    ) -> Plan:
        """Choose what the next step verifies.

        Args:
            slots: int ``[n]``, distinct: all requests of the step.
            available: int ``[n]``: drafts that each has, 0 to depth.
            rows: Of the step without any draft; None for one per request.
            sampling: Requests that yield a token without any draft; None for all of them.
            max_drafts: A limit of the engine's; None for none.
            on_device: The split is left to :func:`split_on_device`.

        Raises:
            ValueError: If shapes differ or a number is out of range.
        """
        owners, drafts = np.asarray(slots, dtype=np.int64), np.asarray(available, dtype=np.int64)
        if drafts.shape != owners.shape:
            raise ValueError(f"expected slots and available [n]; found {owners.shape} and {drafts.shape}")
        self._check("slots", owners, self.num_slots)
        self._check("available drafts", drafts, self.depth + 1)
        num_requests, total = len(owners), int(drafts.sum())
        rows = num_requests if rows is None else rows
        limit = total if max_drafts is None else max(0, min(total, max_drafts))
        step, self._next_step = self._next_step, self._next_step + 1

        turn = self._turn[owners]
        # The budget may not see the rates of the drafts which are verified now.
        of_these = self._drafted_in[owners] == self._planned_in[owners]
        self._planned_in[owners] = step
        seen = self._rates.take(owners + self.num_slots * (turn ^ of_these), axis=1)
        expected = np.empty(total + 1)
        expected[0] = num_requests if sampling is None else sampling
        expected[1:] = np.sort(_present(seen, drafts, total), axis=None)[::-1][:total]
        expected = np.cumsum(expected)

        step_ms = None if self.cost is None else self.cost.step_ms(rows, limit, num_requests)
        if self._kind == "none":
            budget = 0
        elif self._kind == "random":
            budget = self._random_budget(step, limit)
        elif self._kind == "all" or step_ms is None:
            budget = limit
        else:
            budget = choose_budget(expected, step_ms)
        return Plan(
            step,
            budget,
            None if on_device else split(self._latest(owners), drafts, budget),
            float(expected[budget]),
            float("nan") if step_ms is None or budget >= len(step_ms) else float(step_ms[budget]),
        )

    def record(self, slots: ArrayLike, confidences: ArrayLike, step: int | None = None) -> None:
        """Take in the confidences of what was drafted in a step.

        Those of a request that has left its slot since, and those older than what the slot has, are dropped.

        Args:
            slots: int ``[n]``, distinct: the requests that drafted.
            confidences: ``[n, depth]``, in [0, 1]: with the temperatures applied, not multiplied up.
            step: Of the plan; None for the last one.

        Raises:
            ValueError: If shapes differ or there was no such step.
        """
        owners, values = np.asarray(slots, dtype=np.int64), np.asarray(confidences, dtype=np.float32)
        step = self._next_step - 1 if step is None else step
        if not 0 <= step < self._next_step:
            raise ValueError(f"confidences of step {step}; {self._next_step} steps have been planned")
        if values.shape != (owners.size, self.depth):
            raise ValueError(
                f"expected slots [n] and confidences [n, {self.depth}]; found {owners.shape} and {values.shape}"
            )
        self._check("slots", owners, self.num_slots)
        wanted = (self._drafted_in[owners] < step) & (self._owned_from[owners] <= step)
        if not wanted.all():
            owners, values = owners[wanted], values[wanted]
        turn = self._turn[owners] ^ 1
        self._turn[owners] = turn
        self._rates[:, owners + self.num_slots * turn] = rates_of(values)
        self._drafted_in[owners] = step

    def forget(self, slots: int | Sequence[int] | Ints) -> None:
        """The slot's request is gone: aborted, finished, preempted. Its next one starts without rates."""
        owners = np.atleast_1d(np.asarray(slots, dtype=np.int64))
        self._check("slots", owners, self.num_slots)
        self._rates[:, owners] = 1.0
        self._rates[:, owners + self.num_slots] = 1.0
        # What the request still drafts in steps that run by now is nobody's.
        self._owned_from[owners] = self._next_step

    def _latest(self, slots: Ints) -> Rates:
        return self._rates.take(slots + self.num_slots * self._turn[slots], axis=1)

    @staticmethod
    def _check(what: str, values: Ints, end: int) -> None:
        """One dimension, and 0 or more, less than end."""
        # As unsigned numbers, negative ones are above every end.
        if values.ndim != 1 or (values.size and values.view(np.uint64).max() >= end):
            found = f"of shape {values.shape}" if values.ndim != 1 else f"{values.min()} to {values.max()}"
            raise ValueError(f"{what} {found}; expected [n], from 0 to {end - 1}")

    def _random_budget(self, step: int, limit: int) -> int:
        rng = np.random.default_rng((self._seed, step))
        kind = rng.integers(8)
        return (0, limit)[kind] if kind < 2 else int(rng.integers(limit + 1))
