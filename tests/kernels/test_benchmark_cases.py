"""The cases of ``benchmarks/kernels.py`` fit the operators that they measure."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_plugins.model.presets import preset

from .conformance import reference

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
kernel_cases = importlib.import_module("kernel_cases")
CASES = importlib.import_module("dense_cases").cases(preset("small"))
TOKENS = 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}/{case.name}")
def test_arguments_are_the_operators(case: Any) -> None:
    args = case.make(TOKENS, kernel_cases.Draw(torch.device("cpu")))
    assert list(inspect.signature(reference(case.op)).parameters) == list(args)
    assert {
        name for name, value in args.items() if isinstance(value, torch.Tensor) and len(value) == TOKENS
    } == {name for name in case.rows if args[name] is not None}
    result = reference(case.op)(**args)
    results = result if isinstance(result, tuple) else (result,)
    assert all(bool(one.double().isfinite().all()) for one in results)
    # What every call must read of its rows and write.
    rows = [args[name] for name in case.rows if args[name] is not None]
    least = sum(
        tensor.numel() * tensor.element_size() for tensor in (*rows, *results) if tensor.dtype != torch.int64
    )
    assert case.num_bytes(TOKENS) >= 0.9 * least
    assert case.num_bytes(2 * TOKENS) > case.num_bytes(TOKENS)


@pytest.mark.parametrize("case", [case for case in CASES if "linear" in case.op], ids=lambda case: case.name)
def test_rivals_of_products_compute_the_same(case: Any) -> None:
    args = case.make(TOKENS, kernel_cases.Draw(torch.device("cpu")))
    want = reference(case.op)(**args).double()
    got = case.rival[1](args)().double()
    if case.op == "mxfp8_grouped_linear":
        got = got.transpose(0, 1)
    torch.testing.assert_close(got, want, atol=float(want.abs().max()) / 64, rtol=2.0**-6)


def test_names_are_unique() -> None:
    names = [(case.op, case.name) for case in kernel_cases.all_cases(preset("release"))]
    assert len(names) == len(set(names))
