"""Answers requests with an engine, in a process of its own: what ``deepinfer-plugins verify`` starts.

Usage: python -m deepinfer_plugins.commands.answer PLAN ANSWERS; a line of standard output that is a number says
how many more requests are answered.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Protocol, TextIO

from deepinfer_plugins.evaluation.identity import Answer, Request

_ANSWERERS = {
    "vllm": "deepinfer_plugins.vllm_ext.answer:VllmAnswerer",
    "sglang": "deepinfer_plugins.sglang_ext.answer:SglangAnswerer",
}


class Answerer(Protocol):
    """An engine that runs."""

    version: str

    def __init__(self, model: str, drafts: int, max_positions: int, at_once: int) -> None: ...

    def answer(self, requests: list[Request]) -> list[Answer]:
        """Answer all at once."""

    def close(self) -> None: ...


def main(plan_file: Path, answers_file: Path, progress: TextIO) -> None:
    """Start the engine as the plan says, answer, and write what came; numbers go to ``progress``."""
    plan: dict[str, Any] = json.loads(plan_file.read_text(encoding="utf-8"))
    module, _, name = _ANSWERERS[plan["engine"]].partition(":")
    start: type[Answerer] = getattr(importlib.import_module(module), name)
    engine = start(plan["model"], plan["drafts"], plan["max_positions"], plan["at_once"])
    requests: list[Request] = plan["requests"]
    found: dict[str, list[Answer]] = {}
    try:
        print(0, file=progress)
        for run in plan["runs"]:
            answers: dict[int, Answer] = {}
            order, together = run["order"], run["together"]
            for first in range(0, len(order), together):
                chosen = order[first : first + together]
                group = engine.answer([requests[index] for index in chosen])
                answers |= dict(zip(chosen, group, strict=True))
                print(len(chosen), file=progress)
            found[run["name"]] = [answers[index] for index in range(len(requests))]
    finally:
        engine.close()
    answers_file.write_text(json.dumps({"version": engine.version, "runs": found}), encoding="utf-8")


if __name__ == "__main__":
    # What the engine prints must not be taken for progress.
    _said = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), _said)
