"""Every operator of the room, and the set of them that a process uses. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from deepinfer_plugins.core.target import Want

# Imported for what they register.
from deepinfer_plugins.kernels import (  # noqa: F401
    accept_or_resample,
    combine,
    engram_gate,
    engram_gather,
    engram_hash,
    experts,
    filter_log_probs,
    hc_collapse,
    hc_merge,
    hc_mix,
    index_select,
    linear,
    load_compressor,
    mxfp8_cast,
    mxfp8_grouped_linear,
    mxfp8_linear,
    pool_pairs,
    rms_norm,
    rope,
    route,
    sample,
    sparse_attention,
    store_compressed,
    store_compressor,
    store_index_key,
    store_window,
    swiglu_and_cast,
)
from deepinfer_plugins.kernels.registry import Choice, choose

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ops:
    """The operators, each bound to the provider that was chosen for it. Arguments: ``<op>/reference.py``."""

    mxfp8_cast: Callable[..., tuple[Tensor, Tensor]]
    mxfp8_linear: Callable[..., Tensor]
    mxfp8_grouped_linear: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    hc_merge: Callable[..., Tensor]
    hc_mix: Callable[..., tuple[Tensor, Tensor, Tensor]]
    hc_collapse: Callable[..., Tensor]
    engram_hash: Callable[..., Tensor]
    engram_gather: Callable[..., tuple[Tensor, Tensor]]
    engram_gate: Callable[..., Tensor]
    pool_pairs: Callable[..., Tensor]
    store_window: Callable[..., None]
    store_compressed: Callable[..., None]
    store_index_key: Callable[..., None]
    store_compressor: Callable[..., None]
    load_compressor: Callable[..., tuple[Tensor, Tensor]]
    index_select: Callable[..., tuple[Tensor, Tensor]]
    sparse_attention: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    swiglu_and_cast: Callable[..., tuple[Tensor, Tensor]]
    experts: Callable[..., Tensor]
    combine: Callable[..., Tensor]
    sample: Callable[..., Tensor]
    filter_log_probs: Callable[..., Tensor]
    accept_or_resample: Callable[..., tuple[Tensor, Tensor, Tensor]]


def choices(want: Want) -> dict[str, Choice]:
    """The provider chosen for each operator, and why not the others; loads none of them.

    Raises:
        NoProvider: If an operator has none that can serve ``want``.
    """
    return {field.name: choose(field.name, want) for field in fields(Ops)}


def not_capturable(want: Want) -> list[str]:
    """Operators whose chosen provider no CUDA graph can hold, as ``operator (provider)``.

    Raises:
        NoProvider: If an operator has none that can serve ``want``.
    """
    chosen = {name: choice.provider for name, choice in choices(want).items()}
    return [f"{name} ({provider.name})" for name, provider in chosen.items() if not provider.capturable]


def load_ops(want: Want) -> Ops:
    """Choose and load every operator. To be called once, at start-up.

    Raises:
        NoProvider: If an operator has none that can serve ``want``.
    """
    return Ops(**{name: choice.load() for name, choice in choices(want).items()})
