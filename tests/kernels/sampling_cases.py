"""Arguments that the operators which sample share."""

from __future__ import annotations

import math

import torch

from .conformance import Draw

VARIANTS = ("filters", "no filters", "ties", "mostly barred")
VOCAB = 63


def sampling_args(
    draw: Draw, num_rows: int, variant: str, vocab_size: int = VOCAB
) -> dict[str, torch.Tensor | None]:
    """Logits and what filters them; every third row is greedy, and each filter is off in some rows."""
    logits = draw.normal(num_rows, vocab_size, dtype=torch.float32, scale=3)
    if variant == "ties":
        logits = logits.round()
    if variant == "mostly barred":
        barred = draw.ints(0, 8, num_rows, vocab_size) > 0
        barred[: num_rows // 2 + 1, -1] = False
        logits = logits.masked_fill(barred, -math.inf)
    row = torch.arange(num_rows, device=draw.device)
    temperature = torch.tensor([0.0, 0.7, 1.3], dtype=torch.float64, device=draw.device)[row % 3]
    args: dict[str, torch.Tensor | None] = {"logits": logits, "temperature": temperature}
    if variant == "no filters":
        return args | {"min_p": None, "top_k": None, "top_p": None}
    args["min_p"] = torch.tensor([0.0, 0.05], dtype=torch.float64, device=draw.device)[row // 3 % 2]
    args["top_k"] = torch.tensor([0, 1, 7, vocab_size], device=draw.device)[row // 2 % 4]
    args["top_p"] = torch.tensor([1.0, 0.9, 0.3], dtype=torch.float64, device=draw.device)[row // 4 % 3]
    return args


def noise_args(draw: Draw, num_rows: int) -> dict[str, torch.Tensor]:
    """Seeds that need all 64 bits and positions past 2^32."""
    return {
        "seed": draw.ints(-(2**63), 2**63 - 1, num_rows),
        "position": draw.ints(0, 2**33, num_rows),
    }
