"""Greedy tokens of SGLang with our model equal the whole-model reference's, however they were scheduled."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

NEW_TOKENS = 64


@pytest.fixture(scope="module")
def odd(serve: Any) -> Iterator[Any]:
    """Pages of one token, chunks of 63, and no overlap of scheduling and running."""
    with serve(
        *("--page-size", "1", "--chunked-prefill-size", "63", "--disable-overlap-schedule"),
        DEEPINFER_TEST_POISON_CACHES="1",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def tight(serve: Any) -> Iterator[Any]:
    """Chunks of one token, and memory for fewer requests than are admitted."""
    with serve(
        *("--page-size", "1", "--chunked-prefill-size", "1"),
        *("--max-total-tokens", "400", "--schedule-conservativeness", "0.05"),
        DEEPINFER_TEST_POISON_CACHES="1",
    ) as running:
        yield running


def check(reference: Any, prompts: list[list[int]], generated: list[list[int]], label: str) -> None:
    for prompt, tokens in zip(prompts, generated, strict=True):
        reference.check(prompt, tokens, label)


@pytest.mark.parametrize("batch", [1, 2, 7, 16])
def test_batches(server: Any, reference: Any, prompts: list[list[int]], batch: int) -> None:
    server.flush()
    chosen = {1: [prompts[0], prompts[6]], 2: [prompts[4], prompts[9]], 7: prompts[8:15], 16: prompts}[batch]
    for start in range(0, len(chosen), batch):
        group = chosen[start : start + batch]
        check(reference, group, server.tokens(group, NEW_TOKENS), f"batch of {batch}")


def test_odd_chunks_without_overlap(odd: Any, reference: Any, prompts: list[list[int]]) -> None:
    for prompt in (prompts[-3], prompts[-1]):
        check(reference, [prompt], odd.tokens([prompt], NEW_TOKENS), "chunks of 63, no overlap")


def test_chunks_of_one_token_and_retraction(tight: Any, reference: Any, prompts: list[list[int]]) -> None:
    """Seven requests of up to 127 tokens, 630 in all, do not fit into 400: some are thrown out and start again.

    If they ignored the end of sequence, SGLang would know their lengths and admit fewer.
    """
    group = [prompt for prompt in prompts if len(prompt) <= 63]
    answers = tight.generate(group, NEW_TOKENS, ignore_eos=False)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    check(reference, group, [answer["output_ids"] for answer in answers], "chunks of 1, retraction")


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 63, 64, 65, 201, 202, 203, 204, 207, 208])
def test_prefix_hits_at_every_boundary(odd: Any, reference: Any, prompts: list[list[int]], cut: int) -> None:
    """A page of 1 makes every boundary possible, in the middle of a pair too.

    SGLang finds a prefix again where its last window is still there: at the end of an earlier prompt.
    """
    first = prompts[-4][:cut]
    odd.generate([first], 1)
    prompt = [*first, *prompts[-3][:5]]
    (answer,) = odd.generate([prompt], 6)
    assert answer["meta_info"]["cached_tokens"] == cut
    check(reference, [prompt], [answer["output_ids"]], f"prefix hit at {cut}")


def test_prefix_hit_on_generated_tokens(server: Any, reference: Any, prompts: list[list[int]]) -> None:
    """The next turn of a conversation finds the answer of the last one, whose window has moved on."""
    prompt = prompts[9]
    (answer,) = server.generate([prompt], NEW_TOKENS)
    turn = [*prompt, *answer["output_ids"], *prompts[4]]
    (answer,) = server.generate([turn], 8)
    assert answer["meta_info"]["cached_tokens"] == (len(prompt) + NEW_TOKENS - 1) // 64 * 64
    check(reference, [turn], [answer["output_ids"]], "prefix hit on generated tokens")


def test_logprobs_of_output_and_input(server: Any, reference: Any, prompts: list[list[int]]) -> None:
    """All of the vocabulary, for the prompt's tokens and for the generated ones.

    The hidden rows have the reference's bits, and a logit is a dot product in float64 rounded once, so both sides
    start from equal logits; what differs is SGLang's log-softmax in float32. Its sum of n terms is off by n ulp of
    the sum at most, its logarithm by as much absolutely, and the subtraction by an ulp of the largest logit.
    """
    prompt, vocabulary = prompts[6], reference.config.vocab_size
    server.flush()
    (answer,) = server.generate(
        [prompt], 4, return_logprob=True, logprob_start_len=0, top_logprobs_num=vocabulary
    )
    meta = answer["meta_info"]
    logits = reference.oracle.logits([*prompt, *answer["output_ids"][:-1]])
    wanted = torch.log_softmax(logits.double(), dim=-1)
    bound = 2**-24 * (vocabulary + 4 * float(logits.abs().max()))
    rows = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
    assert len(rows) == len(prompt) + 3 and meta["input_top_logprobs"][0] is None
    for position, row in enumerate(rows):
        assert len(row) == vocabulary
        for logprob, token, _ in row:
            assert math.isclose(logprob, float(wanted[position, token]), rel_tol=0, abs_tol=bound), (
                position,
                token,
            )
    of_input = [token for _, token, _ in meta["input_token_logprobs"]]
    assert of_input == prompt
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]


BAD: dict[str, dict[str, Any]] = {
    "empty prompt": {"input_ids": []},
    "prompt longer than the context": {"input_ids": [7] * 5000},
    "id beyond the vocabulary": {"input_ids": [5, 1024]},
    "negative id": {"input_ids": [5, -1]},
    "temperature below zero": {"input_ids": [5], "sampling_params": {"temperature": -1}},
    "a stop token that is none": {
        "input_ids": [5],
        "sampling_params": {"stop_token_ids": [999999], "min_new_tokens": 4},
    },
    "a top_k of more than 32 bits": {"input_ids": [5], "sampling_params": {"top_k": 2**40}},
    "a top_k that is a fraction": {"input_ids": [5], "sampling_params": {"top_k": 2.5}},
    "a min_new_tokens of more than 32 bits": {
        "input_ids": [5],
        "sampling_params": {"min_new_tokens": 2**31, "max_new_tokens": 2**40},
    },
    "a bias that is no number": {"input_ids": [5], "sampling_params": {"logit_bias": {"3": "abc"}}},
    "an image": {"text": "what is this?", "image_data": "https://example.invalid/image.png"},
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_fails_alone(server: Any, reference: Any, prompts: list[list[int]], what: str) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        good = pool.submit(server.tokens, [prompts[7]], 12)
        with pytest.raises(Exception) as error:
            server.post("/generate", BAD[what], timeout_s=60)
        assert getattr(error.value, "status", None) == 400, error.value
        check(reference, [prompts[7]], good.result(), f"beside a request with {what}")


def test_embeddings_in_place_of_tokens_fail_alone() -> None:
    """SGLang itself refuses them only beside a radix cache, and runs even a refused request for a token."""
    from deepinfer_plugins.sglang_ext import runtime

    checked = runtime._checked_prompt(1024)(lambda *_: None)
    for given in ("input_embeds", "positional_embed_overrides"):
        request = SimpleNamespace(
            origin_input_ids=[1],
            input_embeds=None,
            positional_embed_overrides=None,
            return_sampling_mask=False,
            sampling_params=SimpleNamespace(beam_width=None),
        )
        assert checked(request, 10, False) is None
        setattr(request, given, [[0.5]])
        assert "send token ids" in checked(request, 10, False) and getattr(request, given) is None


def test_weights_are_not_replaced_while_it_runs(server: Any, checkpoint: Path) -> None:
    """And it is not said that they were."""
    with pytest.raises(Exception, match="does not take weights while it runs") as error:
        server.post("/update_weights_from_disk", {"model_path": str(checkpoint)})
    assert getattr(error.value, "status", None) == 400, error.value


def test_openai_interface(server: Any, reference: Any) -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11]
    greedy = {"model": "x", "temperature": 0, "max_tokens": 12}
    done = server.post("/v1/completions", {**greedy, "prompt": prompt})
    assert done["usage"]["prompt_tokens"] == len(prompt) and done["usage"]["completion_tokens"] <= 12
    chat = server.post(
        "/v1/chat/completions", {**greedy, "messages": [{"role": "user", "content": "Say hello."}]}
    )
    assert chat["usage"]["completion_tokens"] > 0 and chat["choices"][0]["message"]["role"] == "assistant"
