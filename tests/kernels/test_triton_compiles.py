"""The Triton and Gluon providers compile, at the release's shapes, for chips that are not here."""

from __future__ import annotations

import importlib
import os
import re
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


def compile_for(
    arch: int, cases: list[str], cache: Path, provider: str = "triton", tokens: str = "16"
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(PROGRAM.parents[1])}
    command = [sys.executable, str(PROGRAM), "--arch", str(arch), "--tokens", tokens, "--provider", provider]
    command += ["--ops", ",".join(cases)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)


def test_for_sm100(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = compile_for(100, CASES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{len(CASES)} of {len(CASES)} calls compiled" in done.stderr
    assert len(list(tmp_path.glob("*/*.cubin"))) >= len(CASES)


def test_gluon_for_sm90(tmp_path: Path) -> None:
    """With tiles for few rows and for many: no sum and no decoded weight leaves the registers.

    Nor does the assembler give up the overlap of products with what comes after them, of which it only warns.
    """
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    done = compile_for(90, ["experts/experts", "mxfp8_linear/wo_b"], tmp_path, "gluon", "16,2048")
    assert done.returncode == 0, done.stderr
    assert "4 of 4 calls compiled" in done.stderr
    products = [path for path in tmp_path.glob("*/*.ptx") if "wgmma.mma_async" in path.read_text()]
    assert len(products) >= 4
    for path in products:
        told = assembler_says(path)
        assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", told), told
        assert "C75" not in told, told


def assembler_says(ptx: Path) -> str:
    """What NVIDIA's assembler, which Triton brings, says of a kernel."""
    assembler = importlib.import_module("triton.knobs").nvidia.ptxas.path
    command = [assembler, "--verbose", "--gpu-name=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".out"))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_what_does_not_compile_is_told(tmp_path: Path) -> None:
    """FP8 numbers of this format are not for a chip this old."""
    pytest.importorskip("triton")
    done = compile_for(70, ["mxfp8_linear/wo_b"], tmp_path)
    assert done.returncode == 1
    assert "not compiled: ('mxfp8_linear/wo_b', 16, None)" in done.stderr
