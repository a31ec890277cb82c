"""Calibration finds the temperatures that data was made with, and its error is small where it should be."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_plugins.features import calibration
from deepinfer_plugins.features.calibration import Acceptance, AcceptanceLog

TEMPERATURES = (0.5, 0.8, 1.0, 1.7, 3.0)


def log_of(rows: int, temperatures: tuple[float, ...], seed: int = 0, trim: bool = False) -> Acceptance:
    """Drafts that are accepted as often as their logits over these temperatures say."""
    rng = np.random.default_rng(seed)
    depth = len(temperatures)
    logits = rng.normal(1.0, 2.0, (rows, depth))
    taken = rng.random((rows, depth)) < 1.0 / (1.0 + np.exp(-logits / temperatures))
    verified = np.full(rows, depth)
    if trim:
        # As a schedule does: by the logits before, never by the outcome.
        verified = (np.cumprod(1.0 / (1.0 + np.exp(-logits)), axis=1) > 0.2).sum(axis=1)
    accepted = np.minimum(np.cumprod(taken, axis=1).sum(axis=1), verified)
    return Acceptance.of(logits, verified, accepted)


@pytest.mark.parametrize("trim", [False, True])
def test_known_temperatures_are_recovered(trim: bool) -> None:
    found = calibration.calibrate(log_of(60_000, TEMPERATURES, trim=trim))
    assert found.temperatures == pytest.approx(TEMPERATURES, rel=0.12)
    for position in found.positions:
        assert position.likelihood_after <= position.likelihood_before + 1e-12
        assert position.error_after < 0.02
    assert found.positions[4].error_before > 0.1
    assert [position.pooled for position in found.positions] == [False] * 5


def test_observed_are_the_accepted_and_the_first_rejected() -> None:
    log = Acceptance.of(np.zeros((4, 3)), verified=[3, 3, 2, 0], accepted=[3, 1, 2, 0])
    assert log.observed.tolist() == [[True] * 3, [True, True, False], [True, True, False], [False] * 3]
    assert [log.position(1)[1].tolist(), log.position(2)[1].tolist()] == [[1.0, 0.0, 1.0], [1.0]]


def test_error_of_calibrated_confidences_is_small_and_of_others_is_their_distance() -> None:
    rng = np.random.default_rng(1)
    confidence = rng.random(100_000)
    outcomes = rng.random(100_000) < confidence
    assert calibration.expected_calibration_error(confidence, outcomes) < 0.008
    # Always 0.9 sure and right half of the time: off by 0.4.
    halves = np.arange(1000) % 2
    assert calibration.expected_calibration_error(np.full(1000, 0.9), halves) == pytest.approx(0.4)
    assert math.isnan(calibration.expected_calibration_error([], []))


def test_bins_hold_their_upper_end_and_the_first_also_zero() -> None:
    values = [0.0, 0.2, 0.2000001, 0.4, 0.6, 1.0]
    bins = calibration.reliability(values, [0, 1, 1, 0, 1, 1], bins=5)
    assert [b.samples for b in bins] == [2, 2, 1, 0, 1]
    assert bins[0].acceptance == 0.5 and bins[0].mean_confidence == pytest.approx(0.1)
    assert math.isnan(bins[3].acceptance)


@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_error_is_the_sum_over_bins(samples: int, bins: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    confidence, outcomes = rng.random(samples), rng.integers(0, 2, samples)
    expected = 0.0
    for k in range(bins):
        inside = [(c, o) for c, o in zip(confidence, outcomes) if k / bins < c <= (k + 1) / bins]
        if inside:
            expected += abs(sum(o for _, o in inside) - sum(c for c, _ in inside)) / samples
    assert calibration.expected_calibration_error(confidence, outcomes, bins) == pytest.approx(expected)


@given(st.integers(2, 200), st.floats(-3.0, 3.0), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_no_temperature_is_likelier_than_the_fitted_one(samples: int, mean: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, outcomes = rng.normal(mean, 2.0, samples), rng.integers(0, 2, samples)
    best = calibration.fit_temperature(logits, outcomes)
    assert 0.05 <= best <= 20.0
    least = calibration.negative_log_likelihood(logits, outcomes, best)
    for temperature in np.geomspace(0.05, 20.0, 60):
        assert least <= calibration.negative_log_likelihood(logits, outcomes, temperature) + 1e-9


def test_fits_without_an_optimum_take_an_end() -> None:
    assert calibration.fit_temperature([-2.0, 3.0], [0, 1]) == 0.05
    assert calibration.fit_temperature([-2.0, 3.0], [1, 0]) == 20.0
    assert calibration.fit_temperature([], []) == 1.0


def test_positions_with_few_samples_share_a_temperature() -> None:
    log = log_of(calibration.LEAST_SAMPLES + 20, (2.0, 2.0, 2.0, 2.0))
    found = calibration.calibrate(log)
    assert [position.pooled for position in found.positions] == [False, True, True, True]
    pooled = calibration.fit_temperature(log.confidence_logits[log.observed], log.outcome[log.observed])
    assert found.temperatures[1:] == (pooled,) * 3


def test_a_log_is_read_as_it_was_written_and_logs_add_up(tmp_path: Path) -> None:
    log = log_of(200, TEMPERATURES, trim=True)
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    with AcceptanceLog(one, model="m") as writer:
        writer.write(log.confidence_logits[:50], log.verified[:50], log.accepted[:50])
    with AcceptanceLog(one) as writer:
        writer.write(log.confidence_logits[50:120], log.verified[50:120], log.accepted[50:120])
    with AcceptanceLog(two) as writer:
        writer.write(log.confidence_logits[120:], log.verified[120:], log.accepted[120:])
    assert json.loads(one.read_text().splitlines()[0])["model"] == "m"
    found = calibration.read_logs([one, two])
    kept = log.verified > 0
    assert found.verified.tolist() == log.verified[kept].tolist()
    assert found.accepted.tolist() == log.accepted[kept].tolist()
    expected = log.confidence_logits[kept][log.observed[kept]]
    np.testing.assert_allclose(found.confidence_logits[found.observed], expected, atol=1e-6)
    assert calibration.calibrate(found).temperatures == pytest.approx(
        calibration.calibrate(log).temperatures, rel=1e-3
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"verified": 1, "accepted": 1}', "confidence_logits"),
        ('{"confidence_logits": [0.5], "verified": "1", "accepted": 1}', "whole numbers"),
        ('{"confidence_logits": [0.5], "verified": 2, "accepted": 1}', "1 accepted of 2 verified of 1"),
        ('{"confidence_logits": [0.5], "verified": 1, "accepted": 2}', "2 accepted of 1"),
        ('{"confidence_logits": [NaN], "verified": 1, "accepted": 1}', "finite"),
        ('{"format": "deepinfer-plugins acceptance log", "version": 2}', "version 2"),
    ],
)
def test_a_broken_log_is_refused_by_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "log.jsonl"
    AcceptanceLog(path).close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=complaint) as error:
        calibration.read_logs([path])
    assert f"{path}, line 2" in str(error.value)


def test_a_file_without_a_format_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"confidence_logits": [0.5], "verified": 1, "accepted": 1}\n')
    with pytest.raises(ValueError, match="line 1: expected the format"):
        calibration.read_logs([path])


def test_rows_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1: 2 accepted of 1 verified"):
        Acceptance.of(np.zeros((2, 3)), [1, 1], [0, 2])
    with pytest.raises(ValueError, match="row 0: the confidence logit of draft 1"):
        Acceptance.of([[0.0, np.inf]], [2], [1])
    with pytest.raises(ValueError, match=r"\[n, depth\]"):
        Acceptance.of([0.0], [1], [1])
    # What nobody observed may be anything.
    Acceptance.of([[0.0, np.nan]], [1], [1])


def test_a_setting_is_one_temperature_or_one_for_each_position() -> None:
    assert calibration.per_position((0.7,), 3) == (0.7, 0.7, 0.7)
    assert calibration.per_position((0.7, 1.0), 2) == (0.7, 1.0)
    assert calibration.per_position((1e-9,), 1) == (1e-5,)
    with pytest.raises(ValueError, match="2 confidence temperatures for 5 drafts"):
        calibration.per_position((0.7, 1.0), 5)


def test_confidences_are_the_sigmoid_over_the_temperature_of_the_position() -> None:
    found = calibration.confidences([[2.0, -1.0]], (2.0, 0.5))
    np.testing.assert_allclose(found, [[1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))]], rtol=1e-15)
    assert 0.0 < calibration.confidences(-1e9) < calibration.confidences(1e9) <= 1.0


def test_json_has_null_for_what_nobody_measured() -> None:
    found = calibration.calibrate(Acceptance.of(np.zeros((1, 2)), [1], [0])).as_dict()
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text)["positions"][1]["acceptance"] is None
    assert found["positions"][0]["samples"] == 1
