"""Seeds in streams of answers: each choice's once, as soon as it is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from deepinfer_plugins.features.seed_report import naming


def event(*indices: int, text: str = "ä") -> str:
    choices = [{"index": index, "text": text} for index in indices]
    return f"data: {json.dumps({'choices': choices}, ensure_ascii=False)}\n\n"


def seeds_of(line: str) -> dict[int, int]:
    choices: list[dict[str, Any]] = json.loads(line.removeprefix("data: "))["choices"]
    assert all(choice["text"] == "ä" for choice in choices)
    return {choice["index"]: choice["seed"] for choice in choices if "seed" in choice}


def test_each_choice_names_its_seed_once() -> None:
    seeds: dict[int, int] = {}
    sent = [
        event(0, 1),
        event(0),
        event(1, 2),
        event(2),
        'data: {"choices": [], "usage": {}}\n\n',
        event(0, 1, 2),
        "data: [DONE]\n\n",
    ]

    async def events() -> AsyncIterator[str]:
        for place, line in enumerate(sent):
            seeds.update({1: {0: 2**63 - 1}, 2: {1: -7}, 3: {2: 0}}.get(place, {}))
            yield line

    async def run() -> list[str]:
        return [line async for line in naming(events(), seeds)]

    got = asyncio.run(run())
    assert [seeds_of(line) for line in got[1:4]] == [{0: 2**63 - 1}, {1: -7}, {2: 0}]
    # Others are as they were, to the byte.
    assert [got[place] for place in (0, 4, 5, 6)] == [sent[place] for place in (0, 4, 5, 6)]


def test_an_event_that_is_no_answer() -> None:
    sent = ['data: {"error": {"message": "no"}}\n\n', "event: other\ndata: {}\n\n", ": comment\n\n"]

    async def events() -> AsyncIterator[str]:
        for line in sent:
            yield line

    async def run() -> list[str]:
        return [line async for line in naming(events(), {0: 1})]

    got = asyncio.run(run())
    assert json.loads(got[0].removeprefix("data: ")) == {"error": {"message": "no"}} and got[1:] == sent[1:]
