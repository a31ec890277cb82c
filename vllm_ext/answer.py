"""Answers requests with vLLM for ``deepinfer-plugins verify``, through vLLM's own Python interface."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


class VllmAnswerer:
    """``vllm.LLM`` with our model.

    Args:
        model: The checkpoint's folder or id.
        drafts: Drafts per step; 0 for none.
        max_positions: Tokens of a sequence at most.
        at_once: Requests that run at once, at most.
    """

    def __init__(self, model: str, drafts: int, max_positions: int, at_once: int) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM, __version__

        self.version: str = __version__
        options: dict[str, Any] = {}
        if drafts:
            options["speculative_config"] = {"method": "dspark", "num_speculative_tokens": drafts}
        self._llm = LLM(model, max_model_len=max_positions, max_num_seqs=at_once, **options)

    def answer(self, requests: list[Any]) -> list[dict[str, Any]]:
        """Answer all at once."""
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        outputs = self._llm.generate(prompts, [_parameters(request) for request in requests], use_tqdm=False)
        answers = []
        for output in outputs:
            (sample,) = output.outputs
            scores = [at[token].logprob for token, at in zip(sample.token_ids, sample.logprobs, strict=True)]
            failed = sample.finish_reason in ("abort", "error")
            error = f"finished by {sample.finish_reason}" if failed else None
            answers.append({"tokens": list(sample.token_ids), "logprobs": scores, "error": error})
        return answers

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()


def _parameters(request: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = dict(request["options"])
    schema = options.pop("json_schema", None)
    if schema is not None:
        options["structured_outputs"] = StructuredOutputsParams(json=schema)
    return SamplingParams(
        max_tokens=request["max_tokens"],
        seed=request["seed"],
        logprobs=0,
        # A text under a grammar ends where that does.
        ignore_eos=schema is None,
        **options,
    )
