"""Tokens do not depend on drafts: how many, how many of them are verified, and what happens around them."""

from __future__ import annotations

import concurrent.futures
import json
import math
import string
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer_plugins.features.cost_curve import PHASES, CostCurve
from deepinfer_plugins.features.sampling import SamplingParams

POISON = {"DEEPINFER_TEST_POISON_CACHES": "1"}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
COUNT = 12


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module")
def five(serve: Any) -> Iterator[Any]:
    """Five drafts by SGLang's flags, every one verified."""
    with serve(
        *("--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "5"),
        *("--chunked-prefill-size", "128", "--enable-metrics", "--reasoning-parser", "deepseek-v41"),
        **POISON,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def eight(serve: Any) -> Iterator[Any]:
    """Eight by DeepInfer's variables, of which any number is verified; odd pages and chunks, no overlap."""
    with serve(
        *(
            "--page-size",
            "1",
            "--chunked-prefill-size",
            "63",
            "--disable-overlap-schedule",
            "--enable-metrics",
        ),
        DEEPINFER_USE_NEXTN_DECODE="8",
        DEEPINFER_ENABLE_MTP_VARLEN="1",
        DEEPINFER_PLUGINS_VERIFY_BUDGET="random:3",
        DEEPINFER_PLUGINS_VERIFY="coupling",
        **POISON,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``tight`` keeps what its steps cost."""
    return tmp_path_factory.mktemp("costs")


@pytest.fixture(scope="module")
def tight(serve: Any, costs: Path) -> Iterator[Any]:
    """Two drafts, verified as far as that pays, and memory for fewer requests than are admitted."""
    with serve(
        *("--page-size", "1", "--chunked-prefill-size", "32", "--enable-mixed-chunk", "--enable-metrics"),
        *("--max-total-tokens", "400", "--schedule-conservativeness", "0.05", "--max-running-requests", "16"),
        DEEPINFER_USE_NEXTN_DECODE="2",
        SGLANG_RAGGED_VERIFY_MODE="compact",
        DEEPINFER_DECODE_PERF_CACHE_DIR=str(costs),
        **POISON,
    ) as running:
        yield running


@pytest.fixture(params=["five", "eight"])
def drafting(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def counters(server: Any) -> dict[str, float]:
    """Our counters in the Prometheus endpoint."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if line.startswith("deepinfer:"))
    return {name.removeprefix("deepinfer:spec_"): float(value) for name, value in rows}


@pytest.mark.parametrize("batch", [1, 16])
def test_greedy(drafting: Any, reference: Any, prompts: list[list[int]], batch: int) -> None:
    drafting.flush()
    chosen = prompts if batch == 16 else [prompts[0], prompts[9]]
    for start in range(0, len(chosen), batch):
        group = chosen[start : start + batch]
        for prompt, found in zip(group, drafting.tokens(group, 24), strict=True):
            reference.check(prompt, found, f"drafts in a batch of {batch}")


def test_more_requests_than_run_at_once(
    drafting: Any, sampled: Any, few: Any, prompts: list[list[int]]
) -> None:
    """36 of a server's 32 at a time, of different lengths: slots change their owners from one step to the next."""
    chosen = [prompts[index % 6] for index in range(36)]
    params = [SamplingParams(seed=seed, logit_bias=few) for seed in range(36)]
    counts = [2 + 2 * (seed % 5) for seed in range(36)]
    wanted = sampled(chosen, params, max(counts))
    given = [
        {"sampling_seed": seed, "logit_bias": few, "max_new_tokens": count}
        for seed, count in enumerate(counts)
    ]
    found = tokens(drafting.ask(chosen, given))
    assert found == [made.token_ids[:count] for made, count in zip(wanted, counts, strict=True)]


def test_every_way_of_sampling(drafting: Any, sampled: Any, cases: Any, prompts: list[list[int]]) -> None:
    chosen = prompts[3 : 3 + len(cases)]
    wanted = [made.token_ids for made in sampled(chosen, [params for _, params in cases], COUNT)]
    assert tokens(drafting.ask(chosen, [given for given, _ in cases])) == wanted


def test_drafts_are_those_of_the_loop_without_an_engine(
    five: Any, sampled: Any, few: Any, prompts: list[list[int]]
) -> None:
    """Wrong drafts would go unnoticed in the tokens: what is accepted, and how often, must be the same too.

    With prompts that are chunked, found again in part, and longer than the window; caches hold NaN.
    """
    five.flush()
    chosen = [prompts[4], prompts[12], [*prompts[12][:200], *prompts[5]]]
    params = SamplingParams(seed=0, temperature=0, logit_bias=few)
    wanted = sampled(chosen, [params] * len(chosen), 16, depth=5)
    hits, beyond = 0, 0
    for prompt, made in zip(chosen, wanted, strict=True):
        (answer,) = five.ask([prompt], [{"temperature": 0, "logit_bias": few}], 16)
        assert answer["output_ids"] == made.token_ids
        histogram = answer["meta_info"]["spec_correct_drafts_histogram"]
        # What is accepted behind the end counts for SGLang, and not for the loop.
        accepted = [verification.accepted for verification in made.verifications]
        assert sum(histogram) == len(accepted)
        assert 0 <= sum(index * count for index, count in enumerate(histogram)) - sum(accepted) <= 5
        hits += answer["meta_info"]["cached_tokens"]
        beyond += sum(accepted)
    assert hits >= 128 and beyond > 0


def test_an_end_inside_a_window(five: Any, sampled: Any, few: Any, prompts: list[list[int]]) -> None:
    """By length, by a stop token, and by a stop string."""
    prompt = prompts[9]
    (made,) = sampled([prompt], [SamplingParams(seed=0, temperature=0, logit_bias=few)], 24)
    params = {"temperature": 0, "logit_bias": few}
    counts = list(range(1, 12))
    answers = five.ask([prompt] * len(counts), [{**params, "max_new_tokens": count} for count in counts])
    assert tokens(answers) == [made.token_ids[:count] for count in counts]
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
    last = made.token_ids[7]
    end = made.token_ids.index(last) + 1
    stop = {**params, "ignore_eos": False, "stop_token_ids": [last]}
    (whole, stopped) = five.ask([prompt] * 2, [params, stop], 24)
    assert stopped["output_ids"] == made.token_ids[:end]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": last}
    word = whole["text"][5:8]
    (cut,) = five.ask([prompt], [{**params, "stop": [word]}], 24)
    assert cut["text"] == whole["text"][: whole["text"].index(word)]


def test_a_stop_string_of_many_tokens(
    server: Any, five: Any, checkpoint: Any, prompts: list[list[int]]
) -> None:
    """It is generated in twenty tokens, and its own encoding has ten: with drafts or without, it is found."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    letters = {tokenizer.token_to_id(letter): 40.0 for letter in "ab"}
    params = {"temperature": 0, "logit_bias": letters, "regex": "(ab){15}", "ignore_eos": False}
    stop = 10 * "ab"
    assert len(tokenizer.encode(stop, add_special_tokens=False).ids) == 10
    for running in (server, five):
        whole, cut = running.ask([prompts[9]] * 2, [params, {**params, "stop": [stop]}], 30)
        assert (whole["text"], len(whole["output_ids"])) == (15 * "ab", 30)
        assert cut["output_ids"] == whole["output_ids"][:20]
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_grammars(server: Any, drafting: Any, prompts: list[list[int]]) -> None:
    """Beside requests without one, and next to one whose grammar is none."""
    params: list[dict[str, Any]] = [
        {"json_schema": SCHEMA, "sampling_seed": 1, "max_new_tokens": 40, "ignore_eos": False},
        {"sampling_seed": 2},
        {"regex": "(ab|cd){3}[0-9]", "temperature": 0, "max_new_tokens": 20, "ignore_eos": False},
        {"json_schema": SCHEMA, "temperature": 0, "max_new_tokens": 40, "ignore_eos": False},
    ]
    chosen = [prompts[3], prompts[4], prompts[5], prompts[6]]
    found = drafting.ask(chosen, params)
    assert tokens(found) == tokens(server.ask(chosen, params))
    for answer in (found[0], found[3]):
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert set(json.loads(answer["text"])) == {"a", "b"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        good = pool.submit(drafting.ask, chosen[1:2], params[1:2])
        with pytest.raises(Exception) as error:
            drafting.ask(chosen[:1], [{"regex": "(", "max_new_tokens": 4}])
        assert getattr(error.value, "status", None) == 400, error.value
        assert tokens(good.result()) == tokens(found)[1:2]


def test_drafts_follow_grammars(five: Any, checkpoint: Any, prompts: list[list[int]]) -> None:
    """Where one token is all that comes next, even a model that was never trained drafts it: six tokens a step."""
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    letter = next(each for each in string.ascii_letters if each in vocabulary and 2 * each not in vocabulary)
    regex = {"regex": f"{letter}{{25}}", "temperature": 0, "max_new_tokens": 40, "ignore_eos": False}
    answers = five.ask(prompts[3:5], [regex, {**regex, "temperature": 1, "sampling_seed": 3}])
    for answer in answers:
        assert answer["text"] == 25 * letter
        # One of the prompt, four times six, and the end.
        assert answer["meta_info"]["spec_verify_ct"] == 5


def test_a_reasoning_s_end_inside_a_window(
    five: Any, sampled: Any, checkpoint: Any, prompts: list[list[int]]
) -> None:
    """The grammar begins behind it, at a draft: what is before is as without a grammar."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    think_end, letter, word = (tokenizer.token_to_id(text) for text in ("</think>", "q", "a"))
    assert tokenizer.encode("qq", add_special_tokens=False).ids == [letter] * 2
    # Once the word was said, the reasoning's end is more probable, by far: its drafts are accepted.
    bias, penalty = {word: 90.0, think_end: 60.0}, 2.0
    chosen, seeds = prompts[3:7], (None, 3, 4, 5)
    of_the_loop = [
        SamplingParams(seed or 0, 0.0 if seed is None else 1.0, logit_bias=bias, repetition_penalty=penalty)
        for seed in seeds
    ]
    given = [
        {"logit_bias": bias, "repetition_penalty": penalty, "regex": "q{19}", "ignore_eos": False}
        | ({"temperature": 0} if seed is None else {"sampling_seed": seed})
        for seed in seeds
    ]
    answers = five.ask(chosen, given, 40, require_reasoning=True)
    inside = 0
    for answer, made in zip(answers, sampled(chosen, of_the_loop, COUNT), strict=True):
        before = made.token_ids[: made.token_ids.index(think_end) + 1]
        assert answer["output_ids"][:-1] == before + [letter] * 19
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        # A step brings six tokens at most; these are as many as if the reasoning's end had been the last of its step.
        inside += answer["meta_info"]["spec_verify_ct"] < -(-(len(before) - 1) // 6) + -(-20 // 6)
    assert inside


def test_logprobs(server: Any, drafting: Any, cases: Any, prompts: list[list[int]]) -> None:
    """Of every token and of the best of each position, as without drafts, to the bit."""
    params = [cases[index][0] for index in (0, 3, 5)]
    more = {"return_logprob": True, "top_logprobs_num": 3}
    wanted, found = (engine.ask(prompts[4:7], params, **more) for engine in (server, drafting))
    for one, other in zip(wanted, found, strict=True):
        for key in ("output_token_logprobs", "output_top_logprobs"):
            assert one["meta_info"][key] == other["meta_info"][key]


def test_aborted_requests(drafting: Any, sampled: Any, few: Any, prompts: list[list[int]]) -> None:
    """Those beside them and those after them, in the same slots, notice nothing."""
    given = {"sampling_seed": 3, "logit_bias": few}
    (made,) = sampled([prompts[5]], [SamplingParams(seed=3, logit_bias=few)], 40)
    endless = {"presence_penalty": 1.5, "sampling_seed": 9, "max_new_tokens": 3000, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        doomed = [
            pool.submit(
                drafting.post,
                "/generate",
                {"input_ids": prompts[4], "sampling_params": endless, "rid": f"doomed-{i}"},
            )
            for i in range(3)
        ]
        beside = pool.submit(drafting.ask, [prompts[5]], [given], 40)
        assert tokens(beside.result()) == [made.token_ids]
        drafting.post("/abort_request", {"rid": "doomed", "abort_all": True})
        for future in doomed:
            assert future.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert tokens(drafting.ask([prompts[5]] * 4, [given] * 4, 40)) == [made.token_ids] * 4


def test_retraction(tight: Any, costs: Path, reference: Any, sampled: Any, prompts: list[list[int]]) -> None:
    """Eight requests that do not fit: some are thrown out in the middle, and start again with what they have.

    Verification is scheduled, by what steps were measured to cost.
    """
    (file,) = costs.iterdir()
    curve = CostCurve.load(file)
    assert curve.largest == 16 * 3 and len(curve.sizes) > 8
    group = [prompt for prompt in prompts if len(prompt) <= 63]
    params: list[dict[str, Any]] = [{"temperature": 0, "ignore_eos": False} for _ in group]
    params[2] = {"sampling_seed": 4, "frequency_penalty": 0.4, "ignore_eos": False}
    answers = tight.ask(group, params, 64)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    (made,) = sampled([group[2]], [SamplingParams(seed=4, frequency_penalty=0.4)], 64)
    for index, (prompt, found) in enumerate(zip(group, tokens(answers), strict=True)):
        if index == 2:
            assert found == made.token_ids[: len(found)]
        else:
            reference.check(prompt, found, "two drafts, retraction")
    verified = counters(tight)["budget_tokens_total"]
    assert 0 < verified <= counters(tight)["drafted_tokens_total"]


def test_rejection_keeps_what_coupling_does_not_promise(five: Any, prompts: list[list[int]]) -> None:
    """A request without a seed is verified by rejection: its tokens are still among those that its parameters allow.

    The temperature makes the two that are left about equally likely, so that six answers of 30 differ but for
    one run in ten million; at 1 the model prefers one so much that two in a hundred pairs are the same.
    """
    free = {
        "max_new_tokens": 30,
        "ignore_eos": True,
        "temperature": 20.0,
        "top_k": 2,
        "logit_bias": {"3": 30, "17": 30},
    }
    answers = five.ask([prompts[4]] * 6, [free] * 6)
    assert {token for found in tokens(answers) for token in found} == {3, 17}
    assert len({tuple(found) for found in tokens(answers)}) == 6


def test_a_reported_seed_repeats_an_answer_by_coupling(eight: Any, prompts: list[list[int]]) -> None:
    """Whatever of its drafts was verified."""
    free = {"max_new_tokens": 24, "ignore_eos": True}
    one, other = eight.ask([prompts[5]] * 2, [free] * 2)
    (seed,) = one["meta_info"]["sampling_seed"]
    (again,) = eight.ask([prompts[5]], [{**free, "sampling_seed": seed}])
    assert again["output_ids"] == one["output_ids"] != other["output_ids"]


def test_counters(five: Any, eight: Any, few: Any, prompts: list[list[int]]) -> None:
    for server, depth in ((five, 5), (eight, 8)):
        before = counters(server)
        server.ask(prompts[2:5], [{"temperature": 0, "logit_bias": few}] * 3, 20)
        found = {name: value - before.get(name, 0) for name, value in counters(server).items()}
        verifications = found["verifications_total"]
        assert found["drafted_tokens_total"] == depth * verifications >= depth * found["steps_total"] > 0
        verified = [found[f'verified_tokens_total{{position="{i}"}}'] for i in range(depth)]
        accepted = [found[f'accepted_tokens_total{{position="{i}"}}'] for i in range(depth)]
        assert sum(verified) == found["budget_tokens_total"]
        assert all(a <= v for a, v in zip(accepted, verified, strict=True)) and sum(accepted) > 0
        assert verified == sorted(verified, reverse=True) and accepted == sorted(accepted, reverse=True)
        if depth == 5:
            assert verified == [verifications] * 5
        else:
            assert sum(verified) < depth * verifications
        # 3 prompts make the first of 20 tokens each; those behind an end are accepted too.
        assert 3 * 19 <= verifications + sum(accepted) <= 3 * 19 + 3 * depth + 3 * (depth + 1)
        seconds = {phase: found[f'phase_seconds_total{{phase="{phase}"}}'] for phase in PHASES}
        # Where nothing schedules verification, asking for a schedule takes no time.
        assert 0 < seconds["schedule"] < (0.01 if depth == 5 else math.inf)
        assert all(0 < seconds[phase] < math.inf for phase in ("draft", "forward", "sample"))


def test_a_window_of_rows() -> None:
    """Of three requests, with all, one and none of their drafts."""
    from deepinfer_plugins.sglang_ext.worker import Window

    drafts = torch.tensor([[11, 12], [21, 22], [31, 32]])
    window = Window.of(torch.tensor([10, 20, 30]), drafts, torch.tensor([2, 1, 0]), 6)
    assert window.token_ids.tolist() == [10, 11, 12, 20, 21, 30]
    assert window.request.tolist() == [0, 0, 0, 1, 1, 2] and window.offsets.tolist() == [0, 3, 5, 6]
    assert window.place.tolist() == [0, 1, 2, 0, 1, 0]
    assert window.prefix.tolist() == [[-1, -1], [11, -1], [11, 12], [-1, -1], [21, -1], [-1, -1]]
