"""The Triton and Gluon providers compile, at the release's shapes, for chips that are not here."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .sass import overwritten_operands

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
    """With all tiles, for few rows and for many: no sum and no decoded weight leaves the registers.

    Nor does the assembler give up the overlap of products with what comes after them, of which it only warns; nor does
    what comes after them write what they read, of which nobody warns.
    """
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    cases = ["experts/experts", "mxfp8_linear/wo_b", "mxfp8_linear/wq_b"]
    done = compile_for(90, cases, tmp_path, "gluon", "1,32,64,128,512,2048")
    assert done.returncode == 0, done.stderr
    assert "18 of 18 calls compiled" in done.stderr
    products = [path for path in tmp_path.glob("*/*.ptx") if "wgmma.mma_async" in path.read_text()]
    assert len(products) >= 12
    for path in products:
        told = assembler_says(path)
        assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", told), told
        assert "C75" not in told, told
        read_too_late = overwritten_operands(disassembled(path.with_suffix(".cubin")))
        assert not read_too_late, f"{path.stem}: {len(read_too_late)}, e.g. {read_too_late[:3]}"


def test_an_operand_that_is_overwritten_is_found() -> None:
    loop = """
    .L_x_0:
        /*0000*/ HMUL2.BF16_V2 R4, R9, R8 ;
        /*0010*/ HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0 ;
        /*0020*/ WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0030*/ @P0 BRA `(.L_x_0) ;
        /*0040*/ STG.E desc[UR4][R4.64], R24 ;
        /*0050*/ EXIT ;
    """
    assert overwritten_operands(loop.format(left="0x1")) == ["HMUL2.BF16_V2 R4, R9, R8"]
    assert not overwritten_operands(loop.format(left="0x0"))
    wide = loop.replace("HMUL2.BF16_V2 R4, R9, R8", "LDS.128 R0, [R9]")
    assert not overwritten_operands(wide.format(left="0x1"))
    assert overwritten_operands(wide.replace("R0, [", "R4, [").format(left="0x1"))


def disassembled(cubin: Path) -> str:
    """A kernel's instructions, by the disassembler that Triton brings."""
    disassembler = importlib.import_module("triton.knobs").nvidia.nvdisasm.path
    return subprocess.run([disassembler, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


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
