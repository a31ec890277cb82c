"""Answers requests with SGLang for ``deepinfer-plugins verify``, through SGLang's own Python interface."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any


class SglangAnswerer:
    """``sglang.Engine`` with our model.

    Args:
        model: The checkpoint's folder or id.
        drafts: Drafts per step; 0 for none.
        max_positions: Tokens of a sequence at most.
        at_once: Requests that run at once, at most.
    """

    def __init__(self, model: str, drafts: int, max_positions: int, at_once: int) -> None:
        # The scheduler is a process of its own, and reads it from its environment.
        os.environ["DEEPINFER_USE_NEXTN_DECODE"] = str(drafts)
        import sglang

        self.version: str = sglang.__version__
        self._engine = sglang.Engine(
            model_path=model, context_length=max_positions, max_running_requests=at_once, log_level="error"
        )

    def answer(self, requests: list[Any]) -> list[dict[str, Any]]:
        """Answer all at once."""
        outputs = self._engine.generate(
            input_ids=[request["prompt"] for request in requests],
            sampling_params=[_parameters(request) for request in requests],
            return_logprob=True,
        )
        answers = []
        for output in outputs:
            about = output["meta_info"]
            scores = [score for score, *_ in about["output_token_logprobs"]]
            reason = about["finish_reason"]
            error = reason.get("message") if reason["type"] == "abort" else None
            answers.append({"tokens": list(output["output_ids"]), "logprobs": scores, "error": error})
        return answers

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()


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
