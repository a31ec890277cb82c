"""``deepinfer-plugins calibrate``: what it prints, writes and refuses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from deepinfer_plugins.cli import app
from deepinfer_plugins.core.settings import Settings
from deepinfer_plugins.features.calibration import AcceptanceLog

TEMPERATURES = (0.6, 1.4, 2.5)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rng = np.random.default_rng(11)
    logits = rng.normal(1.0, 2.0, (8_000, 3))
    taken = rng.random((8_000, 3)) < 1.0 / (1.0 + np.exp(-logits / TEMPERATURES))
    path = tmp_path / "acceptance.jsonl"
    with AcceptanceLog(path, model="synthetic") as writer:
        writer.write(logits, np.full(8_000, 3), np.cumprod(taken, axis=1).sum(axis=1))
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["calibrate", *map(str, arguments)], env={"COLUMNS": "160"})
    return result.exit_code, result.stdout, result.stderr


def test_it_prints_a_setting_that_can_be_set(log: Path) -> None:
    status, out, _ = run(log)
    assert status == 0
    name, _, value = out.splitlines()[-1].partition("=")
    settings = Settings.from_env({name: value})
    assert settings.confidence_temperatures == pytest.approx(TEMPERATURES, rel=0.25)
    assert "8,000 verifications" in out


def test_json_and_output_hold_the_same(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    status, out, _ = run(log, "--json", "--output", file)
    assert status == 0
    found = json.loads(out)
    assert found == json.loads(file.read_text())
    assert found["format"] == "deepinfer-plugins calibration"
    assert [position["samples"] for position in found["positions"]][0] == 8_000
    assert found["positions"][2]["error_after"] < found["positions"][2]["error_before"]


def test_logs_count_together(log: Path) -> None:
    assert "16,000 verifications" in run(log, log)[1]


def test_without_matplotlib_it_says_what_to_install(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, errors = run(log, "--plot", tmp_path / "plot.png")
    assert status == 2 and "pip install 'deepinfer-plugins[plot]'" in errors


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_it_draws_a_panel_for_each_position(log: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot{suffix}"
    assert run(log, "--plot", path)[0] == 0
    content = path.read_bytes()
    if suffix == ".svg":
        assert content.count(b'<g id="axes_') == 3
    else:
        assert content.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "arguments", "complaint"),
    [
        (None, (), "No such file"),
        ("{}\n", (), "line 1: expected the format"),
        ("", (), "no draft was verified"),
        ("", ("--plot", "plot.pdf"), "end in .png and .svg"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, content: str | None, arguments: tuple[str, ...], complaint: str
) -> None:
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_text(content)
    status, out, errors = run(path, *arguments)
    assert status == 2 and complaint in errors and not out
