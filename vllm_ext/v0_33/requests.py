"""Requests on their way to the sampler: their parameters in ``features.sampling``'s words, and a seed for every one.

vLLM's worker would draw the seed of a request that has none and tell nobody. Here the front end draws it, before
anything else sees the request, so that a preempted request keeps it; ``CompletionOutput.seed`` reports the seed of each
sample, and so does ``seed`` in a choice of an OpenAI answer, in a stream in one of its events; the log has those of
requests that came without. ``n`` samples take the seeds from there on.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any

from deepinfer_plugins.features import seed_report
from deepinfer_plugins.vllm_ext.v0_33 import defaults

if TYPE_CHECKING:
    from deepinfer_plugins.features.sampling import SamplingParams

# Below vLLM's, so that its level and handlers apply.
_log = logging.getLogger("vllm.deepinfer_plugins")
# In a request's ``extra_args``: the seed was not the user's.
_CHOSEN = "deepinfer_seed_chosen"


def translate(params: Any, vocab_size: int, setting: str = "auto", invariant: bool = False) -> SamplingParams:
    """A request's parameters as ``features.sampling`` takes them.

    Args:
        params: vLLM's, after it has filled in the tokenizer's and the generation config's part.
        vocab_size: Tokens that end a request and are none of the model's are left out.
        setting: ``DEEPINFER_PLUGINS_VERIFY``.
        invariant: Whether the batch-invariant mode is on.

    Raises:
        ValueError: If a value is out of range.
    """
    from deepinfer_plugins.features.sampling import SamplingParams, choose_verify, fresh_seed

    chosen = bool(params.extra_args and params.extra_args.get(_CHOSEN))
    seeded = params.seed is not None and not chosen
    suppressed = [token for token in sorted(params.all_stop_token_ids) if token < vocab_size]
    return SamplingParams(
        # A request that came past our front end (vLLM's warm-up) has none yet.
        seed=fresh_seed() if params.seed is None else params.seed,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias or {},
        allowed_token_ids=params.allowed_token_ids or None,
        bad_words=params.bad_words_token_ids or (),
        min_tokens=params.min_tokens,
        suppressed=suppressed if params.min_tokens else (),
        verify=choose_verify(setting, seeded, invariant),
    )


def choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    """``InputProcessor.process_inputs`` that gives a request a seed if it samples and has none.

    It also refuses what our sampler would not take, where that ends the request and not the engine.
    """
    from vllm.exceptions import VLLMValidationError

    from deepinfer_plugins.features.sampling import fresh_seed

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        params = request.sampling_params
        if params is None or not defaults.runs_our_model(self.vllm_config):
            return request
        try:
            asked = translate(params, self.model_config.get_vocab_size())
        except ValueError as error:
            raise VLLMValidationError(str(error)) from error
        if params.seed is None and not asked.greedy:
            # vLLM made these parameters for this request alone.
            params.seed = fresh_seed()
            params.extra_args = {**(params.extra_args or {}), _CHOSEN: True}
            _log.info("Request %s came without a seed and got %d.", request.request_id, params.seed)
        return request

    return process_inputs


def keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    """``RequestState.from_new_request`` that remembers the seed."""

    def from_new_request(cls: Any, *args: Any, request: Any, **kwargs: Any) -> Any:
        state = original(cls, *args, request=request, **kwargs)
        state.seed = request.sampling_params.seed if request.sampling_params else None
        return state

    return from_new_request


def reporting(original: Callable[..., Any]) -> Callable[..., Any]:
    """``RequestState._new_completion_output`` that reports it."""

    def _new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        output.seed = self.seed
        return output

    return _new_completion_output


def naming(original: Callable[..., Any]) -> Callable[..., Any]:
    """``OpenAIServingCompletion.request_output_to_completion_response`` whose choices name their seeds."""

    def request_output_to_completion_response(
        self: Any, final_res_batch: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        response = original(self, final_res_batch, *args, **kwargs)
        _name_seeds(response.choices, (sample for result in final_res_batch for sample in result.outputs))
        return response

    return request_output_to_completion_response


def naming_in_chats(original: Callable[..., Any]) -> Callable[..., Any]:
    """``OpenAIServingChat.chat_completion_full_generator`` whose choices name their seeds."""

    async def chat_completion_full_generator(
        self: Any, request: Any, result_generator: AsyncIterator[Any], *args: Any, **kwargs: Any
    ) -> Any:
        last: Any = None

        async def passing() -> AsyncIterator[Any]:
            nonlocal last
            async for last in result_generator:
                yield last

        response = await original(self, request, passing(), *args, **kwargs)
        # An error has no choices.
        if last is not None and hasattr(response, "choices"):
            _name_seeds(response.choices, last.outputs)
        return response

    return chat_completion_full_generator


def naming_in_streams(original: Callable[..., Any]) -> Callable[..., Any]:
    """``OpenAIServingCompletion.completion_stream_generator`` whose choices name their seeds."""

    def completion_stream_generator(
        self: Any, request: Any, engine_inputs: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        seeds: dict[int, int] = {}

        async def passing() -> AsyncIterator[Any]:
            async for prompt, result in result_generator:
                _note_seeds(seeds, result.outputs, first=prompt * (request.n or 1))
                yield prompt, result

        return seed_report.naming(original(self, request, engine_inputs, passing(), *args, **kwargs), seeds)

    return completion_stream_generator


def naming_in_streamed_chats(original: Callable[..., Any]) -> Callable[..., Any]:
    """``OpenAIServingChat.chat_completion_stream_generator`` whose choices name their seeds."""

    def chat_completion_stream_generator(
        self: Any, request: Any, result_generator: AsyncIterator[Any], *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        seeds: dict[int, int] = {}

        async def passing() -> AsyncIterator[Any]:
            async for result in result_generator:
                _note_seeds(seeds, result.outputs)
                yield result

        return seed_report.naming(original(self, request, passing(), *args, **kwargs), seeds)

    return chat_completion_stream_generator


def _note_seeds(seeds: dict[int, int], samples: Iterable[Any], first: int = 0) -> None:
    """Add what is known now, by index of the choice; ``first`` is that of the prompt's first."""
    for sample in samples:
        if (seed := _seed(sample)) is not None:
            seeds[first + sample.index] = seed


def _name_seeds(choices: Iterable[Any], samples: Iterable[Any]) -> None:
    """vLLM's models of answers take fields beyond OpenAI's."""
    for choice, sample in zip(choices, samples, strict=True):
        if (seed := _seed(sample)) is not None:
            choice.seed = seed


def _seed(sample: Any) -> int | None:
    """None of a beam search's sample, whose output vLLM makes past ``reporting``."""
    return getattr(sample, "seed", None)
