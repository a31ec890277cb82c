"""Asks the vLLM beside us what it would run. A program of its own: ``doctor`` starts it in a fresh process.

It does what every vLLM process does first, loads the plugins, and then looks at the engine's own
registry and platform. What this package believes it registered does not count.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ARCHITECTURES = ("DeepseekV41ForCausalLM",)
OURS = "deepinfer_plugins."


def _load_plugins(problems: list[str]) -> None:
    from vllm.plugins import load_general_plugins

    try:
        load_general_plugins()
    except SystemExit as error:
        problems.append(f"vLLM would exit: {error}")
    except Exception as error:
        # vLLM does not catch this: it ends the engine.
        traceback.print_exc()
        problems.append(f"vLLM would not start: a plugin raised {type(error).__name__}: {error}")


def _platform(problems: list[str]) -> str:
    import vllm.platforms

    try:
        platform = type(vllm.platforms.current_platform)
    except (SystemExit, Exception) as error:
        traceback.print_exc()
        problems.append(f"vLLM would not start: it finds no platform: {error}")
        return ""
    return f"{platform.__module__}:{platform.__qualname__}"


def _model(architecture: str, problems: list[str]) -> str:
    from vllm.model_executor.models import ModelRegistry

    registered: Any = ModelRegistry.models.get(architecture)
    if registered is None:
        return ""
    name = f"{getattr(registered, 'module_name', '')}:{getattr(registered, 'class_name', '')}"
    if not name.startswith(OURS):
        return name
    try:
        found = registered.load_model_cls()
    except Exception as error:
        traceback.print_exc()
        problems.append(f"{architecture} is registered as {name}, which can't be imported: {error}")
        return name
    return f"{found.__module__}:{found.__qualname__}"


def probe() -> dict[str, Any]:
    """What vLLM would run, as JSON takes it.

    Returns:
        ``version``; ``models`` and ``platform``, the engine's own answers; ``enabled``, whether the
        engine calls our entry points at all; ``report``, this package's record; ``survey``; and
        ``problems``.
    """
    import vllm
    from vllm import envs
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP, load_plugins_by_group

    problems: list[str] = []
    groups = (DEFAULT_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP)
    enabled = [group for group in groups if "deepinfer" in load_plugins_by_group(group)]
    # In an engine, whichever comes first resolves the platform; plugins may look at it.
    platform = _platform(problems)
    _load_plugins(problems)
    models = {name: _model(name, problems) for name in ARCHITECTURES}

    from deepinfer_plugins.core.report import report
    from deepinfer_plugins.platforms.survey import survey

    return {
        "version": vllm.__version__,
        "enabled": enabled,
        "not_enabled": [group for group in groups if group not in enabled],
        "switch": f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']!r}" if "VLLM_PLUGINS" in os.environ else "",
        "models": models,
        "platform": platform,
        "report": report().as_dict(),
        "survey": survey(batch_invariant=True if envs.VLLM_BATCH_INVARIANT else None),
        "problems": problems,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(probe()), encoding="utf-8")
