"""Answers requests with SGLang for ``deepinfer-plugins verify``."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfer_plugins.sglang_ext.engine import SglangEngine

# Tokens per page where pages are small.
_SMALL_PAGE = 1
_FLUSH_TIMEOUT_S = 60.0


class SglangAnswerer(SglangEngine):
    """``sglang.Engine`` with our model, read as a stream.

    Args:
        model: The checkpoint's folder or id.
        drafts: Drafts per step; 0 for none.
        max_positions: Tokens of a sequence at most.
        at_once: Requests that run at once, at most.
        small_pages: Whether a page has one token.
        chunk: Tokens of a step of a prompt at most, a multiple of a page; None: as many as SGLang takes.
        tight: Whether the caches hold a quarter of what ``at_once`` of the longest sequences need, and requests are
            retracted every few steps.
        engine_options: More of ``sglang.Engine``'s; what is said above goes before them.
    """

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
    ) -> None:
        options: dict[str, Any] = {**engine_options, "max_running_requests": at_once}
        if small_pages:
            options["page_size"] = _SMALL_PAGE
        if chunk is not None:
            options |= {"chunked_prefill_size": chunk, "enable_mixed_chunk": True}
        if tight:
            # SGLang reserves slots for two windows of drafts. It admits with care, and seldom retracts a request by
            # itself; with this it also does so every seventh step, as in its own tests.
            options["max_total_tokens"] = max(max_positions + 2 * (drafts + 1), at_once * max_positions // 4)
            os.environ |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
        super().__init__(model, drafts, max_positions, **options)
        self._runs = 0

    def answer(
        self,
        requests: Sequence[Any],
        at_once: int,
        aborts: Mapping[int, int],
        done: Callable[[], None],
    ) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """See ``commands.answer.Answerer``."""
        self._runs += 1
        counters = Counter(preemptions=0, aborted=0, drafted=0, verified=0, accepted=0)

        async def all_of_them() -> list[dict[str, Any]]:
            # Whoever waits first comes first.
            slots = asyncio.Semaphore(at_once)

            async def one(index: int, request: Mapping[str, Any]) -> dict[str, Any]:
                async with slots:
                    about, answer = await self._stream(index, request, aborts.get(index, math.inf))
                counters.update(_counts(about))
                done()
                return answer

            return await asyncio.gather(*(one(index, request) for index, request in enumerate(requests)))

        answers = self.engine.loop.run_until_complete(all_of_them())
        return answers, dict(counters)

    def forget(self) -> None:
        """Let go of every prefix in the cache."""
        flush = self.engine.tokenizer_manager.flush_cache(timeout_s=_FLUSH_TIMEOUT_S)
        if not self.engine.loop.run_until_complete(flush).success:
            raise RuntimeError(
                f"SGLang keeps its prefix cache: a request still ran after {_FLUSH_TIMEOUT_S} s"
            )

    async def _stream(
        self, index: int, request: Mapping[str, Any], abort_at: float
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """The last ``meta_info`` of an answer, and the answer."""
        # An abort is of all ids that begin so.
        name = f"{self._runs}-{index}-"
        outputs = await self.engine.async_generate(
            input_ids=request["prompt"],
            sampling_params=_parameters(request),
            return_logprob=True,
            stream=True,
            rid=name,
        )
        about: Mapping[str, Any] = {}
        answer: dict[str, Any] = {"tokens": [], "logprobs": [], "error": None, "steps": [], "cached": 0}
        is_aborted = False
        async for output in outputs:
            about = output["meta_info"]
            # What comes after the abort may reach beyond ``max_tokens``: SGLang hands out all of the last window.
            if not is_aborted:
                _update(answer, output)
                if about["finish_reason"] is None and len(answer["tokens"]) >= abort_at:
                    is_aborted = True
                    self.engine.tokenizer_manager.abort_request(name)
        if about["finish_reason"]["type"] == "abort" and not is_aborted:
            answer["error"] = about["finish_reason"].get("message")
        return about, answer


def _update(answer: dict[str, Any], output: Mapping[str, Any]) -> None:
    """Take in what a step brought."""
    tokens, about = list(output["output_ids"]), output["meta_info"]
    if brought := len(tokens) - len(answer["tokens"]):
        answer["steps"].append(brought)
    answer["tokens"] = tokens
    answer["logprobs"] = [score for score, *_ in about["output_token_logprobs"]]
    answer["cached"] = about["cached_tokens"]


def _counts(about: Mapping[str, Any]) -> dict[str, int]:
    """What ``verify`` counts, of one answer."""
    drafted = about.get("spec_num_proposed_drafts", 0)
    # SGLang counts windows, which have the last token too, by their length, and only where a schedule trims them.
    windows = about.get("spec_cap_lens_histogram")
    return {
        "preemptions": about["num_retractions"],
        "aborted": int(about["finish_reason"]["type"] == "abort"),
        "drafted": drafted,
        "verified": drafted if windows is None else sum((i - 1) * n for i, n in enumerate(windows) if i),
        "accepted": about.get("spec_num_correct_drafts", 0),
    }


def _parameters(request: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(request["options"])
    schema = options.pop("json_schema", None)
    if schema is not None:
        options["json_schema"] = json.dumps(schema)
    return {
        "max_new_tokens": request["max_tokens"],
        "sampling_seed": request["seed"],
        # A text under a grammar ends where that does.
        "ignore_eos": schema is None,
        **options,
    }
