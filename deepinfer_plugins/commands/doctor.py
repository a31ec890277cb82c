"""``deepinfer-plugins doctor``: what is active on this machine, as the engine itself answers.

An engine may be told to load no plugins, may swallow a plugin's exception, or may be asked before
another plugin registers over ours. So a fresh process loads the engine the way the engine's own
processes do, and this module reports what it then finds there (``probe.py`` of the engine's room).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deepinfer_plugins
from deepinfer_plugins.core import engines

OURS = "deepinfer_plugins."
TIMEOUT_S = 600
_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


@dataclass(slots=True)
class Diagnosis:
    """The answer; its fields are the keys of ``doctor --json``.

    Args:
        engine: ``"vllm"`` or ``"sglang"``; None if neither is installed.
        version: The engine's version.
        chip: The chip this process would run on.
        graphs: What CUDA graphs hold where no flag says otherwise, or why there are none.
        active: Whether the engine would run our model.
        registered: By kind, the engine's name and the class or function behind it, ours only.
        patches: Changes inside the engine: those made at registration, and those (``"applied": false``) that
            the process which builds the model will make.
        operators: For each, the provider and why the others were passed over.
        problems: Why something that was asked for is not active. None: the exit status is 0.
        warnings: What may surprise, and is no failure.
    """

    engine: str | None = None
    version: str | None = None
    chip: str | None = None
    graphs: str | None = None
    active: bool = False
    registered: dict[str, dict[str, str]] = field(
        default_factory=lambda: {"models": {}, "platforms": {}, "hooks": {}}
    )
    patches: list[dict[str, Any]] = field(default_factory=list)
    operators: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


def diagnose(engine: str | None = None) -> Diagnosis:
    """Ask.

    Args:
        engine: Which engine; None: the one that is installed.
    """
    found = Diagnosis(warnings=shadows(Path.cwd()))
    present = engines.installed()
    if engine is None and len(present) > 1:
        found.warnings.append(
            f"{' and '.join(present)} are installed; this is about {present[0]}, see --engine"
        )
    engine = engine or (present[0] if present else None)
    if engine is None or engine not in present:
        return _without_engine(found, engine, present)
    found.engine, found.version = engine, engines.find_version(engine)
    answer, failure = _ask(engine)
    if answer is None:
        found.problems.append(failure)
        return found
    if "exit" in answer:
        found.problems.append(f"{_NAMES[engine]} would exit: {answer['exit']}")
        return _with_survey(found)
    _read(found, answer)
    return found


def _without_engine(found: Diagnosis, engine: str | None, present: Sequence[str]) -> Diagnosis:
    if engine is None:
        found.problems.append(
            f"no engine is installed in this environment ({sys.prefix}): there is neither vLLM nor SGLang; "
            "pip install 'deepinfer-plugins[vllm]' or 'deepinfer-plugins[sglang]'"
        )
    else:
        other = f"; {_NAMES[present[0]]} is" if present else ""
        found.problems.append(
            f"{_NAMES[engine]} is not installed in this environment ({sys.prefix}){other}; "
            f"pip install 'deepinfer-plugins[{engine}]'"
        )
        found.engine = engine
    return _with_survey(found)


def _with_survey(found: Diagnosis) -> Diagnosis:
    """Add what can be said without an engine."""
    from deepinfer_plugins.platforms.survey import survey

    _add_survey(found, survey())
    return found


def _ask(engine: str) -> tuple[dict[str, Any] | None, str]:
    """The probe's answer, or None and what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        # -P: as for the engine's own commands, the current folder is not on the path.
        command = [sys.executable, "-P", "-m", f"{OURS}{engine}_ext.probe", str(answer)]
        with log.open("wb") as output:
            try:
                done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return None, f"{_NAMES[engine]} did not answer in {TIMEOUT_S} s; it may wait for a device"
        if answer.exists():
            return json.loads(answer.read_text(encoding="utf-8")), ""
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = "\n  ".join(said[-5:])
        return (
            None,
            f"{_NAMES[engine]} can't be loaded (exit status {done.returncode}); it said last:\n  {last}",
        )


def _read(found: Diagnosis, answer: dict[str, Any]) -> None:
    """Turn the probe's answer into a diagnosis."""
    assert found.engine is not None
    name = _NAMES[found.engine]
    record = answer["report"]
    found.version = answer["version"]
    ours = {architecture: cls for architecture, cls in answer["models"].items() if cls.startswith(OURS)}
    found.registered["models"] = ours
    if answer["platform"].startswith(OURS):
        found.registered["platforms"] = {answer["platform"].rpartition(":")[2]: answer["platform"]}
    found.registered["hooks"] = answer["hooks"]
    found.patches = [{**patch, "applied": True} for patch in record["patches"]]
    applied = {patch["target"] for patch in record["patches"]}
    for patch in answer["planned"]:
        if patch["target"] not in applied:
            found.patches.append({**patch, "applied": False})
    found.problems += answer["problems"] + [
        p for p in record["problems"] if p not in "\n".join(answer["problems"])
    ]
    native = os.environ.get("DEEPINFER_PLUGINS_MODEL") == "native"
    missing = [architecture for architecture in answer["models"] if architecture not in ours]
    found.active = bool(record["active"]) and not missing
    if answer["not_enabled"]:
        because = f"; {answer['switch']} leaves it out" if answer["switch"] else ""
        found.problems.append(
            f"{name} does not load the plugin 'deepinfer' of {' and '.join(answer['not_enabled'])}{because}"
        )
    elif missing and not native and not found.problems:
        for architecture in missing:
            runs = answer["models"][architecture] or "nothing"
            found.problems.append(
                f"{name} would run {runs} for {architecture}, not our model, although this package was asked to "
                "register: something registered after it"
            )
    if native:
        found.warnings.append(f"DEEPINFER_PLUGINS_MODEL=native: {name} runs its own model, as asked")
    _add_survey(found, answer["survey"])


def _add_survey(found: Diagnosis, survey: dict[str, Any]) -> None:
    found.chip, found.graphs, found.operators = survey["chip"], survey["graphs"], survey["operators"]
    found.problems += [problem for problem in survey["problems"] if problem not in found.problems]
    found.warnings += survey["warnings"]


def shadows(folder: Path) -> list[str]:
    """Warnings: what a Python started in ``folder`` takes for an engine, for torch or for this package."""
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != folder.resolve()]
    warnings = []
    for name in (*engines.Engine, "torch", "kernels", "deepinfer_plugins"):
        spec = importlib.machinery.PathFinder.find_spec(name, elsewhere)
        real = spec.origin if spec is not None else None
        if name == "deepinfer_plugins":
            real = deepinfer_plugins.__file__
        for path in (folder / name / "__init__.py", folder / f"{name}.py"):
            if path.exists() and (real is None or path.resolve() != Path(real).resolve()):
                warnings.append(
                    f"{path} hides the package {name} from a Python started in this folder; "
                    "rename it or start elsewhere"
                )
        # A folder without __init__.py only wins where there is no package: an engine that is not installed
        # then imports as an empty one.
        if name in list(engines.Engine) and real is None and (folder / name).is_dir() and not warnings:
            warnings.append(
                f"{folder / name} is no package, but `import {name}` in this folder finds it, "
                f"since no {name} is installed"
            )
    return warnings
