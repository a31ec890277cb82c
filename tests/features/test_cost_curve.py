"""Curves are measured, refined and kept as documented; a wrong file says what is wrong with it."""

import json
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_plugins.core.settings import Settings
from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.features import cost_curve
from deepinfer_plugins.features.cost_curve import (
    Clock,
    CostCurve,
    CostModel,
    CurveCache,
    Refinement,
    find,
    measure,
)
from deepinfer_plugins.kernels.catalogue import load_ops

CURVE = CostCurve((1, 4, 8), (2.0, 3.0, 5.0))


def test_six_runs_of_each_size_of_which_three_count() -> None:
    times = {2: iter([99.0, 5.0, 1.0, 3.0, 2.5, 9.0]), 7: iter([0.1, 4.0, 4.0, 4.0, 8.0, 4.0])}
    calls = []

    def run(size: int) -> float:
        calls.append(size)
        return next(times[size])

    curve = measure(run, [7, 2, 7], chip="cpu")
    assert calls == [2] * 6 + [7] * 6
    assert curve == CostCurve((2, 7), ((5.0 + 3.0 + 2.5) / 3, 4.0))
    assert curve.facts == {"chip": "cpu"}


def test_ranks_average_what_they_measured() -> None:
    curve = measure(lambda size: float(size), [1, 2], average=lambda times: [10 * ms for ms in times])
    assert curve.milliseconds == (10.0, 20.0)


def test_a_step_costs_what_the_smallest_size_that_holds_it_costs() -> None:
    model = CostModel(CURVE)
    assert model.step_ms(1, 100, 1).tolist() == [2, 3, 3, 3, 5, 5, 5, 5]
    assert model.step_ms(4, 2, 1).tolist() == [3, 5, 5]
    assert model.step_ms(8, 5, 1).tolist() == [5], "candidates beyond the largest size are ignored"
    assert model.step_ms(0, 0, 0).tolist() == [2]


def test_sizes_to_measure_are_those_that_steps_have() -> None:
    samples = [1, 2, 4, 8, 16, 32]
    assert cost_curve.sizes_to_measure(samples, [], 20) == [1, 2, 4, 8, 16, 20]
    # The largest step is padded too.
    assert cost_curve.sizes_to_measure(samples, [24, 6, 12], 20) == [6, 12, 24]
    assert cost_curve.sizes_to_measure(samples, [6, 12, 20, 24], 20) == [6, 12, 20]
    # Beyond the graphs, steps are as large as they are.
    assert cost_curve.sizes_to_measure(samples, [6, 12], 20) == [6, 12, 16, 20]
    assert cost_curve.sizes_to_measure(samples, [], 1) == [1]


def test_another_provider_has_another_key() -> None:
    ops = load_ops(Want(Arch.CPU))
    other = replace(ops, linear=ops.rms_norm)
    keys = [cost_curve.providers(each) for each in (ops, load_ops(Want(Arch.CPU)), other)]
    assert keys[0] == keys[1] != keys[2] and "linear" in keys[0]
    json.dumps(keys[0])


def test_a_step_that_is_not_padded_costs_what_lies_between() -> None:
    model = CostModel(CostCurve((2, 4, 8), (2.0, 3.0, 5.0), padded=False))
    assert model.step_ms(1, 100, 1).tolist() == [2, 2, 2.5, 3, 3.5, 4, 4.5, 5]
    assert model.step_ms(10, 1, 1).tolist() == [6.0, 6.5]
    extra = {3: 0.1, 5: 0.3, 6: 0.3, 7: 0.3, 8: 0.3}  # of each row

    def observe(size: int, times: int) -> None:
        expected = float(CostModel(model.curve).step_ms(size, 0, 1)[0])
        for _ in range(times):
            model.observe_forward(size, expected + extra[size] * size)

    for size, times in ((3, 10), (5, 3), (7, 3), (8, 3)):
        observe(size, times)
    for nowhere in (0, 9):
        model.observe_forward(nowhere, 1e9)
    assert model.slope == pytest.approx(0.1), "of nine steps that the size 8 holds, nothing is said"
    assert model.step_ms(3, 2, 1) == pytest.approx([2.8, 3.4, 4.0])
    observe(6, 1)
    assert model.slope == pytest.approx(0.2), "the tenth: they count together"


def test_a_step_that_no_size_holds_continues_the_curve() -> None:
    assert CostModel(CURVE).step_ms(10, 2, 1).tolist() == [6.0, 6.5, 7.0]
    assert CostModel(CostCurve((4,), (2.0,))).step_ms(8, 1, 1).tolist() == [4.0, 4.5]
    falling = CostModel(CostCurve((1, 2), (3.0, 2.0)))
    assert falling.step_ms(5, 1, 1).tolist() == [2.0, 2.0], "it is not continued downwards, to zero and below"


def test_slope_is_the_median_over_sizes_of_medians_and_counts_if_positive() -> None:
    model = CostModel(CURVE)
    for ms in (3.4, 3.8, 3.0, 3.4, 3.4, 3.4, 3.4, 9.0, 0.1):
        model.observe_forward(4, ms)
    assert model.slope == 0.0, "nine samples are too few"
    model.observe_forward(4, 3.4)
    assert model.slope == pytest.approx(0.1)
    assert model.step_ms(1, 5, 1) == pytest.approx([2.1, 3.4, 3.4, 3.4, 5.8, 5.8])
    assert model.step_ms(10, 1, 1) == pytest.approx([5.8 + 2 * 0.6, 5.8 + 3 * 0.6])
    for _ in range(10):
        model.observe_forward(8, 5.0 - 8 * 0.5)
        model.observe_forward(5, 1e9)  # no size of the curve
        model.observe_forward(9, 1e9)
    assert model.slope == pytest.approx((0.1 - 0.5) / 2)
    assert model.step_ms(1, 2, 1).tolist() == [2, 3, 3]


def test_sampler_is_the_median_at_the_number_of_requests_or_of_all() -> None:
    model = CostModel(CURVE)
    assert model.sampler_ms(3) == 0.0
    for ms in (1.0, 2.0, 3.0, 10.0):
        model.observe_sampler(3, ms)
    model.observe_sampler(8, 4.0)
    assert model.sampler_ms(3) == model.sampler_ms(7) == 3.0, "four samples are too few"
    model.observe_sampler(3, 11.0)
    assert (model.sampler_ms(3), model.sampler_ms(7)) == (3.0, 3.5)
    for _ in range(9):
        model.observe_sampler(3, 20.0)
    assert model.sampler_ms(3) == 20.0, "only the last nine count"
    model.observe_sampler(7, 1.0)
    assert model.sampler_ms(7) == float(np.median([1, 2, 3, 10, 4, 11, *[20] * 9, 1]))
    assert model.step_ms(1, 1, 3).tolist() == [22, 23]


def test_refinement_equals_what_numpy_says_of_the_last_5000() -> None:
    rng = np.random.default_rng(3)
    curve = CostCurve((1, 3, 9, 27), (1.0, 1.5, 2.0, 4.0))
    model = CostModel(curve)
    forwards, samplers = [], []
    for count in range(1, 12_001):
        # One size fades out, so that it falls below ten samples within the window.
        entry = int(rng.integers(4 if count < 5000 else 3))
        ms = float(curve.milliseconds[entry] + rng.normal(0.01, 0.05) * curve.sizes[entry])
        model.observe_forward(curve.sizes[entry], ms)
        forwards.append((entry, (ms - curve.milliseconds[entry]) / curve.sizes[entry]))
        requests, sampler = int(rng.integers(1, 200)), float(rng.gamma(2.0))
        model.observe_sampler(requests, sampler)
        samplers.append((requests, sampler))
        if count in (1, 9, 37, 500, 5000, 5001, 9990, 12_000):
            last = forwards[-5000:]
            groups = [np.array([v for e, v in last if e == k]) for k in range(4)]
            medians = [np.median(g) for g in groups if len(g) >= 10]
            assert model.slope == pytest.approx(np.median(medians) if medians else 0.0, rel=1e-12)
            for n in (1, 50, requests):
                same = [v for r, v in samplers if r == n][-9:]
                of_all = np.median([v for _, v in samplers[-5000:]])
                assert model.sampler_ms(n) == pytest.approx(np.median(same) if len(same) >= 5 else of_all)
    assert len(groups[3]) == 0 and len(medians) == 3


def test_ranks_that_adopt_one_refinement_see_one_cost() -> None:
    first, second = CostModel(CURVE), CostModel(CURVE)
    for model in (first, second):
        model.adopt(Refinement())
    for _ in range(10):
        first.observe_forward(4, 4.0)
        first.observe_sampler(2, 1.0)
        second.observe_forward(4, 400.0)
    second.observe_sampler(2, 100.0)
    assert first.step_ms(1, 7, 2).tolist() == second.step_ms(1, 7, 2).tolist() == [2, 3, 3, 3, 5, 5, 5, 5]
    sent = pickle.loads(pickle.dumps(first.refinement()))
    assert sent == Refinement(0.25, {2: 1.0}, 1.0)
    for model in (first, second):
        model.adopt(sent)
    for requests in (2, 3):
        expected = [3.25, 5.0, 5.0, 5.0, 8.0, 8.0, 8.0, 8.0]
        assert first.step_ms(1, 7, requests).tolist() == second.step_ms(1, 7, requests).tolist() == expected


@pytest.mark.parametrize("padded", [True, False])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, padded: bool) -> None:
    path = tmp_path / "new" / "curve.json"
    CostCurve((1, 4), (2.0, 3), padded, {"chip": "h200"}).save(path)
    found = CostCurve.load(path)
    assert found == CostCurve((1, 4), (2.0, 3.0), padded) and found.facts == {"chip": "h200"}
    assert os.listdir(path.parent) == ["curve.json"]


def test_a_failed_save_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    CURVE.save(path)
    with pytest.raises(TypeError):
        CostCurve((1,), (1.0,), facts={"not JSON": object()}).save(path)
    assert CostCurve.load(path) == CURVE and os.listdir(tmp_path) == ["curve.json"]


HEAD = {"format": cost_curve.FORMAT, "version": 1}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "Expecting"),
        ([1, 2], "expected an object"),
        ({"sizes": [1], "milliseconds": [1.0]}, "expected the format"),
        ({**HEAD, "version": 9, "sizes": [1], "milliseconds": [1.0]}, "version 9"),
        ({**HEAD, "sizes": [1]}, "the lists sizes and milliseconds"),
        ({**HEAD, "sizes": [], "milliseconds": []}, "at least one size"),
        ({**HEAD, "sizes": [1, 2], "milliseconds": [1.0]}, "2 sizes and 1 milliseconds"),
        ({**HEAD, "sizes": [1, 1], "milliseconds": [1, 2]}, "entry 1 is 1; expected a whole number above 1"),
        ({**HEAD, "sizes": [0], "milliseconds": [1]}, "entry 0 is 0; expected a whole number above 0"),
        ({**HEAD, "sizes": [1.5], "milliseconds": [1]}, "entry 0 is 1.5"),
        ({**HEAD, "sizes": [True], "milliseconds": [1]}, "entry 0 is True"),
        ({**HEAD, "sizes": [1, 2], "milliseconds": [1, 0]}, "entry 1 is 0; expected a positive number"),
        ({**HEAD, "sizes": [1], "milliseconds": [float("nan")]}, "entry 0 is nan"),
        ({**HEAD, "sizes": [1], "milliseconds": ["1"]}, "entry 0 is '1'"),
        ({**HEAD, "sizes": [1], "milliseconds": [1], "padded": 0}, "padded of a cost curve is 0"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, content: object, complaint: str) -> None:
    path = tmp_path / "curve.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=complaint) as error:
        CostCurve.load(path)
    assert str(error.value).startswith(f"{path}: ")


def test_the_cache_keeps_curves_by_key_until_they_expire(tmp_path: Path) -> None:
    clock = [1000.0]
    cache = CurveCache(tmp_path / "curves", ttl_s=60, now=lambda: clock[0])
    key = {"chip": "h200", "sizes": (1, 4, 8)}
    assert cache.load(key) is None
    path = cache.save(key, CURVE)
    assert cache.load(key) == CURVE
    assert cache.load({"sizes": (1, 4, 8), "chip": "h200"}) == CURVE, "the order of a key does not matter"
    assert cache.load({**key, "chip": "b200"}) is None
    clock[0] += 60
    assert cache.load(key) == CURVE
    clock[0] += 1
    assert cache.load(key) is None and path.exists()
    clock[0] = 0.0
    assert cache.load(key) is None, "from the future: the clock was set back"


def test_the_cache_never_gives_a_curve_of_another_key(tmp_path: Path) -> None:
    cache = CurveCache(tmp_path)
    key, other = {"chip": "h200"}, {"chip": "b200"}
    os.replace(cache.save(key, CURVE), cache.path(other))
    assert cache.load(other) is None
    CURVE.save(cache.path(key))
    assert cache.load(key) is None, "a curve without a key or a time is nobody's"


def test_the_cache_removes_what_expired_long_ago(tmp_path: Path) -> None:
    clock = [1_000_000.0]
    cache = CurveCache(tmp_path, ttl_s=60, now=lambda: clock[0])
    ages = {"old": 60 + 7200 + 1, "expired": 60 + 7200 - 1, "young": 1}
    for name, age in ages.items():
        os.utime(cache.save({"name": name}, CURVE), (clock[0] - age,) * 2)
    unrelated = tmp_path / "notes.json"
    unrelated.write_text("{}")
    os.utime(unrelated, (0, 0))
    cache.save({"name": "new"}, CURVE)
    kept = {cache.path({"name": name}).name for name in ("expired", "young", "new")}
    assert set(os.listdir(tmp_path)) == kept | {"notes.json"}


class TestFind:
    """A file that was named, else what an earlier start measured, else a measurement."""

    @pytest.fixture
    def measured(self) -> list[int]:
        return []

    def run(self, measured: list[int], settings: Settings, **key: str) -> CostCurve:
        def step(size: int) -> float:
            measured.append(size)
            return float(size)

        return find(settings, {"chip": "cpu", **key}, step, [4, 1], padded=False)

    def test_a_file_is_all_there_is(self, tmp_path: Path, measured: list[int]) -> None:
        CURVE.save(tmp_path / "mine.json")
        settings = Settings(cost_curve=str(tmp_path / "mine.json"), curve_cache=str(tmp_path / "cache"))
        assert self.run(measured, settings) == CURVE
        assert not measured and not (tmp_path / "cache").exists()
        with pytest.raises(ValueError, match="other.json: expected"):
            (tmp_path / "other.json").write_text("[]")
            self.run(measured, Settings(cost_curve=str(tmp_path / "other.json")))

    def test_measured_once_for_a_key(self, tmp_path: Path, measured: list[int]) -> None:
        settings = Settings(curve_cache=str(tmp_path))
        first = self.run(measured, settings)
        assert first == CostCurve((1, 4), (1.0, 4.0), padded=False) and len(measured) == 12
        assert self.run(measured, settings) == first and len(measured) == 12
        self.run(measured, settings, chip="another")
        assert len(measured) == 24

    def test_measured_every_time_without_a_folder(self, measured: list[int]) -> None:
        for count in (12, 24):
            self.run(measured, Settings())
            assert len(measured) == count


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_clock_measures_the_device_s_work(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    clock = Clock(torch.device(device))
    start = clock.mark()
    if device == "cuda":
        torch.cuda._sleep(50_000_000)
    else:
        time.sleep(0.02)
    end = clock.mark()
    clock.wait()
    assert clock.passed(start) and clock.passed(end)
    assert 15 < clock.milliseconds(start, end) < 1000
