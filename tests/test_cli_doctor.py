"""``doctor`` where no engine is needed to know the answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from deepinfer_plugins.commands import doctor

ROOT = Path(__file__).parents[1]
# What an environment without an engine lacks. It is taken away here, which is the same to Python.
HEAVY = ("vllm", "sglang", "torch", "triton", "transformers", "functorch", "_editable_impl")


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python that has this package and its command line, but no engine and no torch."""
    site = tmp_path / "site"
    site.mkdir()
    for entry in Path(typer.__file__).parents[1].iterdir():
        if not entry.name.startswith(HEAVY) and not entry.name.endswith(".pth"):
            (site / entry.name).symlink_to(entry)
    (site / "deepinfer_plugins").symlink_to(ROOT / "deepinfer_plugins")
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "COLUMNS": "200"}


def run(
    bare: dict[str, str], folder: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    # -S: no site-packages.
    command = [sys.executable, "-S", "-P", "-c", "from deepinfer_plugins.cli import main; main()", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={**bare, **variables}, timeout=60
    )


def test_no_engine(bare: dict[str, str], tmp_path: Path) -> None:
    done = run(bare, tmp_path, "doctor", "--json")
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert list(answer) == [
        "engine",
        "version",
        "chip",
        "graphs",
        "active",
        "registered",
        "patches",
        "operators",
        "problems",
        "warnings",
    ]
    assert (answer["engine"], answer["version"], answer["active"]) == (None, None, False)
    assert answer["registered"] == {"models": {}, "platforms": {}, "hooks": {}}
    assert (
        "no engine is installed" in answer["problems"][0]
        and "deepinfer-plugins[vllm]" in answer["problems"][0]
    )
    assert answer["chip"].startswith("cpu (")
    assert answer["graphs"] == "none: there are none on cpu"
    assert {"rms_norm", "sparse_attention", "experts"} <= answer["operators"].keys()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engine_asked_for_is_not_installed(bare: dict[str, str], tmp_path: Path, engine: str) -> None:
    done = run(bare, tmp_path, "doctor", "--engine", engine)
    assert done.returncode == 1
    assert (
        "is not installed in this environment" in done.stdout
        and f"deepinfer-plugins[{engine}]" in done.stdout
    )


def test_operators_say_why_a_provider_is_passed_over(bare: dict[str, str], tmp_path: Path) -> None:
    answer = json.loads(run(bare, tmp_path, "doctor", "--json").stdout)
    # There is no torch here, so a provider that needs anything can't serve.
    for name, choice in answer["operators"].items():
        assert set(choice) == {"provider", "passed_over"}, name
        assert choice["provider"] or choice["passed_over"], name


def test_provider_that_does_not_exist_is_a_problem(bare: dict[str, str], tmp_path: Path) -> None:
    answer = json.loads(
        run(bare, tmp_path, "doctor", "--json", DEEPINFER_PLUGINS_RMS_NORM="cuda_sm70").stdout
    )
    assert answer["operators"]["rms_norm"]["provider"] is None
    assert any("DEEPINFER_PLUGINS_RMS_NORM=cuda_sm70" in problem for problem in answer["problems"])


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("DEEPINFER_PLUGINS_STRCT", "1", "did you mean DEEPINFER_PLUGINS_STRICT"),
        ("DEEPINFER_BATCH_INVARIANT", "maybe", "DEEPINFER_BATCH_INVARIANT='maybe'"),
        ("DEEPINFER_GC_INTERVAL_STEP", "7", "not supported by this version"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "compact", "changes results"),
        ("DEEPINFER_ACCELERATOR", "ascend", "no such chip"),
    ],
)
def test_settings_that_have_no_effect_are_problems(
    bare: dict[str, str], tmp_path: Path, variable: str, value: str, said: str
) -> None:
    answer = json.loads(run(bare, tmp_path, "doctor", "--json", **{variable: value}).stdout)
    assert any(said in problem for problem in answer["problems"]), answer["problems"]


@pytest.mark.parametrize("name", ["vllm", "kernels"])
def test_package_in_the_current_folder_is_a_warning(bare: dict[str, str], tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    answer = json.loads(run(bare, tmp_path, "doctor", "--json").stdout)
    (warning,) = answer["warnings"]
    assert f"{name}/__init__.py hides the package {name}" in warning


def test_plain_folder_named_like_a_missing_engine_is_a_warning(bare: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "kernels").mkdir()
    (warning,) = json.loads(run(bare, tmp_path, "doctor", "--json").stdout)["warnings"]
    assert "sglang is no package" in warning


def test_own_checkout_is_no_shadow() -> None:
    assert doctor.shadows(ROOT) == []


def test_engine_that_can_not_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A probe that dies is reported with what it said, and nothing is claimed."""
    monkeypatch.setattr(doctor.engines, "find_version", lambda engine: "0.0" if engine == "vllm" else None)
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "python"))
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho libcuda.so.1 is missing >&2\nexit 3\n")
    script.chmod(0o755)
    found = doctor.diagnose()
    assert not found.active and found.engine == "vllm"
    (problem,) = found.problems
    assert "can't be loaded (exit status 3)" in problem and "libcuda.so.1 is missing" in problem


def answer_of_an_engine(**changes: object) -> dict[str, object]:
    record = {"active": True, "registered": {}, "patches": [], "problems": []}
    ours = "deepinfer_plugins.vllm_ext.v:Model"
    return {
        "version": "0.33.0",
        "models": {"DeepseekV41ForCausalLM": ours},
        "platform": "deepinfer_plugins.vllm_ext.v:Platform",
        "hooks": {},
        "planned": [],
        "report": record,
        "survey": {"chip": "cpu (x)", "graphs": "none", "operators": {}, "problems": [], "warnings": []},
        "problems": [],
        "not_enabled": [],
        "switch": "",
        **changes,
    }


def read(**changes: object) -> doctor.Diagnosis:
    found = doctor.Diagnosis(engine="vllm")
    doctor._read(found, answer_of_an_engine(**changes))
    return found


def test_active() -> None:
    found = read()
    assert found.active and found.problems == []
    assert found.registered["platforms"] == {"Platform": "deepinfer_plugins.vllm_ext.v:Platform"}


def test_model_that_another_plugin_took_over_is_not_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our record says that we registered; the engine's registry says something else, and it is right."""
    found = read(models={"DeepseekV41ForCausalLM": "other.plugin:Model"})
    assert not found.active
    assert any("vLLM would run other.plugin:Model" in problem for problem in found.problems)


def test_native_model_as_asked_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_PLUGINS_MODEL", "native")
    found = read(models={"DeepseekV41ForCausalLM": "vllm.models.deepseek_v41:Model"})
    assert not found.active and found.problems == []
    assert "runs its own model, as asked" in found.warnings[0]


def test_patches_to_come_are_told_from_those_made() -> None:
    made = {"target": "a:b", "why": "w", "upstream": "none", "remove_when": "r", "parameters": []}
    to_come = {**made, "target": "a:c"}
    report = {"active": True, "registered": {}, "patches": [made], "problems": []}
    found = read(report=report, planned=[made, to_come])
    assert [(patch["target"], patch["applied"]) for patch in found.patches] == [("a:b", True), ("a:c", False)]


def test_version_and_help_start_quickly(bare: dict[str, str], tmp_path: Path) -> None:
    """Neither may import an engine or torch: there is none here."""
    assert run(bare, tmp_path, "version").returncode == 0
    helped = run(bare, tmp_path, "--help").stdout
    assert all(command in helped for command in ("doctor", "make-checkpoint", "version"))
