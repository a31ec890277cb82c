"""Asks the vLLM beside us what it would run. A program of its own: ``doctor`` starts it in a fresh process.

It does what every vLLM process does first, loads the plugins, and then looks at the engine's own
registry and platform. What this package believes it registered does not count.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

ARCHITECTURES = ("DeepseekV41ForCausalLM", "DSparkV41DraftModel")
OURS = "deepinfer_plugins."


def _load_plugins(problems: list[str]) -> None:
    from vllm.plugins import load_general_plugins

    try:
        load_general_plugins()
    except Exception as error:
        # vLLM does not catch this: it ends the engine.
        traceback.print_exc()
        problems.append(f"vLLM would not start: a plugin raised {type(error).__name__}: {error}")


def _platform(problems: list[str]) -> str:
    import vllm.platforms

    try:
        platform = type(vllm.platforms.current_platform)
    except Exception as error:
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


def _planned() -> list[dict[str, Any]]:
    """Patches that are made when vLLM configures our model, and when a worker starts for it."""
    from deepinfer_plugins.vllm_ext import versions

    changes: Any = importlib.import_module(f"{versions.folder(versions.installed())}.patches")
    return [asdict(each) for each in (*changes.ENGINE_PATCHES, *changes.WORKER_PATCHES)]


def state() -> dict[str, Any]:
    """What vLLM runs in this process as it is now, as JSON takes it.

    Returns:
        ``version``; ``models`` (by architecture) and ``platform``, the engine's own answers, each
        ``"module:Class"``; ``hooks``, by name, and ``planned``, patches that the process which builds
        the model will make; ``report``, this package's record; ``survey``; and ``problems``.
    """
    import vllm
    from vllm import envs

    from deepinfer_plugins.core.report import report
    from deepinfer_plugins.platforms.survey import survey

    problems: list[str] = []
    return {
        "version": vllm.__version__,
        "models": {name: _model(name, problems) for name in ARCHITECTURES},
        "platform": _platform(problems),
        "hooks": {},
        "planned": _planned() if report().active else [],
        "report": report().as_dict(),
        "survey": survey(
            batch_invariant=envs.VLLM_BATCH_INVARIANT if envs.is_set("VLLM_BATCH_INVARIANT") else None
        ),
        "problems": problems,
    }


def probe() -> dict[str, Any]:
    """What vLLM would run: :func:`state` once the plugins are loaded, as in every process of vLLM.

    Returns:
        Also ``not_enabled``, the entry-point groups of ours that vLLM does not call, and ``switch``,
        the variable that tells it not to.
    """
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP, load_plugins_by_group

    groups = (DEFAULT_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP)
    not_enabled = [group for group in groups if "deepinfer" not in load_plugins_by_group(group)]
    problems: list[str] = []
    # In an engine, whatever comes first resolves the platform; plugins may look at it.
    _platform(problems)
    _load_plugins(problems)
    found = state()
    return {
        **found,
        "not_enabled": not_enabled,
        "switch": f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']!r}" if "VLLM_PLUGINS" in os.environ else "",
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
