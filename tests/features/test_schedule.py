"""The schedule is the best one there is, gives no draft away that it may not look at, and survives what requests do."""

import itertools
import runpy
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from deepinfer_plugins.core.settings import SettingError
from deepinfer_plugins.features.cost_curve import CostCurve, CostModel
from deepinfer_plugins.features.schedule import (
    VerificationSchedule,
    choose_budget,
    rates_of,
    split,
    split_on_device,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Products of these are exact in fp32, so equal rates and equal maxima are frequent and are what they seem.
EIGHTHS = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.875, 1.0])


def curve(*milliseconds: float) -> CostModel:
    """The time of 1, 2, ... rows."""
    return CostModel(CostCurve(tuple(range(1, len(milliseconds) + 1)), milliseconds))


def recorded(confidences: Sequence[Sequence[float]], cost: CostModel | None) -> VerificationSchedule:
    """Requests in slots 0 up, which have drafted twice with these confidences."""
    schedule = VerificationSchedule(len(confidences), len(confidences[0]), cost)
    slots = list(range(len(confidences)))
    for available in (0, len(confidences[0])):
        schedule.plan(slots, [available] * len(slots))
        schedule.record(slots, confidences)
    return schedule


@st.composite
def small_steps(
    draw: st.DrawFn,
) -> tuple[list[list[float]], list[int], int, int, list[int]]:
    n, depth = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    confidences = [[draw(EIGHTHS) for _ in range(depth)] for _ in range(n)]
    available = [draw(st.integers(0, depth)) for _ in range(n)]
    rows = draw(st.integers(n, n + 3))
    sampling = draw(st.integers(1, n))
    # It may rise, fall, stay, and end before everything is verified.
    milliseconds = draw(st.lists(st.integers(1, 12), min_size=rows, max_size=rows + n * depth + 2))
    return confidences, available, rows, sampling, milliseconds


@given(small_steps())
@settings(max_examples=250, deadline=None, derandomize=True)
def test_nothing_is_better_by_brute_force(
    step: tuple[list[list[float]], list[int], int, int, list[int]],
) -> None:
    confidences, available, rows, sampling, milliseconds = step
    products = [[Fraction(float(np.prod(row[: i + 1]))) for i in range(len(row))] for row in confidences]

    def tokens(counts: Sequence[int]) -> Fraction:
        return sampling + sum((rate for row, k in zip(products, counts) for rate in row[:k]), Fraction(0))

    best, smallest = Fraction(0), 0
    for counts in itertools.product(*(range(k + 1) for k in available)):
        size = rows + sum(counts)
        if size <= len(milliseconds):
            value = tokens(counts) / milliseconds[size - 1]
            if value > best or (value == best and sum(counts) < smallest):
                best, smallest = value, sum(counts)

    schedule = recorded(confidences, curve(*milliseconds))
    plan = schedule.plan(range(len(available)), available, rows, sampling)
    assert plan.drafts is not None
    found = tokens(plan.drafts.tolist()) / milliseconds[rows + plan.budget - 1]
    assert (found, plan.budget) == (best, smallest)
    assert plan.drafts.sum() == plan.budget
    assert plan.milliseconds == milliseconds[rows + plan.budget - 1]
    assert plan.expected == pytest.approx(float(tokens(plan.drafts.tolist())))


def test_a_dip_does_not_end_the_search() -> None:
    # One more row nearly doubles the time; six more cost nothing beyond that.
    staircase = CostModel(CostCurve((1, 8), (1.0, 1.9)))
    schedule = recorded([[0.8] * 7], staircase)
    assert schedule.plan([0], [7]).budget == 7
    twice = CostModel(CostCurve((1, 2, 3, 8), (1.0, 1.9, 1.6, 2.0)))
    assert recorded([[0.8] * 7], twice).plan([0], [7]).budget == 7


def test_a_larger_size_may_be_faster() -> None:
    assert recorded([[0.5] * 3], curve(4.0, 6.0, 3.0, 9.0)).plan([0], [3]).budget == 2


def test_of_equal_maxima_the_smallest_budget_wins() -> None:
    assert recorded([[1.0] * 3], curve(1, 2, 3, 4)).plan([0], [3]).budget == 0
    # Within one stair, drafts that are never accepted add nothing.
    assert recorded([[0.5, 0.0, 0.0]], curve(2, 2, 2, 2)).plan([0], [3]).budget == 1


def test_free_rows_are_all_used_and_dear_ones_not_at_all() -> None:
    confidences = [[0.9, 0.6, 0.3]] * 5
    assert recorded(confidences, CostModel(CostCurve((32,), (1.0,)))).plan(range(5), [3] * 5).budget == 15
    dear = curve(*(float(rows) for rows in range(1, 21)))
    assert recorded(confidences, dear).plan(range(5), [3] * 5).budget == 0


def test_without_a_curve_everything_is_verified() -> None:
    plan = recorded([[0.1, 0.1]] * 3, None).plan(range(3), [2, 0, 1])
    assert plan.drafts is not None and plan.drafts.tolist() == [2, 0, 1]
    assert np.isnan(plan.milliseconds)


def test_the_engines_limit_holds_in_every_mode() -> None:
    for mode in ("auto", "all", "none", "random:5"):
        schedule = VerificationSchedule(4, 3, CostModel(CostCurve((64,), (1.0,))), mode)
        for limit in (0, 5, 12, 100, -3):
            plan = schedule.plan(range(4), [3] * 4, max_drafts=limit)
            assert plan.drafts is not None
            assert plan.drafts.sum() == plan.budget <= max(0, limit)
            if mode == "all" or (mode == "auto" and limit > 0):
                assert plan.budget == min(12, max(0, limit))


def test_a_prefill_in_the_step_counts_its_rows() -> None:
    cost = CostModel(CostCurve((4, 64, 68), (1.0, 10.0, 20.0)))
    schedule = recorded([[0.9, 0.8]] * 2, cost)
    assert schedule.plan([0, 1], [2, 2]).budget == 2, "up to the stair's end"
    schedule = recorded([[0.9, 0.8]] * 2, cost)
    assert schedule.plan([0, 1], [2, 2], rows=62, sampling=1).budget == 2
    schedule = recorded([[0.9, 0.8]] * 2, cost)
    # No size holds it: the curve goes on, where one more row is far cheaper than a token.
    assert schedule.plan([0, 1], [2, 2], rows=1000, sampling=1).budget == 4


@given(
    st.lists(st.tuples(st.lists(EIGHTHS, min_size=3, max_size=3), st.integers(0, 3)), min_size=1, max_size=6),
    st.integers(-1, 20),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_split_is_the_documented_order_on_host_and_device(
    requests: list[tuple[list[float], int]], budget: int
) -> None:
    confidences = np.array([row for row, _ in requests], dtype=np.float32)
    available = np.array([k for _, k in requests])
    order = sorted(
        (-np.prod(confidences[r, : i + 1], dtype=np.float32), r, i)
        for r in range(len(requests))
        for i in range(available[r])
    )
    expected = [0] * len(requests)
    for _, r, _ in order[: max(0, budget)]:
        expected[r] += 1
    assert split(rates_of(confidences), available, budget).tolist() == expected
    on_device = split_on_device(torch.tensor(confidences), torch.tensor(available, dtype=torch.int32), budget)
    assert on_device.tolist() == expected and on_device.dtype == torch.int32


@pytest.mark.parametrize("n", [1, 63, 512])
@pytest.mark.parametrize("depth", [1, 5, 8])
def test_device_and_host_agree_on_any_confidences(n: int, depth: int) -> None:
    rng = np.random.default_rng(n + depth)
    for case in range(20):
        confidences = rng.beta(0.3 + case % 5, 0.6, (n, depth)).astype(np.float32)
        if case % 2:
            confidences = np.round(confidences, 1)  # many equal ones
        for odd in (np.nan, np.inf, -np.inf, -0.5, 1.5):
            confidences[rng.random((n, depth)) < 0.02] = odd
        available = rng.integers(0, depth + 1, n)
        budget = int(rng.integers(0, available.sum() + 2))
        expected = split(rates_of(confidences), available, budget)
        there = torch.from_numpy(confidences).to(DEVICE), torch.from_numpy(available).to(DEVICE)
        for number in (budget, torch.tensor(budget, device=DEVICE)):
            found = split_on_device(*there, number)
            assert found.tolist() == expected.tolist()
        assert expected.sum() == min(budget, available.sum()) and (expected <= available).all()


def test_rates_are_products_from_first_to_last_of_what_is_between_0_and_1() -> None:
    found = rates_of([[0.9, 2.0, 0.7, float("nan")], [-1.0, 1.0, 1.0, 1.0]])
    product = np.float32(0.9) * np.float32(1.0) * np.float32(0.7)
    assert found.T.tolist() == [[np.float32(0.9), np.float32(0.9), product, 0.0], [0.0] * 4]
    assert found.dtype == np.float32


@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_draft_is_verified_regardless_of_the_confidences_behind_it(data: st.DataObject) -> None:
    n, depth = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    late = data.draw(st.booleans())
    cost = curve(*np.sort(rng.integers(1, 30, n * (depth + 1))).astype(float))
    history = rng.choice([0.25, 0.5, 0.75, 1.0], (4, n, depth))
    request, position = int(rng.integers(n)), int(rng.integers(depth - 1))
    verified = []
    for changed in (False, True):
        schedule = VerificationSchedule(n, depth, cost)
        if changed:
            history[-1, request, position + 1 :] = rng.choice([0.0, 0.5, 1.0], depth - position - 1)
        for step, confidences in enumerate(history):
            schedule.plan(range(n), [depth if step else 0] * n)
            if not (late and step == len(history) - 1):
                schedule.record(range(n), confidences)
        plan = schedule.plan(range(n), [depth] * n)
        assert plan.drafts is not None
        on_device = split_on_device(torch.tensor(history[-1]), torch.full((n,), depth), plan.budget)
        verified.append((bool(plan.drafts[request] > position), bool(on_device[request] > position)))
    assert verified[0] == verified[1]


def budget_of(schedule: VerificationSchedule, slot: int = 0, depth: int = 3) -> int:
    return schedule.plan([slot], [depth]).budget


SURE, HOPELESS = [[1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0]]
# Every row costs a little: worth it for a draft that is sure, not for a hopeless one.
CHEAP = (10.0, 11.0, 12.0, 13.0)


def test_the_budget_comes_from_the_drafts_before_and_the_split_from_the_present_ones() -> None:
    schedule = VerificationSchedule(2, 3, curve(*(10.0 + rows for rows in range(8))))
    schedule.plan([0, 1], [0, 0])
    schedule.record([0, 1], SURE + HOPELESS)
    first = schedule.plan([0, 1], [3, 3])
    assert first.budget == 6, "nothing is known of drafts before: counted on"
    schedule.record([0, 1], HOPELESS + SURE)
    second = schedule.plan([0, 1], [3, 3])
    assert second.drafts is not None
    assert (second.budget, second.drafts.tolist()) == (3, [0, 3])


def test_late_confidences_are_used_once_they_arrive() -> None:
    """Asynchronous scheduling: a step is planned while the one before it runs."""
    schedule = VerificationSchedule(1, 3, curve(*CHEAP))
    schedule.plan([0], [0])
    assert budget_of(schedule) == 3, "nothing recorded yet"
    schedule.record([0], HOPELESS, step=0)
    # The present drafts are from step 1, so step 0's rates may be seen although nothing is recorded after them.
    assert budget_of(schedule) == 0
    schedule.record([0], SURE, step=1)
    assert budget_of(schedule) == 3


def test_a_skipped_request_keeps_its_drafts_and_their_rates() -> None:
    schedule = VerificationSchedule(2, 3, curve(*CHEAP))
    for confidences in (HOPELESS, SURE):
        schedule.plan([0], [0])
        schedule.record([0], confidences)
    for _ in range(3):
        schedule.plan([1], [0])
        schedule.record([1], HOPELESS)
    assert budget_of(schedule) == 0, "still the rates before those of the present drafts"
    schedule.record([0], HOPELESS)
    assert budget_of(schedule) == 3


def test_a_reused_slot_knows_nothing_of_its_former_owner() -> None:
    schedule = VerificationSchedule(1, 3, curve(*CHEAP))
    for _ in range(3):
        last = schedule.plan([0], [3])
        schedule.record([0], HOPELESS)
    running = schedule.plan([0], [3])
    assert running.budget == 0
    schedule.forget(0)
    assert budget_of(schedule) == 3
    schedule.record([0], HOPELESS, step=running.step)  # arrives after the slot changed hands
    assert budget_of(schedule) == 3
    schedule.record([0], HOPELESS, step=last.step)
    assert budget_of(schedule) == 3


def test_what_a_new_owner_drafts_first_counts() -> None:
    schedule = VerificationSchedule(1, 3, curve(*CHEAP))
    schedule.plan([0], [0])
    schedule.record([0], SURE)
    schedule.forget([0])
    for confidences in (HOPELESS, SURE):
        assert budget_of(schedule) == 3
        schedule.record([0], confidences)
    assert budget_of(schedule) == 0


def test_what_arrives_out_of_order_does_not_replace_what_is_newer() -> None:
    schedule = VerificationSchedule(1, 3, curve(*CHEAP))
    steps = [schedule.plan([0], [3]).step for _ in range(3)]
    schedule.record([0], HOPELESS, step=steps[1])
    schedule.record([0], SURE, step=steps[0])
    schedule.record([0], SURE, step=steps[1])
    assert budget_of(schedule) == 0


class Owner:
    """One request, as plainly as can be."""

    def __init__(self, slot: int, born: int) -> None:
        self.slot = slot
        self.born = born
        self.planned: list[int] = []
        self.drafted: dict[int, list[float]] = {}
        self.arrived: list[int] = []

    def rates(self, step: int | None, depth: int) -> list[np.float32]:
        if step is None:
            return [np.float32(1.0)] * depth
        product, rates = np.float32(1.0), []
        for confidence in self.drafted[step]:
            product = product * np.float32(confidence)
            rates.append(product)
        return rates

    def latest(self) -> int | None:
        return self.arrived[-1] if self.arrived else None

    def before_present(self) -> int | None:
        """The last arrived step whose drafts are not verified now; only two are remembered."""
        known = [step for step in self.arrived[-2:] if not self.planned or step != self.planned[-1]]
        return known[-1] if known else None


class Engine(RuleBasedStateMachine):
    """Requests come, are skipped, abort and are replaced at once; confidences arrive late, or never."""

    SLOTS, DEPTH = 3, 2

    @initialize(times=st.lists(st.integers(1, 9), min_size=3, max_size=9))
    def start(self, times: list[int]) -> None:
        self.times = times
        self.schedule = VerificationSchedule(self.SLOTS, self.DEPTH, curve(*map(float, times)))
        self.owners = [Owner(slot, 0) for slot in range(self.SLOTS)]
        self.in_flight: list[tuple[int, list[Owner]]] = []
        self.steps = 0

    @rule(chosen=st.sets(st.integers(0, 2)), seed=st.integers(0, 2**31), drafts=st.booleans())
    def step(self, chosen: set[int], seed: int, drafts: bool) -> None:
        rng = np.random.default_rng(seed)
        owners = [self.owners[slot] for slot in rng.permutation(sorted(chosen)).astype(int)]
        available = [int(rng.integers(self.DEPTH + 1)) if o.planned else 0 for o in owners]
        plan = self.schedule.plan([o.slot for o in owners], available)
        assert plan.step == self.steps
        seen = sorted(
            (r for o, k in zip(owners, available) for r in o.rates(o.before_present(), self.DEPTH)[:k]),
            reverse=True,
        )
        best, budget = 0.0, 0
        for k in range(len(seen) + 1):
            size = max(1, len(owners) + k)
            if size <= len(self.times):
                value = (len(owners) + sum(map(float, seen[:k]))) / self.times[size - 1]
                if value > best:
                    best, budget = value, k
        assert plan.budget == budget
        order = sorted(
            (-rate, index, position)
            for index, (o, k) in enumerate(zip(owners, available))
            for position, rate in enumerate(o.rates(o.latest(), self.DEPTH)[:k])
        )
        expected = [0] * len(owners)
        for _, index, _ in order[:budget]:
            expected[index] += 1
        assert plan.drafts is not None and plan.drafts.tolist() == expected
        for o in owners:
            o.planned.append(self.steps)
            if drafts:
                o.drafted[self.steps] = rng.choice([0.0, 0.25, 0.5, 1.0], self.DEPTH).tolist()
        if drafts:
            self.in_flight.append((self.steps, owners))
            del self.in_flight[:-4]  # what is further behind never arrives
        self.steps += 1

    @rule(which=st.integers(0, 3))
    def arrive(self, which: int) -> None:
        if self.in_flight:
            step, owners = self.in_flight.pop(min(which, len(self.in_flight) - 1))
            self.schedule.record(
                [o.slot for o in owners], np.reshape([o.drafted[step] for o in owners], (-1, 2)), step
            )
            for o in owners:
                # Of a request that is gone, nobody looks; what is older than what arrived is dropped.
                if not o.arrived or step > o.arrived[-1]:
                    o.arrived.append(step)

    @rule(slot=st.integers(0, 2))
    def replace(self, slot: int) -> None:
        self.schedule.forget(slot)
        self.owners[slot] = Owner(slot, self.steps)


Engine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestEngine = Engine.TestCase


def test_random_budgets_repeat_by_seed_and_reach_both_ends() -> None:
    def budgets(seed: int, warm: int = 0) -> list[int]:
        schedule = VerificationSchedule(4, 5, None, f"random:{seed}")
        found = []
        for step in range(200):
            plan = schedule.plan(range(4), [5] * 4 if step >= warm else [0] * 4)
            assert plan.drafts is not None and plan.drafts.sum() == plan.budget
            found.append(plan.budget)
        return found

    first = budgets(1)
    assert first == budgets(1) and first != budgets(2)
    assert first[50:] == budgets(1, warm=50)[50:], "a function of the step, whatever was before"
    assert set(first) == set(range(21))
    assert 200 / 16 < first.count(0) < 200 / 4 and 200 / 16 < first.count(20) < 200 / 4


def test_modes_verify_all_or_none_whatever_it_costs() -> None:
    for mode, expected in (("all", [3, 1]), ("none", [0, 0])):
        for cost in (curve(1, 100, 100, 100, 100, 100), CostModel(CostCurve((64,), (1.0,)))):
            plan = VerificationSchedule(2, 3, cost, mode).plan([0, 1], [3, 1])
            assert plan.drafts is not None and plan.drafts.tolist() == expected


@pytest.mark.parametrize("mode", ["some", "random", "random:", "random:x", "all:1"])
def test_other_modes_are_refused(mode: str) -> None:
    with pytest.raises(SettingError, match="supported are auto, all, none and random:<seed>"):
        VerificationSchedule(1, 1, None, mode)


def test_no_requests_and_no_drafts_are_fine() -> None:
    schedule = VerificationSchedule(3, 2, curve(1.0, 2.0))
    plan = schedule.plan([], [])
    assert plan.drafts is not None and (plan.budget, len(plan.drafts)) == (0, 0)
    schedule.record([], np.zeros((0, 2)))
    assert schedule.plan([2], [0]).budget == 0
    assert split_on_device(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 0).tolist() == []


def test_on_device_leaves_the_split_and_changes_nothing_else() -> None:
    for confidences in ([[0.9, 0.5]] * 3, [[0.2, 0.2]] * 3):
        cost = curve(*(5.0 + rows for rows in range(9)))
        one = recorded(confidences, cost).plan(range(3), [2, 1, 2])
        other = recorded(confidences, cost).plan(range(3), [2, 1, 2], on_device=True)
        assert other.drafts is None and one._replace(drafts=None) == other


def test_misuse_says_what_was_expected() -> None:
    schedule = VerificationSchedule(4, 3, None)
    with pytest.raises(ValueError, match=r"confidences of step 0; 0 steps"):
        schedule.record([0], [[1.0, 1.0, 1.0]], step=0)
    for slots, available, complaint in (
        ([4], [0], "slots 4 to 4; expected .* 0 to 3"),
        ([-1, 2], [0, 0], "slots -1 to 2"),
        ([0], [4], "available drafts 4 to 4; expected .* 0 to 3"),
        ([0], [-1], "available drafts -1"),
        ([[0]], [[1]], "of shape"),
        ([0, 1], [1], r"\(2,\) and \(1,\)"),
    ):
        with pytest.raises(ValueError, match=complaint):
            schedule.plan(slots, available)
    schedule.plan([0], [0])
    with pytest.raises(ValueError, match=r"confidences \[n, 3\]; found \(1,\) and \(1, 2\)"):
        schedule.record([0], [[1.0, 1.0]])
    with pytest.raises(ValueError, match="confidences of step 1; 1 steps"):
        schedule.record([0], [[1.0, 1.0, 1.0]], step=1)
    with pytest.raises(ValueError, match="slots 9"):
        schedule.forget(9)


def test_a_simulated_load_is_never_worse_off_than_without_a_schedule() -> None:
    program = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "schedule_sweep.py"))
    for name, by_rows in program["published"]().items():
        rows = program["sweep"](by_rows, steps=12, requests=(2, 16, 96, 512))
        assert len(rows) == 4 and min(row["over_best"] for row in rows) > 0.99, name
        assert max(row["over_best"] for row in rows) > 1.03, name


def test_choose_budget_looks_at_every_candidate() -> None:
    rng = np.random.default_rng(7)
    for _ in range(100):
        expected = np.cumsum(np.sort(rng.random(41))[::-1])
        step_ms = rng.random(int(rng.integers(1, 42))) + 0.5
        rates = [tokens / ms for tokens, ms in zip(expected, step_ms)]
        assert choose_budget(expected, step_ms) == rates.index(max(rates))
