"""Which SGLang this package was built for. The only file of the room that compares versions."""

from __future__ import annotations

import importlib.metadata

# Engine version -> the folder with what is particular to it.
SUPPORTED = {"0.5.23": "v0_5_23"}


def installed() -> str | None:
    """SGLang's version as its distribution states it; None if there is none. Imports no SGLang."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def refusal(version: str | None) -> str:
    """Why ``version`` can't be served; empty if it can."""
    if version is None:
        return "SGLang is not installed; `pip install sglang==0.5.23` beside this package"
    if version.split("+")[0] not in SUPPORTED:
        return f"SGLang {version} is installed, supported is {', '.join(SUPPORTED)}; install that version"
    return ""
