"""``sample``, a bounded number of entries at a time."""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels import filtering
from deepinfer_plugins.kernels.sample import reference


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    min_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
    stream: torch.Tensor,
) -> torch.Tensor:
    """As the reference."""
    tokens = logits.argmax(dim=1)
    if temperature is None:
        return tokens
    rows = torch.arange(logits.shape[0], device=logits.device)
    if logits.is_cpu:
        # Here looking at the temperatures costs nothing; elsewhere it would wait for the device.
        rows = rows[temperature > 0]
    for part in filtering.parts(logits):
        some = rows[part]
        args = (logits, temperature, min_p, top_k, top_p, seed, position, stream)
        tokens[some] = reference.sample(*filtering.take(args, some))
    return tokens
