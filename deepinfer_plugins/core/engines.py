"""The engines that this package plugs into, and which of them this environment has. Imports none of them."""

from __future__ import annotations

import importlib.metadata
from enum import StrEnum


class Engine(StrEnum):
    """The engines, by the name of their distribution; the first that is there is the default."""

    vllm = "vllm"
    sglang = "sglang"


def find_version(engine: str) -> str | None:
    """The version of an engine's distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed() -> list[Engine]:
    """Those of this environment, the default first."""
    return [engine for engine in Engine if find_version(engine) is not None]


def default() -> Engine:
    """The one to use where none is named.

    Raises:
        LookupError: If there is none.
    """
    if not (found := installed()):
        raise LookupError("neither vLLM nor SGLang is installed in this environment")
    return found[0]
