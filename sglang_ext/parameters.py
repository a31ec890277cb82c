"""Sampling parameters that SGLang lets through and its scheduler dies of, refused where requests come in."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

# SGLang keeps counts in 32 bits.
LARGEST = 2**31 - 1


def checking(original: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """``SamplingParams.verify`` that also refuses, with the name and the bounds, what no tensor of SGLang's holds."""

    def verify(self: Any, vocab_size: int) -> None:
        for name in ("top_k", "min_new_tokens"):
            _check_count(name, getattr(self, name))
        for value in (self.logit_bias or {}).values():
            if not isinstance(value, Real) or isinstance(value, bool):
                raise ValueError(f"logit_bias must have numbers as values, got {value!r}.")
        original(self, vocab_size)
        for token in self.stop_token_ids or ():
            if not 0 <= token < vocab_size:
                raise ValueError(f"stop_token_ids must be in [0, {vocab_size - 1}], got {token}.")

    return verify


def _check_count(name: str, value: Any) -> None:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole or value > LARGEST:
        raise ValueError(f"{name} must be a whole number of at most {LARGEST}, got {value!r}.")
