"""The record is complete, can be sent as JSON, and a refusal is said once."""

import json
import logging
from collections.abc import Iterator

import pytest

from deepinfer_plugins.core import patch as patches
from deepinfer_plugins.core import report as reports
from deepinfer_plugins.core.patch import Patch


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reports, "_REPORT", reports.Report())
    yield
    for patch in patches.ledger():
        patches.revert(patch)


def test_as_dict_is_json_and_has_the_patches() -> None:
    patch = Patch("json:JSONEncoder.default", "an example", "none", "never")
    patches.wrap(patch, lambda original: lambda self, o: original(self, o))
    record = reports.report()
    record.engine, record.version, record.active = "vllm", "0.33.0", True
    record.add("models", "DeepseekV41ForCausalLM", "deepinfer_plugins.vllm_ext.model:Model")
    record.problem("a problem")
    record.problem("a problem")
    got = json.loads(json.dumps(record.as_dict()))
    assert got == {
        "engine": "vllm",
        "version": "0.33.0",
        "active": True,
        "registered": {
            "models": {"DeepseekV41ForCausalLM": "deepinfer_plugins.vllm_ext.model:Model"},
            "platforms": {},
            "hooks": {},
        },
        "patches": [
            {
                "target": patch.target,
                "why": "an example",
                "upstream": "none",
                "remove_when": "never",
                "parameters": [],
            }
        ],
        "problems": ["a problem"],
    }


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'kernels' is no kind"):
        reports.report().add("kernels", "x", "y")


def test_overwritten_patch_is_a_problem() -> None:
    original = json.JSONEncoder.default
    patches.apply(Patch("json:JSONEncoder.default", "an example", "none", "never"), lambda self, o: None)
    json.JSONEncoder.default = original  # type: ignore[method-assign]
    assert reports.report().as_dict()["problems"] == ["json:JSONEncoder.default: replaced by somebody else"]


def test_decline_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "deepinfer_plugins"):
        for _ in range(2):
            reports.decline(["the seam is broken"], strict=False)
    assert len(caplog.records) == 1
    assert "the seam is broken" in caplog.text and "DEEPINFER_PLUGINS_STRICT=1" in caplog.text
    assert not reports.report().active


def test_decline_exits_when_strict() -> None:
    with pytest.raises(SystemExit, match="the seam is broken"):
        reports.decline(["the seam is broken"], strict=True)
    assert reports.report().problems == ["the seam is broken"]
