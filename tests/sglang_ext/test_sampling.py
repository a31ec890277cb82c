"""SGLang samples as the model's own loop does: the same tokens for a prompt, parameters and a seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from deepinfer_plugins.features.sampling import SamplingParams
from deepinfer_plugins.sglang_ext import seeds

# SGLang's parameters, and what they are in no engine's words. A bias that leaves a few tokens to choose from makes
# them repeat, and drafts be accepted.
FEW = {3: 12.0, 17: 11.0, 400: 12.5, 1023: 11.5}
CASES: tuple[tuple[dict[str, Any], SamplingParams], ...] = (
    ({"temperature": 0}, SamplingParams(seed=0, temperature=0)),
    ({"sampling_seed": 7}, SamplingParams(seed=7)),
    ({"sampling_seed": -1, "temperature": 0.7}, SamplingParams(seed=2**64 - 1, temperature=0.7)),
    (
        {"sampling_seed": 11, "temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.05},
        SamplingParams(seed=11, temperature=0.7, top_p=0.95, top_k=40, min_p=0.05),
    ),
    (
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "logit_bias": FEW},
        SamplingParams(seed=0, temperature=0, repetition_penalty=1.3, frequency_penalty=0.7, logit_bias=FEW),
    ),
    (
        {"sampling_seed": 2**40, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": FEW},
        SamplingParams(seed=2**40, presence_penalty=0.5, frequency_penalty=0.2, logit_bias=FEW),
    ),
    ({"temperature": 0, "logit_bias": FEW}, SamplingParams(seed=0, temperature=0, logit_bias=FEW)),
    ({"sampling_seed": 5, "logit_bias": FEW}, SamplingParams(seed=5, logit_bias=FEW)),
    # The end of sequence would be the most probable token; it is barred from three of four positions.
    (
        {"sampling_seed": 6, "logit_bias": {1: 20.0}, "min_new_tokens": 9},
        SamplingParams(seed=6, logit_bias={1: 20.0}, min_tokens=9, suppressed=(1,)),
    ),
)
COUNT = 12


def as_sglang(params: Mapping[str, Any], count: int = COUNT) -> dict[str, Any]:
    """Parameters as they travel in JSON."""
    bias = params.get("logit_bias")
    named = {} if bias is None else {"logit_bias": {str(token): value for token, value in bias.items()}}
    return {"max_new_tokens": count, "ignore_eos": True, **params, **named}


def ask(
    server: Any, prompts: list[list[int]], params: list[dict[str, Any]], **more: Any
) -> list[dict[str, Any]]:
    """All at once."""
    return server.post("/generate", {"input_ids": prompts, "sampling_params": params, **more})


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def test_tokens_are_those_of_the_loop_without_an_engine(
    server: Any, sampled: Any, prompts: list[list[int]]
) -> None:
    chosen = prompts[3 : 3 + len(CASES)]
    wanted = [made.token_ids for made in sampled(chosen, [params for _, params in CASES], COUNT)]
    assert tokens(ask(server, chosen, [as_sglang(given) for given, _ in CASES])) == wanted


def test_a_seed_is_reported_and_repeats_the_answer(server: Any, prompts: list[list[int]]) -> None:
    free = {"max_new_tokens": 24, "ignore_eos": True}
    one, other = ask(server, [prompts[5]] * 2, [free] * 2)
    seed = one["meta_info"]["sampling_seed"]
    assert seed != other["meta_info"]["sampling_seed"] and one["output_ids"] != other["output_ids"]
    (again,) = ask(server, [prompts[5]], [{**free, "sampling_seed": seed[0]}])
    assert again["output_ids"] == one["output_ids"] and again["meta_info"]["sampling_seed"] == seed


def test_parallel_samples_have_seeds_of_their_own(server: Any, prompts: list[list[int]]) -> None:
    top = 2**63 - 2
    several = ask(server, [prompts[5]], [{**as_sglang({"sampling_seed": top}), "n": 3}])
    assert [answer["meta_info"]["sampling_seed"] for answer in several] == [[top], [top + 1], [-(2**63)]]
    alone = ask(
        server, [prompts[5]] * 3, [as_sglang({"sampling_seed": seed}) for seed in (top, top + 1, -(2**63))]
    )
    assert tokens(several) == tokens(alone)
    assert len({tuple(found) for found in tokens(several)}) == 3


def test_the_samples_of_two_requests_are_numbered_apart() -> None:
    """However their turns are interleaved."""
    import asyncio
    from types import SimpleNamespace

    sent: list[int] = []

    async def send(manager: Any, request: Any) -> None:
        sent.append(request.sampling_params.sampling_seed)

    numbered = seeds.numbering(send)
    one, other = (SimpleNamespace(n=2, sampling_seed=seed, max_new_tokens=4) for seed in (10, 20))
    warm_up = SimpleNamespace(n=2, sampling_seed=10, max_new_tokens=0)

    async def run() -> None:
        for params in (warm_up, one, other, other, one, one):
            await numbered(None, SimpleNamespace(sampling_params=params))

    asyncio.run(run())
    # The last one is a new request that happens to share its parameters' object.
    assert sent == [10, 10, 20, 21, 11, 10]


def test_a_grammar_holds(server: Any, prompts: list[list[int]]) -> None:
    params = [{"regex": "[0-9]{4}", "sampling_seed": seed, "max_new_tokens": 16} for seed in (1, 2)]
    answers = ask(server, [prompts[4]] * 2, params)
    for answer in answers:
        assert len(answer["text"]) == 4 and answer["text"].isdecimal(), answer["text"]


@pytest.mark.parametrize(
    ("seed", "number"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)]
)
def test_bits_of_a_seed(seed: int, number: int) -> None:
    assert seeds.signed(seed) == number
