"""``accept_or_resample``, a bounded number of entries at a time."""

from __future__ import annotations

import torch

from deepinfer_plugins.kernels import filtering
from deepinfer_plugins.kernels.accept_or_resample import reference


def accept_or_resample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
    draft_token: torch.Tensor,
    draft_row: torch.Tensor,
    draft_log_probs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference."""
    accepted = torch.zeros_like(draft_row, dtype=torch.bool)
    token = torch.full_like(draft_row, -1)
    overlap = torch.zeros_like(temperature)
    rows = torch.arange(logits.shape[0], device=logits.device)
    if logits.is_cpu:
        # Here looking for the drafts costs nothing; elsewhere it would wait for the device.
        rows = rows[draft_row >= 0]
    args = (logits, temperature, min_p, top_k, top_p, seed, position, draft_token, draft_row)
    for part in filtering.parts(logits):
        some = rows[part]
        results = reference.accept_or_resample(*[*filtering.take(args, some), draft_log_probs])
        for table, result in zip((accepted, token, overlap), results, strict=True):
            table[some] = result
    return accepted, token, overlap
