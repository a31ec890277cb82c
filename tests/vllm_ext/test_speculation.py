"""With drafts, however many and whatever becomes of them, vLLM generates what it generates without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugins.core import shipped

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


def phase_seconds() -> dict[str, float]:
    """Seconds of all steps by phase, as vLLM's endpoint would give them; its own ``get_metrics`` rounds."""
    from prometheus_client import REGISTRY

    name = "vllm:spec_decode_phase_seconds_total"
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return {sample.labels["phase"]: sample.value for sample in samples if sample.name == name}


@pytest.fixture(scope="module")
def asked(prompts: list[list[int]]) -> list[tuple[list[int], dict[str, Any]]]:
    return requests(prompts)


@dataclass
class Plain:
    """What an engine that does not speculate did."""

    all: list[Any]
    free: list[list[tuple[int, list[int]]]]
    again: list[tuple[int, list[int]]]
    largest: list[tuple[int, list[int]]]
    refused: str
    afterwards: list[int]


@pytest.fixture(scope="module")
def plain(start: Any, tiny: Any, asked: Any, prompts: list[list[int]]) -> Plain:
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": prompts[4]}

    def samples(engine: Any, **kind: Any) -> list[tuple[int, list[int]]]:
        params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, detokenize=False, **kind)
        (output,) = engine.llm.generate(prompt, params, use_tqdm=False)
        return [(sample.seed, list(sample.token_ids)) for sample in output.outputs]

    with start(tiny, max_num_seqs=32) as engine:
        answers = generate(engine, asked)
        free = [samples(engine, n=2) for _ in range(2)]
        again = [samples(engine, seed=seed)[0] for pair in free for seed, _ in pair]
        # The second sample's seed is more than a signed number holds; a negative one has the same bits.
        largest = [*samples(engine, n=2, seed=2**63 - 1), *samples(engine, seed=-(2**63))]
        with pytest.raises(NotImplementedError) as refused:
            engine.llm.collective_rpc("reload_weights")
        (output,) = engine.check(prompts[3:4], "after reload_weights", new_tokens=4)
        return Plain(answers, free, again, largest, str(refused.value), list(output.outputs[0].token_ids))


def test_every_parameter_does_something(plain: Plain, asked: Any) -> None:
    reasons = {reason for _, reason, *_ in plain.all}
    assert reasons == {"length", "stop"}
    assert {len(tokens) for tokens, *_ in plain.all} >= {3, 9, 16, 17, 30, 31}
    for (_, kind), (tokens, *_) in zip(asked, plain.all, strict=True):
        if "allowed_token_ids" in kind:
            assert set(tokens) <= set(FEW["allowed_token_ids"])
        assert len(tokens) >= kind.get("min_tokens", 0)


def test_a_request_without_a_seed_gets_one_and_reports_it(plain: Plain) -> None:
    (first, second), samples = plain.free, [*plain.free[0], *plain.free[1]]
    assert (
        len({seed for seed, _ in samples}) == 4 and first[0][1] != second[0][1] and first[0][1] != first[1][1]
    )
    assert plain.again == samples


def test_samples_of_the_largest_seed(plain: Plain) -> None:
    (one, first), (two, second), (_, same) = plain.largest
    assert (one, two) == (2**63 - 1, 2**63) and first != second == same


def test_new_weights_are_refused_while_the_old_ones_are_there(plain: Plain) -> None:
    """What it generated afterwards was the oracle's choice."""
    assert "does not take weights" in plain.refused and len(plain.afterwards) == 4


def drafting(depth: int, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "dspark", "num_speculative_tokens": depth, **more}}


def test_depth_one(start: Any, tiny: Any, asked: Any, plain: Plain) -> None:
    with start(tiny, max_num_seqs=32, **drafting(1)) as engine:
        assert generate(engine, asked[:16]) == plain.all[:16]
        assert accepted(engine)[0] > 0


class TestFive:
    """Five drafts, in as many situations as one engine can be in."""

    @pytest.fixture(scope="class")
    def five(self, start: Any, tiny: Any) -> Iterator[Any]:
        with start(tiny, max_num_seqs=32, **drafting(5)) as engine:
            yield engine

    def test_all_at_once(self, five: Any, asked: Any, plain: Plain) -> None:
        assert five.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        started = time.monotonic()
        assert generate(five, asked) == plain.all
        elapsed = time.monotonic() - started
        assert min(accepted(five)) > 0
        seconds = phase_seconds()
        # Nothing schedules verification here; the other phases are most of what there is.
        assert seconds.pop("schedule") == 0 and set(seconds) == {"draft", "forward", "sample"}
        assert min(seconds.values()) > 0 and elapsed / 4 < sum(seconds.values()) < elapsed

    @pytest.mark.parametrize("concurrency", [8, 1])
    def test_fewer_at_once(self, five: Any, asked: Any, plain: Plain, concurrency: int) -> None:
        """Their prompts are known by now: every one is a prefix hit, if it is long enough."""
        for first in range(0, 16, concurrency):
            chosen = slice(first, first + concurrency)
            if concurrency == 1 and first % 3:
                continue
            assert generate(five, asked[chosen]) == plain.all[chosen]

    def test_the_oracle_agrees(self, five: Any, prompts: Any) -> None:
        five.check(prompts[3:9], "five drafts", new_tokens=12)

    def test_aborts(self, five: Any, asked: Any, plain: Plain) -> None:
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
            assert tokens == plain.all[index][0], index

    def test_a_grammar_error_ends_its_request_alone(
        self, five: Any, asked: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of one request the grammar can't be made, of another it refuses tokens that it let through."""
        engine, unmade, refused, others = five.llm.llm_engine, 11, 14, (3, 4, 10, 13)
        manager = engine.engine_core.engine_core.structured_output_manager
        make, accept, refusals = manager._create_grammar, manager.accept_tokens, []

        def is_number(index: int, request: Any) -> bool:
            return request.request_id.startswith(f"{index}-")

        def make_or_fail(request: Any) -> Any:
            if is_number(unmade, request):
                raise ValueError("no such grammar")
            return make(request)

        def accept_or_refuse(request: Any, tokens: list[int]) -> Any:
            if is_number(refused, request) and request.num_output_tokens > 4:
                refusals.append(tokens)
                return False
            return accept(request, tokens)

        monkeypatch.setattr(manager, "_create_grammar", make_or_fail)
        monkeypatch.setattr(manager, "accept_tokens", accept_or_refuse)
        for index in (unmade, refused, *others):
            prompt, kind = asked[index]
            engine.add_request(str(index), {"prompt_token_ids": prompt}, parameters(kind))
        finished: dict[int, tuple[str, list[int]]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    (sample,) = output.outputs
                    finished[int(output.request_id)] = sample.finish_reason, list(sample.token_ids)
        assert finished.pop(unmade) == ("error", [])
        reason, tokens = finished.pop(refused)
        assert reason == "error" and 4 < len(tokens) and tokens == plain.all[refused][0][: len(tokens)]
        assert len(refusals) == 1
        assert finished == {index: (plain.all[index][1], plain.all[index][0]) for index in others}

    def test_rejection_samples_something_plausible(self, five: Any, prompts: Any) -> None:
        """Without a seed, by default; that the distribution is right is tested where it is made.

        The temperature, vLLM's highest, brings the three that are left closer: no two answers are the same.
        """
        from vllm import SamplingParams

        before = sum(accepted(five))
        free = SamplingParams(temperature=2.0, max_tokens=24, ignore_eos=True, detokenize=False, **FEW)
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts[:8]]
        outputs = five.llm.generate(tokens, free, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)
        assert all(set(output.outputs[0].token_ids) <= {40, 41, 42} for output in outputs)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 8
        assert sum(accepted(five)) > before


def test_depth_eight_in_small_steps(start: Any, tiny: Any, asked: Any, plain: Plain) -> None:
    """Without asynchronous scheduling; a step is too small for all drafts of all requests."""
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 48, "async_scheduling": False}
    with start(tiny, **options, **drafting(8)) as engine:
        assert generate(engine, asked) == plain.all
        assert min(accepted(engine)) > 0


def test_random_budgets_by_the_environment(
    start: Any,
    tiny: Any,
    asked: Any,
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from deepinfer_plugins.core import patch
    from deepinfer_plugins.features.calibration import read_logs
    from deepinfer_plugins.vllm_ext import entrypoints
    from deepinfer_plugins.vllm_ext.v0_33 import patches

    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "5")
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "1")
    monkeypatch.setenv("DEEPINFER_PLUGINS_VERIFY_BUDGET", "random:3")
    monkeypatch.setenv("DEEPINFER_PLUGINS_ACCEPTANCE_LOG", str(tmp_path / "log"))
    entrypoints.register()
    try:
        with start(tiny, max_num_seqs=32, max_num_batched_tokens=128) as engine:
            assert engine.llm.llm_engine.vllm_config.speculative_config.num_speculative_tokens == 5
            assert generate(engine, asked) == plain.all
            drafted, verified, kept = (
                engine.counter(f"vllm:spec_decode_num_{what}_tokens")
                for what in ("draft", "verified", "accepted")
            )
            assert 0 < kept == sum(accepted(engine)) < verified < 0.8 * drafted
            assert engine.counter("vllm:spec_decode_num_verified_tokens_per_pos") == verified
            seconds = phase_seconds()
            assert len(seconds) == 4 and 0 < seconds["schedule"] < min(seconds["draft"], seconds["forward"])
    finally:
        patch.revert(patches.DEPTH)
    logged = read_logs([tmp_path / "log"])
    # vLLM counts no drafts of steps that were under way when their request ended: two at most.
    in_flight = 2 * 5 * len(asked)
    assert logged.depth == 5 and verified / 2 < logged.verified.sum() <= verified + in_flight
    assert logged.accepted.sum() > kept / 2


def test_preemption(
    start: Any,
    tiny: Any,
    asked: Any,
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Requests outgrow the memory that they were admitted to, and come back with what they generated.

    Verification is scheduled, by what steps were measured to cost.
    """
    monkeypatch.setenv("DEEPINFER_DECODE_PERF_CACHE_DIR", str(tmp_path))
    options = {"block_size": 16, "max_model_len": 176, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    more = drafting(3, enable_adaptive_verification=True)
    with start(tiny, num_gpu_blocks_override=160, **options, **more) as engine:
        core = engine.llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        assert runner.adaptive_verification.schedule.cost.curve.sizes == (1, 2, 4, 8, 16, 32, 64)
        assert len([*tmp_path.iterdir()]) == 1
        assert generate(engine, asked) == plain.all
        assert engine.counter("vllm:num_preemptions") > 0


def test_a_prefix_hit_survives_the_loss_of_the_draft_s_keys(
    start: Any, tiny: Any, prompts: list[list[int]]
) -> None:
    """The draft's blocks are evicted, some or all of them, while those of the other caches are there."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    from deepinfer_plugins.vllm_ext.v0_33.draft_cache import DraftWindowSpec

    options = {"block_size": 16, "prefix_cache_retention_interval": None, "max_num_batched_tokens": 64}
    first = prompts[-1][:100]
    few = {"temperature": 1.0, **FEW, "seed": 3, "max_tokens": 24}
    with start(tiny, max_num_seqs=8, **options, **drafting(4)) as engine:
        manager = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        groups = manager.kv_cache_config.kv_cache_groups
        drafts = {i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, DraftWindowSpec)}
        assert drafts and len(groups) > len(drafts)
        (answer,) = generate(engine, [(first, few)])
        for lost in (0, 2, 99):
            pool = manager.block_pool
            known = [key for key in pool.cached_block_hash_to_block._cache if get_group_id(key) in drafts]
            assert known
            for key in known[-lost:] if lost else []:
                pool.evict_blocks({pool.cached_block_hash_to_block.get_one_block(key).block_id})
            before = sum(accepted(engine))
            outputs = engine.check([[*first[:90], 7 + lost % 3]], f"{lost} blocks lost", new_tokens=6)
            assert outputs[0].num_cached_tokens == 80
            assert generate(engine, [(first, few)]) == [answer]
            assert sum(accepted(engine)) > before


def test_the_trained_checkpoint_s_drafts_are_accepted(start: Any, trained: Any) -> None:
    """A text of every kind; greedy tokens are the oracle's, and so are the drafts most of the time."""
    documents = [each for each in shipped.read_documents(shipped.corpus()) if shipped.is_for_test(each.name)]
    texts = [document.text[:300] for document in {each.kind: each for each in documents}.values()]
    assert len(texts) == 4
    with start(trained, max_num_seqs=8, **drafting(5)) as engine:
        tokenizer = engine.llm.get_tokenizer()
        engine.check([tokenizer.encode(text) for text in texts], "trained", new_tokens=24)
        drafts, kept = (
            engine.counter(f"vllm:spec_decode_num_{what}") for what in ("drafts", "accepted_tokens")
        )
        assert 1 + kept / drafts > 2.2
