"""What SGLang's two plugin loaders call, in every process and in any order.

Nothing here imports torch or SGLang at the top: the loaders import this module in processes that
need neither. SGLang logs an exception of a plugin and goes on without it, so a failure is turned into
recorded reasons first (:func:`deepinfer_plugins.core.report.decline`), and a hook that SGLang does not
guard checks at start-up that ours is the model that runs.
"""

from __future__ import annotations

import os

from deepinfer_plugins.core.report import decline, report
from deepinfer_plugins.core.settings import SettingError, Settings, is_strict
from deepinfer_plugins.platforms.detect import UnsupportedChip, detect
from deepinfer_plugins.sglang_ext import versions

MODELS = "deepinfer_plugins.sglang_ext.models"
_PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_PLATFORMS = {
    "cpu": "deepinfer_plugins.sglang_ext.platforms:CpuPlatform",
    "cuda": "deepinfer_plugins.sglang_ext.platforms:CudaPlatform",
}


def _settings() -> tuple[Settings | None, list[str]]:
    """The settings and the reasons not to register; no settings if they can't be read."""
    try:
        settings = Settings.from_env()
    except SettingError as error:
        return None, [str(error)]
    reasons = list(settings.refusals)
    if why := versions.refusal(versions.installed()):
        reasons.append(why)
    else:
        from deepinfer_plugins.sglang_ext.v0_5_23 import seams

        reasons += seams.missing()
    try:
        chip = detect(settings.accelerator).chip
        if chip.refusal:
            reasons.append(f"{chip.arch.value}: {chip.refusal}")
    except UnsupportedChip as error:
        reasons.append(str(error))
    package = os.environ.get(_PACKAGE_VARIABLE, MODELS)
    if package != MODELS:
        reasons.append(
            f"{_PACKAGE_VARIABLE}={package}: SGLang takes one such package and it would hide our model; unset it"
        )
    return settings, reasons


def platform() -> str | None:
    """The platform class for this machine, for the group ``sglang.srt.platforms``.

    Returns:
        ``"module:Class"``, or None where the engine's own platform is to be used.
    """
    settings, reasons = _settings()
    if settings is None or reasons or settings.model == "native":
        return None
    # SGLang resolves the platform before it imports its model registry. Naming our package here
    # also spares the import of some 250 model files, until one of those is asked for.
    os.environ[_PACKAGE_VARIABLE] = MODELS
    return _PLATFORMS[detect(settings.accelerator).chip.torch_device]


def register() -> None:
    """Register with SGLang, for the group ``sglang.srt.plugins``: everything, or nothing and why."""
    record = report()
    record.engine, record.version = "sglang", versions.installed() or ""
    settings, reasons = _settings()
    if settings is None or reasons:
        decline(reasons, strict=settings.strict if settings else is_strict())
        return
    if settings.model == "native":
        return
    for problem in settings.problems:
        record.problem(problem)
    from deepinfer_plugins.sglang_ext import hooks

    hooks.register()
    device = detect(settings.accelerator).chip.torch_device
    record.add("platforms", device, _PLATFORMS[device])
    record.active = True
