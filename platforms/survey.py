"""What this process would compute with: its chip, and the provider of every operator, with reasons."""

from __future__ import annotations

from typing import Any

from deepinfer_plugins.core.settings import SettingError, Settings
from deepinfer_plugins.core.target import Want
from deepinfer_plugins.kernels import catalogue, registry
from deepinfer_plugins.platforms import detect


def survey(*, batch_invariant: bool | None = None) -> dict[str, Any]:
    """Ask the environment, the chip and the registry. Loads no provider.

    Args:
        batch_invariant: What the engine's own flag says; None: nothing.

    Returns:
        ``chip``, ``graphs``, ``operators`` (``{name: {provider, passed_over: {name: reason}}}``), ``problems`` and
        ``warnings``.
    """
    assert catalogue, "importing the catalogue registers the providers"
    found: dict[str, Any] = {"chip": None, "graphs": None, "operators": {}, "problems": [], "warnings": []}
    problems = found["problems"]
    try:
        settings = Settings.from_env()
        problems += [*settings.refusals, *settings.problems, *settings.unknown(registry.operators())]
        chip = detect.detect(settings.accelerator)
        found["chip"] = str(chip)
        want = detect.want(settings, flag=("the engine", batch_invariant))
    except (SettingError, detect.UnsupportedChip) as error:
        problems.append(str(error))
        return found
    if chip.chip.refusal:
        problems.append(f"{chip.arch.value}: {chip.chip.refusal}")
    for op in registry.operators():
        found["operators"][op] = _choice(op, want, problems)
    found["warnings"] += _unchecked(want, found["operators"])
    if all(choice["provider"] for choice in found["operators"].values()):
        reason = detect.no_graphs(settings, asked=False, flag=("the engine", batch_invariant))
        found["graphs"] = f"none: {reason}" if reason else "whole steps"
    return found


def _choice(op: str, want: Want, problems: list[str]) -> dict[str, Any]:
    try:
        choice = registry.choose(op, want)
    except registry.NoProvider as error:
        problems.append(str(error))
        passed_over = {provider.name: provider.refusal(want) for provider in registry.providers(op)}
        return {"provider": None, "passed_over": passed_over}
    return {"provider": choice.provider.name, "passed_over": dict(choice.passed_over)}


def _unchecked(want: Want, operators: dict[str, dict[str, Any]]) -> list[str]:
    """What serves in batch-invariant mode because it was asked for by name."""
    names = [
        f"{op} ({provider.name})"
        for op, choice in operators.items()
        for provider in registry.providers(op)
        if provider.name == choice["provider"] and want.arch in provider.unchecked
    ]
    if not want.batch_invariant or not names:
        return []
    return [f"taken as asked, but not run on hardware ({want.arch.value}): {', '.join(names)}"]
