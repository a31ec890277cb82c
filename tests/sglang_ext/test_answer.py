"""What runs requests in SGLang for ``verify``: it sees retractions, aborts and the tokens of every step."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugins.evaluation.identity import KINDS, Request
from deepinfer_plugins.sglang_ext.answer import SglangAnswerer

LENGTHS = (1, 9, 33, 7, 5, 2, 4, 12)


@pytest.fixture(scope="module")
def answerer(checkpoint: Path, engine_environment: Any) -> Iterator[SglangAnswerer]:
    """Eight drafts of which any number is verified, small chunks and caches, and requests that are retracted."""
    more = {"DEEPINFER_ENABLE_MTP_VARLEN": "1", "DEEPINFER_PLUGINS_VERIFY_BUDGET": "random:2"}
    with pytest.MonkeyPatch.context() as patch:
        # The scheduler's process takes this one's.
        for name, value in engine_environment(**more).items():
            patch.setenv(name, value)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        # What it sets itself.
        for name in ("DEEPINFER_USE_NEXTN_DECODE", "SGLANG_TEST_RETRACT", "SGLANG_TEST_RETRACT_INTERVAL"):
            patch.setenv(name, "0")
        made = SglangAnswerer(
            str(checkpoint), 8, 80, at_once=8, small_pages=True, chunk=32, tight=True, engine_options={}
        )
        yield made
        made.close()


@pytest.fixture(scope="module")
def requests(prompts: list[list[int]]) -> list[Request]:
    """Every kind that ``verify`` asks for, as they come out of JSON."""
    return [
        Request(prompt=prompts[-1][i : i + length], max_tokens=16, seed=i, options=KINDS[i])
        for i, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def whole(answerer: SglangAnswerer, requests: list[Request]) -> tuple[list[Any], dict[str, int], int]:
    """Answers, counters, and how many requests were said to be done."""
    done: list[None] = []
    answers, counters = answerer.answer(requests, 8, {}, lambda: done.append(None))
    return answers, counters, len(done)


def test_answers_and_counters(whole: Any, requests: list[Request], reference: Any) -> None:
    answers, counters, num_done = whole
    assert num_done == 8 and counters["preemptions"] > 0 and counters["aborted"] == 0
    assert 0 < counters["accepted"] < counters["verified"] < counters["drafted"]
    for request, answer in zip(requests, answers, strict=True):
        # Text under a grammar ends with it.
        assert len(answer["tokens"]) == 16 or "json_schema" in request["options"]
        assert sum(answer["steps"]) == len(answer["tokens"]) == len(answer["logprobs"])
        assert answer["error"] is None and max(answer["logprobs"]) <= 0 < min(answer["steps"])
    # Of few tokens to choose from, some are drafted.
    assert max(answers[-1]["steps"]) > 1 and set(answers[-1]["tokens"]) <= {40, 41, 42}
    reference.check(requests[0]["prompt"], answers[0]["tokens"], "retracted")


def test_aborts_and_cached_prefixes(answerer: SglangAnswerer, whole: Any, requests: list[Request]) -> None:
    """Two at a time; what an aborted request has by then is a beginning of its answer."""
    wanted = whole[0]
    answerer.forget()
    answers, counters = answerer.answer(requests, 2, {1: 1, 6: 2}, lambda: None)
    assert 0 < counters["aborted"] <= 2 and not any(answer["cached"] for answer in answers)
    for index, (one, other) in enumerate(zip(wanted, answers, strict=True)):
        length = len(other["tokens"])
        assert index in (1, 6) or length == len(one["tokens"])
        assert other["tokens"] == one["tokens"][:length] and other["logprobs"] == one["logprobs"][:length]
        assert other["error"] is None
    for _ in range(2):
        (again,), _ = answerer.answer(requests[2:3], 1, {}, lambda: None)
    assert again["cached"] > 0 and again["tokens"] == wanted[2]["tokens"]


def test_the_end_of_the_context(answerer: SglangAnswerer, checkpoint: Path, prompts: list[list[int]]) -> None:
    """Windows of drafts, all of them accepted, that go past it from everywhere before it; the engine lives on."""
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    letter = next(each for each in string.ascii_letters if each in vocabulary and 2 * each not in vocabulary)
    options = {"temperature": 0, "regex": f"{letter}{{99}}"}
    asked = [
        Request(prompt=prompts[-1][:length], max_tokens=80 - length, seed=1, options=options)
        for length in range(50, 62)
    ]
    answers, counters = answerer.answer(asked, 2, {}, lambda: None)
    assert counters["accepted"] > 50
    for request, answer in zip(asked, answers, strict=True):
        assert answer["error"] is None and set(answer["tokens"]) == {vocabulary[letter]}
        # SGLang's end of a context.
        assert len(request["prompt"]) + len(answer["tokens"]) == 78
