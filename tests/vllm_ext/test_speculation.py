"""With drafts, however many and whatever becomes of them, vLLM generates what it generates without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

# Two or three tokens to choose from: even the draft of a model that was never trained then hits often.
FEW = {"allowed_token_ids": [40, 41, 42]}
FILTERS = {"temperature": 0.7, "top_p": 0.95, "top_k": 40}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
}


def requests(prompts: list[list[int]]) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts with parameters: every one that samples has a seed."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, **FEW, "max_tokens": 30},
        {"temperature": 1.0, **FEW, "seed": 1, "max_tokens": 31},
        {"temperature": 1.0, **FEW, "seed": 2, "max_tokens": 3},
        {"temperature": 1.0, **FEW, "seed": -3, "stop_token_ids": [41], "ignore_eos": False},
        {"temperature": 0.7, **FEW, **PENALTIES, "seed": 4},
        {**FILTERS, "seed": 5},
        {**FILTERS, **FEW, "seed": 2**62},
        {"temperature": 1.0, "min_p": 0.05, "seed": 6, "logit_bias": {50: 9.0, 51: 9.5, 52: 8.0}},
        {"temperature": 1.0, **FEW, "seed": 7, "bad_words": ["H I", "I"], "detokenize": True},
        {"temperature": 1.0, **FEW, "seed": 8, "min_tokens": 9, "stop_token_ids": [40, 42]},
        {"temperature": 1.0, "seed": 9, "regex": "(ab|ba|cd){2,6}e"},
        {"temperature": 0.7, "seed": 10, "json": SCHEMA, "max_tokens": 20},
        {"temperature": 0, "regex": "[xyz]{30}", "max_tokens": 17},
        {"temperature": 1.0, "seed": 11, "regex": "(xy){4,20}z", "stop": ["yxyxyx"]},
        {"temperature": 1.0, **FEW, "seed": 12, "logprobs": 2, "max_tokens": 9},
    ]
    order = [*range(16)] * 2
    lengths = [1, 2, 3, 5, 17, 31, 63, 64, 65, 127, 9, 130, 11, 12, 13, 14]
    return [(prompts[-1][i : i + lengths[(i * 7) % 16]], kinds[kind]) for i, kind in enumerate(order)]


def parameters(asked: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = {"max_tokens": 16, "ignore_eos": True, "detokenize": "regex" in asked or "json" in asked, **asked}
    for name in ("regex", "json"):
        if name in asked:
            asked["structured_outputs"] = StructuredOutputsParams(**{name: asked.pop(name)})
            asked["ignore_eos"] = False
    return SamplingParams(**asked)


def generate(engine: Any, asked: list[tuple[list[int], dict[str, Any]]]) -> list[Any]:
    """Everything that a request's answer consists of."""
    outputs = engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in asked],
        [parameters(kind) for _, kind in asked],
        use_tqdm=False,
    )
    answers = []
    for output in outputs:
        (sample,) = output.outputs
        logprobs = [
            {token: round(entry.logprob, 4) for token, entry in row.items()} for row in sample.logprobs or ()
        ]
        answers.append(
            (list(sample.token_ids), sample.finish_reason, sample.stop_reason, sample.text, logprobs)
        )
    return answers


def accepted(engine: Any) -> list[int]:
    """Drafts accepted at each position."""
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    (values,) = (metric.values for metric in engine.llm.get_metrics() if metric.name == name)
    return list(values)


@pytest.fixture(scope="module")
def asked(prompts: list[list[int]]) -> list[tuple[list[int], dict[str, Any]]]:
    return requests(prompts)


class TestWithout:
    """One engine that does not speculate; what it generates is held against all others."""

    @pytest.fixture(scope="class")
    def plain(self, start: Any, tiny: Any) -> Iterator[Any]:
        with start(tiny, max_num_seqs=32) as engine:
            yield engine

    def test_every_parameter_does_something(self, plain: Any, asked: Any, expected: dict[str, Any]) -> None:
        expected["all"] = answers = generate(plain, asked)
        reasons = {reason for _, reason, *_ in answers}
        assert reasons == {"length", "stop"}
        assert {len(tokens) for tokens, *_ in answers} >= {3, 9, 16, 17, 30, 31}
        for (_, kind), (tokens, *_) in zip(asked, answers, strict=True):
            if "allowed_token_ids" in kind:
                assert set(tokens) <= set(FEW["allowed_token_ids"])
            assert len(tokens) >= kind.get("min_tokens", 0)

    def test_a_request_without_a_seed_gets_one_and_reports_it(self, plain: Any, prompts: Any) -> None:
        from vllm import SamplingParams

        prompt = {"prompt_token_ids": prompts[4]}
        free = SamplingParams(temperature=1.0, n=2, max_tokens=8, ignore_eos=True, detokenize=False)
        first, second = (plain.llm.generate(prompt, free, use_tqdm=False)[0].outputs for _ in range(2))
        seeds = [sample.seed for sample in (*first, *second)]
        assert len(set(seeds)) == 4 and first[0].token_ids != second[0].token_ids
        assert first[0].token_ids != first[1].token_ids and free.seed is None
        for sample in (*first, *second):
            again = SamplingParams(
                temperature=1.0, seed=sample.seed, max_tokens=8, ignore_eos=True, detokenize=False
            )
            (output,) = plain.llm.generate(prompt, again, use_tqdm=False)
            assert output.outputs[0].token_ids == sample.token_ids and output.outputs[0].seed == sample.seed

    def test_new_weights_are_refused_while_the_old_ones_are_there(self, plain: Any, prompts: Any) -> None:
        with pytest.raises(NotImplementedError, match="does not take weights"):
            plain.llm.collective_rpc("reload_weights")
        plain.check(prompts[3:4], "after reload_weights", new_tokens=4)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Filled by the first test."""
    return {}


def drafting(depth: int, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "dspark", "num_speculative_tokens": depth, **more}}


def test_depth_one(start: Any, tiny: Any, asked: Any, expected: dict[str, Any]) -> None:
    with start(tiny, max_num_seqs=32, max_num_batched_tokens=64, **drafting(1)) as engine:
        assert generate(engine, asked) == expected["all"]
        assert accepted(engine)[0] > 0


class TestFive:
    """Five drafts, in as many situations as one engine can be in."""

    @pytest.fixture(scope="class")
    def five(self, start: Any, tiny: Any) -> Iterator[Any]:
        with start(tiny, max_num_seqs=32, **drafting(5)) as engine:
            yield engine

    def test_all_at_once(self, five: Any, asked: Any, expected: dict[str, Any]) -> None:
        assert five.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        assert generate(five, asked) == expected["all"]
        assert min(accepted(five)) > 0

    @pytest.mark.parametrize("concurrency", [8, 1])
    def test_fewer_at_once(self, five: Any, asked: Any, expected: dict[str, Any], concurrency: int) -> None:
        """Their prompts are known by now: every one is a prefix hit, if it is long enough."""
        for first in range(0, 16, concurrency):
            chosen = slice(first, first + concurrency)
            if concurrency == 1 and first % 3:
                continue
            assert generate(five, asked[chosen]) == expected["all"][chosen]

    def test_the_oracle_agrees(self, five: Any, prompts: Any) -> None:
        five.check(prompts[3:9], "five drafts", new_tokens=12)

    def test_aborts(self, five: Any, asked: Any, expected: dict[str, Any]) -> None:
        """Every other request is aborted at another moment; the next ones get its slot at once."""
        engine, finished, left = five.llm.llm_engine, {}, [*range(32)]
        running: list[int] = []
        step = 0
        while left or running:
            while left and len(running) < 8:
                index = left.pop(0)
                prompt, kind = asked[index]
                engine.add_request(str(index), {"prompt_token_ids": prompt}, parameters(kind))
                running.append(index)
            for output in engine.step():
                if output.finished:
                    running.remove(int(output.request_id))
                    finished[int(output.request_id)] = list(output.outputs[0].token_ids)
            step += 1
            if step % 2 and (doomed := [index for index in running if index % 2]):
                engine.abort_request([str(doomed[0])])
                running.remove(doomed[0])
        assert set(range(0, 32, 2)) <= set(finished)
        for index, tokens in finished.items():
            assert tokens == expected["all"][index][0], index

    def test_rejection_samples_something_plausible(self, five: Any, prompts: Any) -> None:
        """Without a seed, by default; that the distribution is right is tested where it is made."""
        from vllm import SamplingParams

        before = sum(accepted(five))
        free = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, detokenize=False, **FEW)
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts[:8]]
        outputs = five.llm.generate(tokens, free, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)
        assert all(set(output.outputs[0].token_ids) <= {40, 41, 42} for output in outputs)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 8
        assert sum(accepted(five)) > before


def test_depth_eight_in_small_steps(start: Any, tiny: Any, asked: Any, expected: dict[str, Any]) -> None:
    """Without asynchronous scheduling; a step is too small for all drafts of all requests."""
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 48, "async_scheduling": False}
    with start(tiny, **options, **drafting(8)) as engine:
        assert generate(engine, asked) == expected["all"]
        assert min(accepted(engine)) > 0


def test_random_budgets_by_the_environment(
    start: Any, tiny: Any, asked: Any, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_plugins.core import patch
    from deepinfer_plugins.vllm_ext import entrypoints
    from deepinfer_plugins.vllm_ext.v0_33 import patches

    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "5")
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "1")
    monkeypatch.setenv("DEEPINFER_PLUGINS_VERIFY_BUDGET", "random:3")
    entrypoints.register()
    try:
        with start(tiny, max_num_seqs=32, max_num_batched_tokens=128) as engine:
            assert engine.llm.llm_engine.vllm_config.speculative_config.num_speculative_tokens == 5
            assert generate(engine, asked) == expected["all"]
            assert sum(accepted(engine)) > 0
    finally:
        patch.revert(patches.DEPTH)


def test_preemption(start: Any, tiny: Any, asked: Any, expected: dict[str, Any]) -> None:
    """Requests outgrow the memory that they were admitted to, and come back with what they generated."""
    options = {"block_size": 16, "max_model_len": 192, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    with start(tiny, num_gpu_blocks_override=96, **options, **drafting(3)) as engine:
        assert generate(engine, asked) == expected["all"]
        assert engine.counter("vllm:num_preemptions") > 0
