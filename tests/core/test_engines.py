"""Which engine this environment has."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from deepinfer_plugins.core import engines
from deepinfer_plugins.core.engines import Engine


def having(*there: str) -> Any:
    def version(name: str) -> str:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2"

    return version


def test_the_first_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", having("sglang"))
    assert engines.installed() == [Engine.sglang] and engines.default() == "sglang"
    assert engines.find_version("sglang") == "1.2" and engines.find_version("vllm") is None
    monkeypatch.setattr(importlib.metadata, "version", having("sglang", "vllm"))
    assert engines.installed() == ["vllm", "sglang"] and engines.default() == "vllm"


def test_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", having())
    assert engines.installed() == []
    with pytest.raises(LookupError, match="neither vLLM nor SGLang"):
        engines.default()
