"""Runs a checkpoint in SGLang for ``deepinfer-plugins evaluate``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_plugins.sglang_ext.engine import SglangEngine

# Requests per call, so that progress is seen.
AT_ONCE = 16


class SglangRunner(SglangEngine):
    """``sglang.Engine`` with our model, which drafts and writes the acceptance log.

    Args:
        folder: The checkpoint.
        drafts: Drafts per step; 0 for none.
        log: Where the acceptance log goes.
        max_positions: Tokens of a sequence at most.
    """

    def __init__(self, folder: Path, drafts: int, log: Path, max_positions: int) -> None:
        # The scheduler is a process of its own, and reads it from its environment.
        os.environ["DEEPINFER_PLUGINS_ACCEPTANCE_LOG"] = str(log)
        super().__init__(str(folder), drafts, max_positions, disable_radix_cache=True)

    def log_probabilities(
        self, sequences: Sequence[Sequence[int]], on_tokens: Callable[[int], None]
    ) -> list[npt.NDArray[np.float64]]:
        """Of every token but each sequence's first, given those before it: SGLang's input log-probabilities."""
        options = {"return_logprob": True, "logprob_start_len": 0}
        answers = self._generate(sequences, 1, on_tokens, list(map(len, sequences)), **options)
        return [
            np.array([score for score, *_ in answer["meta_info"]["input_token_logprobs"][1:]])
            for answer in answers
        ]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, on_tokens: Callable[[int], None]
    ) -> list[int]:
        """Continue every prompt greedily, to the end of the text or for ``max_tokens``.

        Returns:
            How many verifications accepted none of the drafts, one, two and so on, as SGLang counts.
        """
        answers = self._generate(prompts, max_tokens, on_tokens, [max_tokens] * len(prompts))
        counts = [answer["meta_info"].get("spec_correct_drafts_histogram", []) for answer in answers]
        return [sum(column) for column in zip_longest(*counts, fillvalue=0)]

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        on_tokens: Callable[[int], None],
        counts: Sequence[int],
        **options: Any,
    ) -> list[Any]:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens}
        answers: list[Any] = []
        for first in range(0, len(prompts), AT_ONCE):
            tokens = [list(prompt) for prompt in prompts[first : first + AT_ONCE]]
            answers += self.engine.generate(input_ids=tokens, sampling_params=sampling, **options)
            on_tokens(sum(counts[first : first + AT_ONCE]))
        return answers
