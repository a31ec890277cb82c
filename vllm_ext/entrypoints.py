"""What vLLM calls when it starts: one function per entry-point group.

Importing this imports neither torch nor vLLM. vLLM calls both functions in every process, any number
of times, in any order; an exception would end the engine, so a reason not to go ahead is said once
and nothing is registered. ``DEEPINFER_PLUGINS_STRICT=1`` makes that an exit.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from deepinfer_plugins.core import patch
from deepinfer_plugins.core.report import decline, report
from deepinfer_plugins.core.settings import SettingError, Settings, is_strict
from deepinfer_plugins.platforms.detect import Found, UnsupportedChip, detect
from deepinfer_plugins.vllm_ext import versions


@functools.cache
def _engine_reasons() -> tuple[str, ...]:
    """Why the installed engine can't take us; empty if it can. Its files do not change while we run."""
    try:
        seams = _version_module("seams")
    except versions.UnsupportedVersion as error:
        return (str(error),)
    return tuple(seams.missing())


def _version_module(name: str) -> Any:
    return importlib.import_module(f"{versions.folder(versions.installed())}.{name}")


def _admit() -> tuple[Settings, Found] | None:
    """The settings and the chip if we may register, else None after saying why."""
    found = report()
    found.engine, found.version = "vllm", versions.installed()
    try:
        settings = Settings.from_env()
        chip = detect(settings.accelerator)
    except (SettingError, UnsupportedChip) as error:
        decline([str(error)], strict=is_strict())
        return None
    if reasons := [*settings.refusals, *_engine_reasons()]:
        decline(reasons, strict=settings.strict)
        return None
    for problem in settings.problems:
        found.problem(problem)
    if settings.model == "native":
        return None
    return settings, chip


def platform() -> str | None:
    """The dotted path of our platform class, or None to leave the choice to vLLM."""
    if (admitted := _admit()) is None:
        return None
    settings, chip = admitted
    if settings.batch_invariant:
        # One mode, two names: the engine's own turns its half of it on.
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")
    chosen: str | None = _version_module("platform").choose(chip)
    if chosen is not None:
        report().add("platforms", chosen.rpartition(".")[2], chosen)
    return chosen


def register() -> None:
    """Register the model over vLLM's own."""
    if (admitted := _admit()) is None:
        return
    settings, _ = admitted
    changes = _version_module("patches")
    if reasons := [why for each in changes.PATCHES if (why := patch.check(each))]:
        decline(reasons, strict=settings.strict)
        return
    changes.apply(settings)
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    for architecture, ours in changes.MODELS.items():
        registry.register_model(architecture, ours)
        report().add("models", architecture, ours)
    report().active = True
