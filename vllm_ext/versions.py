"""Which vLLM versions this package knows. The only file of the room that compares versions."""

from __future__ import annotations

import importlib.metadata

# Installed release -> the package here that holds what is special to it.
_FOLDERS = {"0.33.0": "deepinfer_plugins.vllm_ext.v0_33"}


class UnsupportedVersion(LookupError):
    """The installed vLLM is none that this package was tested with."""


def installed() -> str:
    """The version of the vLLM beside us, from its metadata; no import of it."""
    return importlib.metadata.version("vllm")


def folder(version: str) -> str:
    """The package that holds what is special to ``version``.

    A build suffix (``0.33.0+empty``) names the same sources and is ignored.

    Raises:
        UnsupportedVersion: If there is none.
    """
    release = version.partition("+")[0]
    if release not in _FOLDERS:
        raise UnsupportedVersion(
            f"vLLM {version} is installed; this package supports {', '.join(_FOLDERS)}. Install one of these, or add "
            "a version folder (vllm_ext/README.md says how)"
        )
    return _FOLDERS[release]
