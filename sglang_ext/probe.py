"""Asks the SGLang beside us what it would run. A program of its own: ``doctor`` starts it in a fresh process.

It does what every SGLang process does first, resolves the platform and loads the plugins, and then
looks at the engine's own registry and hooks. What this package believes it registered does not count.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

# SGLang renames DeepseekV41ForCausalLM to this while it reads the configuration.
ARCHITECTURES = ("DeepseekV4ForCausalLM",)
OURS = "deepinfer_plugins."


def _platform(problems: list[str]) -> str:
    import sglang.srt.platforms

    try:
        platform = type(sglang.srt.platforms.current_platform)
    except Exception as error:
        traceback.print_exc()
        problems.append(f"SGLang would not start: it finds no platform: {error}")
        return ""
    return f"{platform.__module__}:{platform.__qualname__}"


def _model(architecture: str, problems: list[str]) -> str:
    try:
        from sglang.srt.models.registry import ModelRegistry

        found, _ = ModelRegistry.resolve_model_cls([architecture])
    except Exception as error:
        traceback.print_exc()
        problems.append(f"SGLang has no class for {architecture}: {error}")
        return ""
    return f"{found.__module__}:{found.__qualname__}"


def _hooks() -> dict[str, str]:
    """Our steps in SGLang's resolution of its configuration, from its own table."""
    from sglang.srt.arg_groups import resolution_hooks

    ours = {}
    for step, hooks in resolution_hooks._HOOKS.items():
        for hook in hooks:
            if hook.__module__.startswith(OURS):
                ours[step] = f"{hook.__module__}:{hook.__qualname__}"
    return ours


def _planned() -> list[dict[str, Any]]:
    """Patches that the scheduler's process makes when it builds the model."""
    from deepinfer_plugins.sglang_ext.v0_5_23.patches import PATCHES

    return [asdict(patch) for patch in PATCHES]


def state() -> dict[str, Any]:
    """What SGLang runs in this process as it is now, with the keys that the other room's probe has."""
    import sglang

    from deepinfer_plugins.core.report import report
    from deepinfer_plugins.platforms.survey import survey

    problems: list[str] = []
    record = report().as_dict()
    return {
        "version": sglang.__version__,
        "models": {name: _model(name, problems) for name in ARCHITECTURES},
        "platform": _platform(problems),
        "hooks": _hooks(),
        "planned": _planned() if record["active"] else [],
        "report": record,
        "survey": survey(),
        "problems": problems,
    }


def probe() -> dict[str, Any]:
    """What SGLang would run: :func:`state` once the plugins are loaded, as in every process of SGLang.

    Returns:
        Also ``not_enabled``, the entry-point groups of ours that SGLang does not call, and ``switch``,
        the variables that tell it not to.
    """
    from sglang.srt.plugins import (
        GENERAL_PLUGINS_GROUP,
        PLATFORM_PLUGINS_GROUP,
        _get_excluded_dists,
        load_plugins,
        load_plugins_by_group,
    )

    groups = (GENERAL_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP)
    excluded = _get_excluded_dists()
    not_enabled = [group for group in groups if "deepinfer" not in load_plugins_by_group(group, excluded)]
    problems: list[str] = []
    _platform(problems)
    load_plugins()
    found = state()
    # SGLang reads an empty SGLANG_PLUGINS like an unset one: it does not keep plugins out.
    switches = {
        name: os.environ[name] for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM") if os.environ.get(name)
    }
    return {
        **found,
        "not_enabled": not_enabled,
        "switch": ", ".join(f"{name}={value!r}" for name, value in switches.items()),
        "problems": list(dict.fromkeys(problems + found["problems"])),
    }


def main(answer: Path) -> None:
    """Write the answer; ``{"exit": reason}`` where the engine itself would end, as our strict mode makes it."""
    try:
        found = probe()
    except SystemExit as error:
        found = {"exit": str(error)}
    answer.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
