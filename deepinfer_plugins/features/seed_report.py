"""Seeds in the streams of an OpenAI interface: a choice names its seed, as ``seed``, in one of its events.

Engines write those streams themselves, as text, and know no seeds there.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping

_PREFIX = "data: {"


async def naming(events: AsyncIterator[str], seeds: Mapping[int, int]) -> AsyncIterator[str]:
    """The events, with each choice's seed in the first of its events at which it is known.

    An event is parsed only while a known seed is to be named.

    Args:
        events: Server-sent events, whole.
        seeds: By index of a choice; may grow meanwhile.
    """
    named = set[int]()
    async for event in events:
        if seeds.keys() - named and event.startswith(_PREFIX):
            answer = json.loads(event.removeprefix("data: "))
            for choice in answer.get("choices") or ():
                index = choice["index"]
                if index in seeds and index not in named:
                    choice["seed"] = seeds[index]
                    named.add(index)
            event = f"data: {json.dumps(answer, ensure_ascii=False, separators=(',', ':'))}\n\n"
        yield event
