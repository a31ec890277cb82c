"""What is done to requests and answers on their way, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from vllm.outputs import CompletionOutput

from deepinfer_plugins.vllm_ext.v0_33 import requests

EVENT = 'data: {"choices":[{"index":0}]}\n\n'


def test_a_streamed_chat_by_beam_search_has_no_seed_to_name() -> None:
    """vLLM makes the outputs of a beam search itself, past what notes seeds."""
    output = CompletionOutput(0, "a", [5], 0.0, None, finish_reason="length")

    async def results() -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[output])

    async def stream(serving: Any, request: Any, generator: Any) -> AsyncIterator[str]:
        async for _ in generator:
            yield EVENT

    async def events() -> list[str]:
        return [event async for event in requests.naming_in_streamed_chats(stream)(None, None, results())]

    assert asyncio.run(events()) == [EVENT]
    vars(output)["seed"] = 3
    assert asyncio.run(events()) == ['data: {"choices":[{"index":0,"seed":3}]}\n\n']
