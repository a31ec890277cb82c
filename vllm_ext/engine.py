"""vLLM as our own commands run it: through its Python interface, in this process."""

from __future__ import annotations

import os
from typing import Any


class VllmEngine:
    """A running ``vllm.LLM`` with our model.

    Args:
        model: The checkpoint's folder or id.
        drafts: Drafts per step; 0 for none.
        max_positions: Tokens of a sequence at most.
        options: More of ``vllm.LLM``'s.
    """

    def __init__(self, model: str, drafts: int, max_positions: int, **options: Any) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM, __version__

        self.version: str = __version__
        if drafts:
            options["speculative_config"] = {"method": "dspark", "num_speculative_tokens": drafts}
        self.llm: Any = LLM(model, max_model_len=max_positions, **options)

    def close(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()
