"""Greedy tokens of vLLM with our model equal the whole-model reference's, however they were scheduled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

EPS = 2.0**-24  # unit roundoff of float32


class TestWithoutAPast:
    """One engine: whole prompts in one step, nothing remembered between requests."""

    @pytest.fixture(scope="class")
    def plain(self, start: Any, tiny: Any) -> Iterator[Any]:
        options = {"max_num_seqs": 16, "max_num_batched_tokens": 4096}
        with start(tiny, enable_prefix_caching=False, **options) as engine:
            yield engine

    @pytest.mark.parametrize("batch", [16, 7, 2, 1])
    def test_batches(self, plain: Any, prompts: list[list[int]], batch: int) -> None:
        chosen = {1: prompts[::6], 2: prompts[5:13:2], 7: prompts[9:], 16: prompts}[batch]
        for first in range(0, len(chosen), batch):
            plain.check(chosen[first : first + batch], f"batch of {batch}")

    def test_logprobs(self, plain: Any, prompts: list[list[int]]) -> None:
        """Of the prompt and of what was generated, within what rounding of float32 explains.

        The head's sums are rounded to float32 once on both sides: a logit x differs by EPS * |x| at most. vLLM then
        adds up V exponentials and takes a logarithm in float32, each operation good to a few EPS: 2 V EPS relative
        in the sum, so as much absolute in its logarithm; a difference of numbers up to max |x| + log V rounds again.
        """
        prompt = prompts[11]
        (output,) = plain.outputs([prompt], 5, logprobs=3, prompt_logprobs=3)
        generated = list(output.outputs[0].token_ids)
        logits = plain.reference.oracle.logits([*prompt, *generated])[:-1].double()
        want = torch.log_softmax(logits, -1)
        vocab_size = logits.shape[1]
        bound = 2 * vocab_size * EPS + 4 * (float(logits.abs().max()) + math.log(vocab_size)) * EPS
        got = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        assert len(got) == len(want)
        for row, entries in enumerate(got):
            assert len(entries) >= 3
            for token, entry in entries.items():
                assert abs(entry.logprob - float(want[row, token])) <= bound, (row, token)

    def test_seeded_sampling_repeats(self, plain: Any, prompts: list[list[int]]) -> None:
        """With a seed, a request's tokens do not depend on what it shares a step with."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.8, seed=7, max_tokens=6, ignore_eos=True, detokenize=False)
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts[3:7]]
        together = plain.llm.generate(tokens, params, use_tqdm=False)
        alone = plain.llm.generate(tokens[2], params, use_tqdm=False)
        assert list(together[2].outputs[0].token_ids) == list(alone[0].outputs[0].token_ids)
        assert len({tuple(output.outputs[0].token_ids) for output in together}) == 4

    @pytest.mark.parametrize(("prompt", "said"), [([5, 70000], "70000"), ([5] * 2000, "1024")])
    def test_a_bad_request_fails_alone(
        self, plain: Any, prompts: list[list[int]], prompt: list[int], said: str
    ) -> None:
        from vllm.exceptions import VLLMValidationError

        with pytest.raises(VLLMValidationError, match=said):
            plain.outputs([prompt], 1)
        plain.check(prompts[4:5], "after a bad request", new_tokens=4)


def test_as_a_user_starts_it(start: Any, small: Any, prompts: list[list[int]]) -> None:
    """The default checkpoint without any option; asynchronous scheduling and prefix caching are on then."""
    from vllm import LLM

    with start(small, max_model_len=None, kv_cache_memory_bytes=None) as engine:
        config = engine.llm.llm_engine.vllm_config
        assert isinstance(engine.llm, LLM) and config.use_v2_model_runner
        assert config.scheduler_config.async_scheduling and config.scheduler_config.enable_chunked_prefill
        assert config.cache_config.enable_prefix_caching
        engine.check(prompts, "defaults")
        repeated = engine.check(prompts[-2:], "defaults, again")
        assert [output.num_cached_tokens for output in repeated] == [384, 640]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_odd_chunks(start: Any, tiny: Any, prompts: list[list[int]], asynchronous: bool) -> None:
    with start(tiny, max_num_seqs=8, max_num_batched_tokens=63, async_scheduling=asynchronous) as engine:
        engine.check(prompts[::2] if asynchronous else prompts[1::2], "chunks of 63")


def test_chunks_of_128(start: Any, tiny: Any, prompts: list[list[int]]) -> None:
    with start(tiny, max_num_seqs=16, max_num_batched_tokens=128) as engine:
        engine.check(prompts[8:], "chunks of 128", new_tokens=24)


def test_chunks_of_one(start: Any, tiny: Any, prompts: list[list[int]]) -> None:
    with start(tiny, max_num_seqs=1, max_num_batched_tokens=1) as engine:
        for prompt in prompts[:6]:
            engine.check([prompt], "chunks of 1", new_tokens=4)


@pytest.mark.parametrize("block", [2, 16])
def test_prefix_hits_at_every_boundary(start: Any, tiny: Any, prompts: list[list[int]], block: int) -> None:
    """Hits end on whole blocks, so a block of 2 makes every even one possible; both parities of suffixes follow.

    By default vLLM keeps windows at a prompt's end only; here it keeps all, so that a hit can end anywhere.
    """
    first, tail = prompts[-2][:70], [7, 8, 9]  # ids below 10 are in no prompt
    options = {"block_size": block, "prefix_cache_retention_interval": None}
    with start(tiny, max_num_batched_tokens=64, max_num_seqs=8, **options) as engine:
        assert set(block % size for size in engine.block_sizes()) == {0}
        engine.outputs([first], 1)
        cuts = [*range(14, 22), *range(60, 68)]
        outputs = engine.check([[*first[:cut], *tail] for cut in cuts], "prefix hit", new_tokens=6)
        assert [output.num_cached_tokens for output in outputs] == [cut // block * block for cut in cuts]
        # A prompt that is known to its end still computes its last token.
        (whole,) = engine.check([first], "whole prompt known", new_tokens=6)
        assert whole.num_cached_tokens == (len(first) - 1) // block * block


def test_preemption(start: Any, tiny: Any, prompts: list[list[int]]) -> None:
    """Requests outgrow the memory that they were admitted to: some are thrown out and start again."""
    group = [*prompts[2:6], *(prompt[:length] for prompt, length in zip(prompts[6:], range(6, 12)))]
    options = {"block_size": 16, "max_model_len": 128, "max_num_batched_tokens": 16, "max_num_seqs": 16}
    with start(tiny, num_gpu_blocks_override=80, **options) as engine:
        engine.check(group, "preemption")
        assert engine.counter("vllm:num_preemptions") > 0
