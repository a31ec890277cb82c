"""What this process has registered with its engine, and what kept it from doing so.

Every engine process loads the plugin anew, so the record is of one process. It holds only what was
done; ``doctor`` asks the engine itself whether it took effect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from deepinfer_plugins.core import patch as patches

_LOG = logging.getLogger("deepinfer_plugins")

KINDS = ("models", "platforms", "hooks")


@dataclass(slots=True)
class Report:
    """One process's record.

    Args:
        engine: ``"vllm"`` or ``"sglang"``; empty before any registration.
        version: The engine's version.
        active: Whether everything was registered. There is no half: it is all or nothing.
        registered: By kind (``models``, ``platforms``, ``hooks``), what was registered: the engine's
            name for it, and where ours is.
        problems: Why nothing was registered, or what was asked for and can't be had.
    """

    engine: str = ""
    version: str = ""
    active: bool = False
    registered: dict[str, dict[str, str]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    problems: list[str] = field(default_factory=list)

    def add(self, kind: str, name: str, ours: str) -> None:
        """Record that ``ours`` (``"module:name"``) was registered under the engine's ``name``."""
        if kind not in self.registered:
            raise ValueError(f"{kind!r} is no kind of registration; it is one of {', '.join(KINDS)}")
        self.registered[kind][name] = ours

    def problem(self, reason: str) -> None:
        """Record a problem once, however often registration runs."""
        if reason not in self.problems:
            self.problems.append(reason)

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON takes it, with the patches that this process has applied."""
        return {
            "engine": self.engine,
            "version": self.version,
            "active": self.active,
            "registered": {kind: dict(names) for kind, names in self.registered.items()},
            "patches": [asdict(patch) for patch in patches.ledger()],
            "problems": [
                *self.problems,
                *(f"{target}: replaced by somebody else" for target in patches.overwritten()),
            ],
        }


_REPORT = Report()


def report() -> Report:
    """This process's record."""
    return _REPORT


def decline(reasons: Iterable[str], *, strict: bool) -> None:
    """Record why nothing is registered, and say so once.

    Raises:
        SystemExit: If ``strict``. An ordinary exception would not do: SGLang swallows those of plugins.
    """
    new = [reason for reason in reasons if reason not in _REPORT.problems]
    for reason in new:
        _REPORT.problem(reason)
    _REPORT.active = False
    text = "deepinfer_plugins registers nothing, the engine runs without it:\n" + "\n".join(
        f"- {reason}" for reason in _REPORT.problems
    )
    if strict:
        raise SystemExit(text.replace("the engine runs without it", "and DEEPINFER_PLUGINS_STRICT is set"))
    if new:
        _LOG.warning("%s\nDEEPINFER_PLUGINS_STRICT=1 makes this an exit.", text)
