"""Answers requests with an engine, in a process of its own: what ``deepinfer-plugins verify`` starts.

Usage: python -m deepinfer_plugins.commands.answer; lines of JSON come in and go out. The first in says how to start
the engine, and is answered by ``{"version": ...}``; each one after it is a run, answered by a ``{"done": 1}`` whenever
a request has ended and at last by ``{"answers": [...], "counters": {...}}``. The end of input ends the engine.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TextIO, TypedDict

from deepinfer_plugins.evaluation.identity import Answer, Request

_ANSWERERS = {
    "vllm": "deepinfer_plugins.vllm_ext.answer:VllmAnswerer",
    "sglang": "deepinfer_plugins.sglang_ext.answer:SglangAnswerer",
}


class Start(TypedDict):
    """How to start an engine, as JSON.

    Args:
        engine: ``"vllm"`` or ``"sglang"``.
        model: The checkpoint's folder.
        drafts: Drafts per step; 0 for none.
        max_positions: Tokens of a sequence at most.
        at_once: Requests that run at once, at most.
        small_pages: Whether pages of the caches hold few tokens, so that short prefixes are found again.
        chunk: Tokens of a prompt that a step takes, at most; None: as the engine does.
        tight: Whether the caches are small for what ``at_once`` requests need.
        engine_options: More of the engine's own options, by name; what is said above goes before them.
    """

    engine: str
    model: str
    drafts: int
    max_positions: int
    at_once: int
    small_pages: bool
    chunk: int | None
    tight: bool
    engine_options: dict[str, Any]


class Run(TypedDict):
    """Requests to answer, as JSON.

    Args:
        requests: In the order in which they come.
        at_once: How many wait for an answer at a time; the next one comes as soon as one has ended.
        aborts: By a request's number (JSON has it as text): the tokens after which it is aborted.
        cold: Whether the engine first forgets the prefixes that it has in its cache.
    """

    requests: list[Request]
    at_once: int
    aborts: dict[str, int]
    cold: bool


class Answerer(Protocol):
    """An engine that runs."""

    version: str

    def __init__(
        self,
        model: str,
        drafts: int,
        max_positions: int,
        at_once: int,
        small_pages: bool,
        chunk: int | None,
        tight: bool,
        engine_options: Mapping[str, Any],
    ) -> None: ...

    def answer(
        self, requests: Sequence[Request], at_once: int, aborts: Mapping[int, int], done: Callable[[], None]
    ) -> tuple[list[Answer], dict[str, int]]:
        """Answer, as :class:`Run` says, and call ``done`` whenever a request has ended.

        Returns:
            An answer each, with what an aborted request had by then; and how often these happened: ``preemptions``,
            requests that were ``aborted``, and drafts that were ``drafted``, ``verified`` and ``accepted``.
        """

    def forget(self) -> None:
        """Let go of every prefix in the cache."""

    def close(self) -> None: ...


def main(asked: Iterable[str], said: TextIO) -> None:
    """Start the engine, answer, and end it."""

    def say(**what: Any) -> None:
        print(json.dumps(what), file=said, flush=True)

    lines = iter(asked)
    start: dict[str, Any] = json.loads(next(lines))
    module, _, name = _ANSWERERS[start.pop("engine")].partition(":")
    made: type[Answerer] = getattr(importlib.import_module(module), name)
    engine = made(**start)
    try:
        say(version=engine.version)
        for line in lines:
            run: Run = json.loads(line)
            if run["cold"]:
                engine.forget()
            aborts = {int(index): tokens for index, tokens in run["aborts"].items()}
            answers, counters = engine.answer(run["requests"], run["at_once"], aborts, lambda: say(done=1))
            say(answers=answers, counters=counters)
    finally:
        engine.close()


if __name__ == "__main__":
    # What the engine prints must not be taken for an answer.
    _said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(sys.stdin, _said)
