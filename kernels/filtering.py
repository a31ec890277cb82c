"""Temperature, min-p, top-k and top-p of one row: which entries stay, and their log-probabilities.

Probabilities are compared as whole numbers of 2^-40 of the most probable entry's, so that a sum of them is the same
in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from deepinfer_plugins.kernels import elementary

ONE = 1 << 40

# Entries that the torch providers handle at a time. Few enough for a CPU's cache, many enough for a GPU.
_CPU_ENTRIES = 1 << 15
_GPU_ENTRIES = 1 << 22


def parts(logits: torch.Tensor) -> Iterator[slice]:
    """Slices of the rows of ``logits``, each of a bounded number of entries or of one row."""
    at_once = max(1, (_CPU_ENTRIES if logits.is_cpu else _GPU_ENTRIES) // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], at_once):
        yield slice(start, start + at_once)


def take(args: tuple[torch.Tensor | None, ...], rows: torch.Tensor | slice) -> list[Any]:
    """``rows`` of each tensor."""
    return [arg if arg is None else arg[rows] for arg in args]


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """Numbers that sort as the entries do: by logit, of equal ones the lower id above the higher.

    Args:
        logits: ``[n, vocab_size]``, float32.

    Returns:
        ``[n, vocab_size]``, int64, no two of a row equal.
    """
    # Adding zero makes -0 a 0. The bits of a negative number fall as it rises.
    bits = (logits + 0.0).view(torch.int32)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (rising << 32) - ids


def shift(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x - max x`` with ``x = logits / temperature``, and where the maximum is.

    Args:
        logits: ``[n, vocab_size]``, float32.
        temperature: ``[n]``, float64; 0 counts as 1.

    Returns:
        shifted: ``[n, vocab_size]``, float64; 0 at the first maximum even in a row all of which is barred.
        best: ``[n, 1]``, int64: the first maximum.
    """
    x = logits.double() / torch.where(temperature == 0, 1.0, temperature)[:, None]
    best = logits.argmax(dim=1, keepdim=True)
    # Not minus infinity less itself.
    top = x.gather(1, best).clamp(min=torch.finfo(torch.float64).min)
    return (x - top).scatter_(1, best, 0.0), best


def filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What stays of each row.

    With ``x = logits / temperature``, an entry's mass is ``round(exp(x - max x) * 2^40)``, halves up. Filters apply
    in this order, each to what the one before it left, entries sorted by falling logit, of equal ones the lower id
    first:

    - min-p keeps an entry if ``exp(x - max x) >= min_p``,
    - top-k keeps the first ``top_k``,
    - top-p keeps an entry if the mass before it is below ``top_p`` of the mass that top-k left: the fewest entries
      that together have ``top_p``.

    The first entry always stays; of a greedy row and of one all of which is barred, it alone.

    Args:
        logits: ``[n, vocab_size]``, float32; -inf for what is barred.
        temperature: ``[n]``, float64; 0: greedy.
        min_p: ``[n]``, float64, 0 for off; None: off for all.
        top_k: ``[n]``, int64, 0 for off; None: off for all.
        top_p: ``[n]``, float64, 1 for off; None: off for all.

    Returns:
        shifted: ``[n, vocab_size]``, float64: ``x - max x``; -inf where an entry was removed.
        mass: ``[n]``, int64: the sum of the masses of what stays.
    """
    num_entries = logits.shape[1]
    shifted, best = shift(logits, temperature)
    weights = elementary.exp(shifted)
    masses = (weights * float(ONE)).add_(0.5).floor_().to(torch.int64)
    kept = logits > -math.inf
    if min_p is not None:
        kept &= weights >= min_p[:, None]
    if top_k is not None or top_p is not None:
        order = order_keys(logits).sort(dim=1, descending=True).indices
        kept = kept.gather(1, order)
        if top_k is not None:
            limit = torch.where(top_k == 0, num_entries, top_k)
            kept &= torch.arange(num_entries, device=logits.device) < limit[:, None]
        if top_p is not None:
            ordered = masses.gather(1, order) * kept
            through = ordered.cumsum(dim=1)
            limit = (through[:, -1].double() * top_p).ceil_().to(torch.int64)
            kept &= (through - ordered < limit[:, None]) | (top_p >= 1)[:, None]
        kept = torch.empty_like(kept).scatter_(1, order, kept)
    first = torch.zeros_like(kept).scatter_(1, best, True)
    kept = torch.where((temperature == 0)[:, None], first, kept | first)
    return shifted.masked_fill_(~kept, -math.inf), (masses * kept).sum(dim=1)


def log_probs(shifted: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, float64, of what :func:`filtered` returns."""
    return shifted - elementary.log(mass.double() * (1.0 / ONE))[:, None]
