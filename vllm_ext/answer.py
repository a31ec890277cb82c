"""Answers requests with vLLM for ``deepinfer-plugins verify``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfer_plugins.vllm_ext.engine import VllmEngine

# Tokens per block where pages are small.
_SMALL_BLOCK = 16
# What ``verify`` counts, by vLLM's names.
_COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "verified": "vllm:spec_decode_num_verified_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


class VllmAnswerer(VllmEngine):
    """``vllm.LLM`` with our model, step by step.

    Args:
        model: The checkpoint's folder or id.
        drafts: Drafts per step; 0 for none.
        max_positions: Tokens of a sequence at most.
        at_once: Requests that run at once, at most.
        small_pages: Whether a block has 16 tokens.
        chunk: Tokens of a step at most, at least ``at_once``; None: as many as vLLM takes.
        tight: Whether the caches hold no more than one of the longest sequences.
        engine_options: More of ``vllm.LLM``'s; what is said above goes before them.
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
        options: dict[str, Any] = {**engine_options, "max_num_seqs": at_once, "disable_log_stats": False}
        if small_pages:
            options["block_size"] = _SMALL_BLOCK
        if chunk is not None:
            options["max_num_batched_tokens"] = chunk
        super().__init__(model, drafts, max_positions, **options)
        self._runs = 0
        if tight:
            self._leave_room_for_one()

    def answer(
        self,
        requests: Sequence[Any],
        at_once: int,
        aborts: Mapping[int, int],
        done: Callable[[], None],
    ) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """See ``commands.answer.Answerer``."""
        engine, before = self.llm.llm_engine, self._counters()
        self._runs += 1
        waiting, running, num_aborted = deque(range(len(requests))), set[int](), 0
        answers: list[dict[str, Any]] = [{"steps": []} for _ in requests]
        while waiting or running:
            while waiting and len(running) < at_once:
                index = waiting.popleft()
                prompt = {"prompt_token_ids": requests[index]["prompt"]}
                engine.add_request(f"{self._runs}-{index}", prompt, _parameters(requests[index]))
                running.add(index)
            for output in engine.step():
                index = int(output.request_id.partition("-")[2])
                answer = answers[index]
                _update(answer, output)
                doomed = not output.finished and len(answer["tokens"]) >= aborts.get(index, math.inf)
                if doomed:
                    engine.abort_request([output.request_id])
                    num_aborted += 1
                if output.finished or doomed:
                    running.remove(index)
                    done()
        counters = {name: value - before[name] for name, value in self._counters().items()}
        return answers, {**counters, "aborted": num_aborted}

    def forget(self) -> None:
        """Let go of every prefix in the cache."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps its prefix cache: a request still holds blocks of it")

    def _counters(self) -> dict[str, int]:
        found = {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}
        return {name: int(found.get(theirs, 0)) for name, theirs in _COUNTERS.items()}

    def _leave_room_for_one(self) -> None:
        """Take blocks away, all but those that a sequence of the greatest length may need."""
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        config = scheduler.kv_cache_config
        fit = get_max_concurrency_for_kv_cache_config(self.llm.llm_engine.vllm_config, config)
        pool = scheduler.kv_cache_manager.block_pool
        pool.get_new_blocks(pool.get_num_free_blocks() - math.ceil(config.num_blocks / fit))


def _update(answer: dict[str, Any], output: Any) -> None:
    """Take in what a step brought."""
    (sample,) = output.outputs
    tokens = list(sample.token_ids)
    if brought := len(tokens) - sum(answer["steps"]):
        answer["steps"].append(brought)
    failed = sample.finish_reason in ("abort", "error")
    answer |= {
        "tokens": tokens,
        "logprobs": [at[token].logprob for token, at in zip(tokens, sample.logprobs, strict=True)],
        "error": f"finished by {sample.finish_reason}" if failed else None,
        "cached": output.num_cached_tokens or 0,
    }


def _parameters(request: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = dict(request["options"])
    schema = options.pop("json_schema", None)
    if schema is not None:
        options["structured_outputs"] = StructuredOutputsParams(json=schema)
    if bias := options.pop("logit_bias", None):
        # Keys of JSON are text.
        options["logit_bias"] = {int(token): value for token, value in bias.items()}
    return SamplingParams(
        max_tokens=request["max_tokens"],
        seed=request["seed"],
        logprobs=0,
        # A text under a grammar ends where that does.
        ignore_eos=schema is None,
        **options,
    )
