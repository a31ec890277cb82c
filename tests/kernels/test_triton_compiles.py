"""The Triton providers that use the matrix unit compile for a chip that is not here, at the release's shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "compile_ahead.py"
CASES = [
    "mxfp8_linear/wo_b",
    "linear/gate",
    "experts/experts",
    "hc_mix/hidden",
    "index_select/all",
    "sparse_attention/compressed",
]


def compile_for(arch: int, cases: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(PROGRAM.parents[1])}
    command = [sys.executable, str(PROGRAM), "--arch", str(arch), "--tokens", "16", "--ops", ",".join(cases)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)


def test_for_sm100(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = compile_for(100, CASES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{len(CASES)} of {len(CASES)} calls compiled" in done.stderr
    assert len(list(tmp_path.glob("*/*.cubin"))) >= len(CASES)


def test_what_does_not_compile_is_told(tmp_path: Path) -> None:
    """FP8 numbers of this format are not for a chip this old."""
    pytest.importorskip("triton")
    done = compile_for(70, ["mxfp8_linear/wo_b"], tmp_path)
    assert done.returncode == 1
    assert "not compiled: ('mxfp8_linear/wo_b', 16, None)" in done.stderr
