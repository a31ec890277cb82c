"""``doctor`` asks vLLM, and is right in the four situations."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
    # Each test loads vLLM in a process of its own.
    pytest.mark.slow,
]

ARCHITECTURE = "DeepseekV41ForCausalLM"


def doctor(*path: Path, **variables: str) -> tuple[int, dict]:
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DEEPINFER_", "VLLM_PLUGINS"))
    }
    environ["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [sys.executable, "-P", "-m", "deepinfer_plugins", "doctor", "--engine", "vllm", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**environ, **variables}, timeout=500)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def renamed(tmp_path: Path, module: str, old: str, new: str) -> Path:
    """A vLLM in which ``module`` has another name for something; all other files are the installed ones."""
    installed = Path(importlib.util.find_spec("vllm").origin).parent  # type: ignore[union-attr, arg-type]
    site = tmp_path / "site"
    here, there = installed, site / "vllm"
    *folders, file = module.split(".")[1:]
    for folder in [*folders, None]:
        there.mkdir(parents=True)
        for entry in here.iterdir():
            if entry.name not in (folder, f"{file}.py" if folder is None else None):
                (there / entry.name).symlink_to(entry)
        if folder is not None:
            here, there = here / folder, there / folder
    source = (here / f"{file}.py").read_text()
    assert old in source
    (there / f"{file}.py").write_text(source.replace(old, new))
    return site


def test_normal() -> None:
    status, answer = doctor()
    assert (status, answer["problems"]) == (0, [])
    assert answer["active"] is True
    assert (answer["engine"], answer["version"]) == ("vllm", importlib.metadata.version("vllm"))
    assert answer["registered"]["models"][ARCHITECTURE].startswith("deepinfer_plugins.vllm_ext.")
    assert list(answer["registered"]["platforms"].values())[0].startswith("deepinfer_plugins.vllm_ext.")
    assert answer["operators"]["sparse_attention"]["provider"]


@pytest.mark.parametrize("value", ["", "other_plugin"])
def test_plugin_is_not_enabled(value: str) -> None:
    status, answer = doctor(VLLM_PLUGINS=value)
    assert (status, answer["active"]) == (1, False)
    assert answer["registered"] == {"models": {}, "platforms": {}, "hooks": {}}
    (problem,) = answer["problems"]
    assert f"VLLM_PLUGINS={value!r} leaves it out" in problem and "vllm.general_plugins" in problem


@pytest.mark.parametrize("strict", ["0", "1"])
def test_broken_seam(tmp_path: Path, strict: str) -> None:
    site = renamed(tmp_path, "vllm.platforms.cpu", "class CpuPlatform(", "class HostPlatform(")
    status, answer = doctor(site, DEEPINFER_PLUGINS_STRICT=strict)
    assert (status, answer["active"]) == (1, False)
    assert answer["registered"]["models"] == {}
    problems = "\n".join(answer["problems"])
    assert "vllm.platforms.cpu:CpuPlatform" in problems
    assert ("vLLM would exit" in problems) is (strict == "1")


def test_native_model_as_asked() -> None:
    status, answer = doctor(DEEPINFER_PLUGINS_MODEL="native")
    assert (status, answer["active"], answer["problems"]) == (0, False, [])
    assert answer["registered"]["models"] == {}
    assert any("as asked" in warning for warning in answer["warnings"])


@pytest.mark.parametrize(("ours", "theirs"), [("1", "0"), ("0", "1")])
def test_batch_invariance_asked_for_and_not(ours: str, theirs: str) -> None:
    status, answer = doctor(DEEPINFER_BATCH_INVARIANT=ours, VLLM_BATCH_INVARIANT=theirs)
    assert status == 1
    assert any("batch invariance" in p and "DEEPINFER_BATCH_INVARIANT" in p for p in answer["problems"])


def test_provider_asked_for_does_not_exist() -> None:
    status, answer = doctor(DEEPINFER_PLUGINS_ROPE="no_such")
    assert status == 1
    assert answer["operators"]["rope"]["provider"] is None
    assert any("DEEPINFER_PLUGINS_ROPE=no_such" in problem for problem in answer["problems"])
