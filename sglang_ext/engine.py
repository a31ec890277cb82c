"""SGLang as our own commands run it: through its Python interface, with its scheduler in a process of its own."""

from __future__ import annotations

import os
from typing import Any


class SglangEngine:
    """A running ``sglang.Engine`` with our model.

    Args:
        model: The checkpoint's folder or id.
        drafts: Drafts per step; 0 for none.
        max_positions: Tokens of a sequence at most.
        options: More of ``sglang.Engine``'s.
    """

    def __init__(self, model: str, drafts: int, max_positions: int, **options: Any) -> None:
        # The scheduler reads it from its environment.
        os.environ["DEEPINFER_USE_NEXTN_DECODE"] = str(drafts)
        import sglang

        self.version: str = sglang.__version__
        self.engine: Any = sglang.Engine(
            model_path=model, context_length=max_positions, log_level="error", **options
        )

    def close(self) -> None:
        """End the engine's processes."""
        self.engine.shutdown()
