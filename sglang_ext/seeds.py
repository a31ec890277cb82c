"""Seeds where SGLang takes requests: parallel samples get their own, and answers of OpenAI's interface name them.

In a request's ``meta_info``, which ``/generate`` and ``Engine`` return, the sampler has put the seed by itself.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from deepinfer_plugins.features import seed_report
from deepinfer_plugins.features.sampling import child_seed, signed_seed

# In a request's ``meta_info``: the seed, as a number that a request may give as ``sampling_seed``.
# Verified by rejection, the answer also depends on where windows of drafts began.
SEED_KEY = "sampling_seed"
# On SGLang's object of a request: the seeds of its choices, as far as they are known.
_NOTED = "deepinfer_seeds"


def numbering(original: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """A ``TokenizerManager._send_one_request`` that numbers the samples of a request by their seeds.

    SGLang sends the ``n`` samples one after another, each with the one object of parameters that they share.
    """
    # By the object's id: the object, so that the id stays its own, and how many samples were sent.
    sent: dict[int, tuple[Any, int]] = {}

    async def send_one_request(self: Any, tokenized_obj: Any) -> None:
        params = getattr(tokenized_obj, "sampling_params", None)
        if (
            params is not None
            and params.n > 1
            and params.sampling_seed is not None
            and params.max_new_tokens != 0
        ):
            _, index = sent.pop(id(params), (params, 0))
            if index + 1 < params.n:
                sent[id(params)] = (params, index + 1)
            tokenized_obj.sampling_params = copy.copy(params)
            tokenized_obj.sampling_params.sampling_seed = signed_seed(child_seed(params.sampling_seed, index))
        await original(self, tokenized_obj)

    return send_one_request


def noting(original: Callable[..., AsyncGenerator[Any]]) -> Callable[..., AsyncGenerator[Any]]:
    """A ``TokenizerManager.generate_request`` that notes the seeds of choices where a stream asks for them."""

    async def generate_request(self: Any, obj: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        seeds: dict[int, int] | None = getattr(obj, _NOTED, None)
        async with aclosing(original(self, obj, *args, **kwargs)) as answers:
            async for answer in answers:
                if seeds is not None and (seed := _seed(answer)) is not None:
                    seeds[answer.get("index", 0)] = seed
                yield answer

    return generate_request


def naming_in_streams(original: Callable[..., AsyncGenerator[str]]) -> Callable[..., AsyncGenerator[str]]:
    """A stream of OpenAI's interface, of completions or a chat, whose choices name their seeds."""

    async def stream(self: Any, adapted_request: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[str]:
        seeds: dict[int, int] = {}
        setattr(adapted_request, _NOTED, seeds)
        async with aclosing(original(self, adapted_request, *args, **kwargs)) as events:
            async for event in seed_report.naming(events, seeds):
                yield event

    return stream


def naming(original: Callable[..., Any]) -> Callable[..., Any]:
    """``OpenAIServingCompletion._build_completion_response`` whose choices name their seeds."""
    from sglang.srt.entrypoints.openai import protocol

    return _naming(original, protocol.CompletionResponse, protocol.CompletionResponseChoice)


def naming_in_chats(original: Callable[..., Any]) -> Callable[..., Any]:
    """``OpenAIServingChat._build_chat_response`` whose choices name their seeds."""
    from sglang.srt.entrypoints.openai import protocol

    return _naming(original, protocol.ChatCompletionResponse, protocol.ChatCompletionResponseChoice)


def _naming(original: Callable[..., Any], response_class: Any, choice_class: Any) -> Callable[..., Any]:
    from pydantic import create_model

    # SGLang's models of answers have room for no other fields.
    choice_with_seed: Any = create_model(
        choice_class.__name__, __base__=choice_class, seed=(int | None, None)
    )
    response_with_seeds = create_model(
        response_class.__name__, __base__=response_class, choices=(list[choice_with_seed], ...)
    )

    def build(self: Any, request: Any, ret: list[dict[str, Any]], created: int) -> Any:
        response = original(self, request, ret, created)
        if not isinstance(response, response_class):
            return response
        choices = [
            choice_with_seed(**dict(choice), seed=_seed(answer))
            for choice, answer in zip(response.choices, ret, strict=True)
        ]
        return response_with_seeds(**{**dict(response), "choices": choices})

    return build


def _seed(answer: dict[str, Any]) -> int | None:
    found = answer["meta_info"].get(SEED_KEY)
    return found[0] if found else None
