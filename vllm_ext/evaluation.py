"""Runs a checkpoint in vLLM for ``deepinfer-plugins evaluate``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_plugins.vllm_ext.engine import VllmEngine

# Requests per call, so that progress is seen.
AT_ONCE = 16


class VllmRunner(VllmEngine):
    """``vllm.LLM`` with our model, which drafts and writes the acceptance log.

    Args:
        folder: The checkpoint.
        drafts: Drafts per step; 0 for none.
        log: Where the acceptance log goes.
        max_positions: Tokens of a sequence at most.
    """

    def __init__(self, folder: Path, drafts: int, log: Path, max_positions: int) -> None:
        os.environ["DEEPINFER_PLUGINS_ACCEPTANCE_LOG"] = str(log)
        # Every prompt is scored: one that a cached prefix spares has no log-probabilities.
        super().__init__(str(folder), drafts, max_positions, enable_prefix_caching=False)

    def log_probabilities(
        self, sequences: Sequence[Sequence[int]], on_tokens: Callable[[int], None]
    ) -> list[npt.NDArray[np.float64]]:
        """Of every token but each sequence's first, given those before it: vLLM's prompt log-probabilities."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        found = []
        for output in self._generate(sequences, params, on_tokens, counts=list(map(len, sequences))):
            tokens, scores = output.prompt_token_ids, output.prompt_logprobs
            found.append(np.array([at[token].logprob for token, at in zip(tokens[1:], scores[1:])]))
        return found

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, on_tokens: Callable[[int], None]
    ) -> list[int]:
        """Continue every prompt greedily, to the end of the text or for ``max_tokens``; the log counts drafts."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
        self._generate(prompts, params, on_tokens, counts=[max_tokens] * len(prompts))
        return []

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Any,
        on_tokens: Callable[[int], None],
        counts: Sequence[int],
    ) -> list[Any]:
        outputs: list[Any] = []
        for first in range(0, len(prompts), AT_ONCE):
            tokens = [{"prompt_token_ids": list(prompt)} for prompt in prompts[first : first + AT_ONCE]]
            outputs += self.llm.generate(tokens, params, use_tqdm=False)
            on_tokens(sum(counts[first : first + AT_ONCE]))
        return outputs
