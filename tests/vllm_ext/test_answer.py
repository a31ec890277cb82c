"""What runs requests in vLLM for ``verify``: it sees preemptions, aborts and the tokens of every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer_plugins.evaluation.identity import KINDS, Request
from deepinfer_plugins.vllm_ext.answer import VllmAnswerer

LENGTHS = (1, 60, 33, 7, 21, 2, 50, 12)


@pytest.fixture(scope="module")
def answerer(tiny: Any) -> Iterator[VllmAnswerer]:
    """Three drafts, small steps, and caches for no more than one of the longest sequences."""
    from vllm.distributed import cleanup_dist_env_and_memory

    made = VllmAnswerer(
        str(tiny.folder), 3, 80, at_once=8, small_pages=True, chunk=32, tight=True, engine_options={}
    )
    yield made
    made.close()
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def requests(prompts: list[list[int]]) -> list[Request]:
    """Every kind that ``verify`` asks for, as they come out of JSON."""
    return [
        Request(prompt=prompts[-1][i : i + length], max_tokens=16, seed=i, options=KINDS[i])
        for i, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def whole(answerer: VllmAnswerer, requests: list[Request]) -> tuple[list[Any], dict[str, int], int]:
    """Answers, counters, and how many requests were said to be done."""
    done: list[None] = []
    answers, counters = answerer.answer(requests, 8, {}, lambda: done.append(None))
    return answers, counters, len(done)


def test_answers_and_counters(whole: Any, requests: list[Request], tiny: Any) -> None:
    answers, counters, num_done = whole
    assert num_done == 8 and counters["preemptions"] > 0 and counters["aborted"] == 0
    assert 0 < counters["accepted"] < counters["verified"] == counters["drafted"]
    for request, answer in zip(requests, answers, strict=True):
        # Text under a grammar ends with it.
        assert len(answer["tokens"]) == 16 or "json_schema" in request["options"]
        assert sum(answer["steps"]) == len(answer["tokens"]) == len(answer["logprobs"])
        assert answer["error"] is None and max(answer["logprobs"]) <= 0 < min(answer["steps"])
    # Of few tokens to choose from, some are drafted.
    assert max(answers[-1]["steps"]) > 1 and set(answers[-1]["tokens"]) <= {40, 41, 42}
    tiny.check(requests[0]["prompt"], answers[0]["tokens"], "preempted")


def test_aborts(answerer: VllmAnswerer, whole: Any, requests: list[Request]) -> None:
    """Two at a time; what an aborted request has by then is a beginning of its answer."""
    wanted = whole[0]
    done: list[None] = []
    answers, counters = answerer.answer(requests, 2, {1: 1, 6: 5}, lambda: done.append(None))
    assert counters["aborted"] == 2 and len(done) == 8
    for index, (one, other) in enumerate(zip(wanted, answers, strict=True)):
        length = len(other["tokens"])
        assert (length < 16) == (index in (1, 6)) or "json_schema" in requests[index]["options"]
        assert other["tokens"] == one["tokens"][:length] and other["logprobs"] == one["logprobs"][:length]
        assert other["error"] is None
    assert len(answers[6]["tokens"]) >= 5
