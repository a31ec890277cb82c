"""Asks the SGLang beside us what it would run. A program of its own: ``doctor`` starts it in a fresh process.

It does what every SGLang process does first, resolves the platform and loads the plugins, and then
looks at the engine's own registry and hooks. What this package believes it registered does not count.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# SGLang renames DeepseekV41ForCausalLM to this while it reads the configuration.
ARCHITECTURES = ("DeepseekV4ForCausalLM",)


def _platform(problems: list[str]) -> str:
    import sglang.srt.platforms

    try:
        platform = type(sglang.srt.platforms.current_platform)
    except (SystemExit, Exception) as error:
        traceback.print_exc()
        problems.append(f"SGLang would not start: it finds no platform: {error}")
        return ""
    return f"{platform.__module__}:{platform.__qualname__}"


def _load_plugins(problems: list[str]) -> None:
    from sglang.srt.plugins import load_plugins

    try:
        load_plugins()
    except SystemExit as error:
        problems.append(f"SGLang would exit: {error}")


def _model(architecture: str, problems: list[str]) -> str:
    try:
        from sglang.srt.models.registry import ModelRegistry

        found, _ = ModelRegistry.resolve_model_cls([architecture])
    except Exception as error:
        traceback.print_exc()
        problems.append(f"SGLang has no class for {architecture}: {error}")
        return ""
    return f"{found.__module__}:{found.__qualname__}"


def probe() -> dict[str, Any]:
    """What SGLang would run, as JSON takes it.

    Returns:
        The same keys as :func:`deepinfer_plugins.vllm_ext.probe.probe`.
    """
    import sglang
    from sglang.srt.plugins import (
        GENERAL_PLUGINS_GROUP,
        PLATFORM_PLUGINS_GROUP,
        _get_excluded_dists,
        load_plugins_by_group,
    )

    problems: list[str] = []
    groups = (GENERAL_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP)
    enabled = [group for group in groups if "deepinfer" in load_plugins_by_group(group, _get_excluded_dists())]
    platform = _platform(problems)
    _load_plugins(problems)
    models = {name: _model(name, problems) for name in ARCHITECTURES}

    from deepinfer_plugins.core.report import report
    from deepinfer_plugins.platforms.survey import survey

    switches = {name: os.environ[name] for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM") if os.environ.get(name)}
    return {
        "version": sglang.__version__,
        "enabled": enabled,
        "not_enabled": [group for group in groups if group not in enabled],
        "switch": ", ".join(f"{name}={value!r}" for name, value in switches.items()),
        "models": models,
        "platform": platform,
        "report": report().as_dict(),
        "survey": survey(),
        "problems": problems,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(probe()), encoding="utf-8")
