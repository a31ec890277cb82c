"""SGLang samples as the model's own loop does: the same tokens for a prompt, parameters and a seed."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_plugins.sglang_ext import seeds

COUNT = 12


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def test_tokens_are_those_of_the_loop_without_an_engine(
    server: Any, sampled: Any, cases: Any, prompts: list[list[int]]
) -> None:
    chosen = prompts[3 : 3 + len(cases)]
    wanted = [made.token_ids for made in sampled(chosen, [params for _, params in cases], COUNT)]
    assert tokens(server.ask(chosen, [given for given, _ in cases])) == wanted


def test_a_seed_is_reported_and_repeats_the_answer(server: Any, prompts: list[list[int]]) -> None:
    free = {"max_new_tokens": 24, "ignore_eos": True}
    one, other = server.ask([prompts[5]] * 2, [free] * 2)
    seed = one["meta_info"]["sampling_seed"]
    assert seed != other["meta_info"]["sampling_seed"] and one["output_ids"] != other["output_ids"]
    (again,) = server.ask([prompts[5]], [{**free, "sampling_seed": seed[0]}])
    assert again["output_ids"] == one["output_ids"] and again["meta_info"]["sampling_seed"] == seed


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7]}, lambda choice: choice["text"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Say hello."}]},
            lambda choice: choice.get("message", choice.get("delta")).get("content") or "",
        ),
    ],
    ids=["completions", "chat"],
)
def test_openai_s_answers_name_their_seeds(server: Any, path: str, body: dict[str, Any], text: Any) -> None:
    """Streamed or not, each choice its own."""
    asked = {"model": "x", "max_tokens": 16, "ignore_eos": True, **body}
    whole = {choice["seed"]: text(choice) for choice in server.post(path, {**asked, "n": 2})["choices"]}
    seeds: dict[int, int] = {}
    texts = {0: "", 1: ""}
    for event in server.stream(path, {**asked, "n": 2}):
        for choice in event["choices"]:
            assert choice["index"] not in seeds or "seed" not in choice
            seeds |= {choice["index"]: choice["seed"]} if "seed" in choice else {}
            texts[choice["index"]] += text(choice)
    found = {**whole, **{seed: texts[index] for index, seed in seeds.items()}}
    assert len(found) == len(set(found.values())) == 4
    for seed, said in found.items():
        (again,) = server.post(path, {**asked, "seed": seed})["choices"]
        assert (again["seed"], text(again)) == (seed, said)


def test_a_stream_says_the_seed_from_its_first_event_on(server: Any, prompts: list[list[int]]) -> None:
    asked = {"input_ids": prompts[5], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    events = server.stream("/generate", asked)
    (seed,) = {tuple(event["meta_info"]["sampling_seed"]) for event in events}
    assert len(events) > 1
    (again,) = server.ask([prompts[5]], [{"sampling_seed": seed[0]}], 8)
    assert again["output_ids"] == events[-1]["output_ids"]


def test_parallel_samples_have_seeds_of_their_own(server: Any, prompts: list[list[int]]) -> None:
    top = 2**63 - 2
    several = server.ask([prompts[5]], [{"sampling_seed": top, "n": 3}])
    assert [answer["meta_info"]["sampling_seed"] for answer in several] == [[top], [top + 1], [-(2**63)]]
    alone = server.ask([prompts[5]] * 3, [{"sampling_seed": seed} for seed in (top, top + 1, -(2**63))])
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
    params = [
        {"regex": "[0-9]{4}", "sampling_seed": seed, "max_new_tokens": 16, "ignore_eos": False}
        for seed in (1, 2)
    ]
    answers = server.ask([prompts[4]] * 2, params)
    for answer in answers:
        assert len(answer["text"]) == 4 and answer["text"].isdecimal(), answer["text"]
