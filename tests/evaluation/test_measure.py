"""Values and bars from numbers that are known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from deepinfer_plugins.evaluation.measure import (
    Evaluation,
    Perplexity,
    Speculation,
    count_accepted,
    noise_floor,
)
from deepinfer_plugins.features.calibration import Acceptance


def halves(*lengths: int) -> list[np.ndarray]:
    return [np.full(length, math.log(0.5)) for length in lengths]


def test_perplexity() -> None:
    found = Perplexity.of(halves(3, 5), [np.log(np.full(n, 0.125)) for n in (3, 5)])
    assert (found.tokens, found.model, found.baseline) == pytest.approx(
        (8, 2, 8)
    ) and found.ratio == pytest.approx(0.25)
    with pytest.raises(ValueError, match="scored 8 tokens in 2 sequences, the baseline 8 in 2"):
        Perplexity.of(halves(3, 5), halves(5, 3))


def test_perplexity_by_kind() -> None:
    found = Evaluation()
    found.add_scores(
        ["b", "a", "b"], [*halves(2, 4), np.zeros(2)], [np.log(np.full(n, 0.25)) for n in (2, 4, 2)]
    )
    assert found.perplexity is not None and found.perplexity.model == pytest.approx(2 ** (6 / 8))
    assert {kind: each.model for kind, each in found.perplexity_by_kind.items()} == pytest.approx(
        {"a": 2, "b": math.sqrt(2)}
    )
    assert [check.ok for check in found.checks()] == [True]


def test_speculation() -> None:
    """Ten verifications of three drafts: 4 accept none, 3 one, 1 two, 2 all."""
    found = Speculation.of([4, 3, 1, 2])
    assert (found.verifications, found.mean_length) == (10, pytest.approx(1 + (3 + 2 + 6) / 10))
    assert found.rates == pytest.approx((0.6, 0.3, 0.2))


def log(verified: list[int], accepted: list[int]) -> Acceptance:
    logits = np.zeros((len(verified), 3))
    return Acceptance.of(logits, verified, accepted)


def test_texts_that_end_inside_a_window_are_left_out() -> None:
    assert count_accepted(log([3, 2, 3, 1, 3], [3, 2, 0, 1, 1]), 3) == [1, 1, 0, 1]


def test_drafts_by_kind() -> None:
    found = Evaluation()
    found.add_drafts({"a": [1, 0, 0, 1], "b": [0, 0, 0, 4]}, log([3] * 6, [0, 3, 3, 3, 3, 3]), "engine")
    assert found.speculation is not None and found.speculation.mean_length == pytest.approx(1 + 15 / 6)
    assert found.speculation_by_kind["a"].mean_length == pytest.approx(2.5)
    assert found.calibration is not None and found.not_measured == {}


def test_what_an_engine_does_not_tell_is_named() -> None:
    found = Evaluation()
    found.add_drafts({"a": [0, 0, 0, 0]}, log([], []), "engine")
    assert found.not_measured == {
        "acceptance": "engine verified no drafts, or did not count them",
        "calibration": "engine logged no confidences of drafts",
    }
    counted = Evaluation()
    counted.add_drafts({"a": [5, 1, 0, 0]}, log([], []), "engine")
    assert list(counted.not_measured) == ["calibration"] and counted.speculation is not None
    assert [check.ok for check in counted.checks()] == [False]


def test_a_calibration_error_that_chance_explains_is_no_failure() -> None:
    """Confidence is one half, and all drafts are accepted: wrong by one half, with few samples and with many."""
    for samples, ok in ((50, None), (5000, False)):
        found = Evaluation()
        found.add_drafts({"a": [0, 0, 0, samples]}, log([3] * samples, [3] * samples), "engine")
        assert [check.ok for check in found.checks()] == [True, ok, ok, ok], samples
        # JSON has no NaN.
        json.loads(json.dumps(found.as_dict()), parse_constant=lambda name: pytest.fail(name))


def test_noise_floor() -> None:
    """Of calibrated confidences, drawn: the error is about what is said."""
    from deepinfer_plugins.features.calibration import expected_calibration_error

    rng = np.random.default_rng(0)
    for samples in (300, 3000):
        errors = []
        for _ in range(200):
            confidence = rng.random(samples)
            errors.append(expected_calibration_error(confidence, rng.random(samples) < confidence))
        assert np.mean(errors) == pytest.approx(noise_floor(samples), rel=0.3)
    assert noise_floor(0) == math.inf
