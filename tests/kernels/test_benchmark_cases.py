"""The cases of ``benchmarks/kernels.py`` fit the operators that they measure."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_plugins.model.presets import preset

from .conformance import reference

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
kernel_cases = importlib.import_module("kernel_cases")
DENSE = importlib.import_module("dense_cases")
CASES = [
    case
    for name in ("dense_cases", "token_cases")
    for case in importlib.import_module(name).cases(preset("small"))
]
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
    for one in results:
        assert not bool(one.double().isnan().any()) and bool(one.double().isfinite().any())
    # What every call must read of its rows and write.
    rows = [args[name] for name in case.rows if args[name] is not None]
    least = sum(
        tensor.numel() * tensor.element_size() for tensor in (*rows, *results) if tensor.dtype != torch.int64
    )
    assert case.num_bytes(TOKENS) >= 0.9 * least
    assert case.num_bytes(2 * TOKENS) > case.num_bytes(TOKENS)


PRODUCTS = [
    pytest.param(case, *other, id=f"{case.name}, {other[0]}")
    for case in CASES
    if "linear" in case.op
    for other in (*case.rivals, *case.bounds)
]


@pytest.mark.parametrize(("case", "name", "prepare"), PRODUCTS)
def test_rivals_of_products_compute_the_same(
    case: Any, name: str, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = case.make(TOKENS, kernel_cases.Draw(torch.device("cpu")))
    stand_in_for_the_gpu(monkeypatch)
    want, got = reference(case.op)(**args), prepare(args)()
    if case.op == "mxfp8_grouped_linear":
        got = got.transpose(0, 1)
    assert got.dtype == want.dtype or (name, prepare) in case.bounds
    want, got = want.double(), got.double()
    torch.testing.assert_close(got, want, atol=float(want.abs().max()) / 64, rtol=2.0**-6)


def stand_in_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put torch's own for what a CPU does not run, with the signatures of the real ones."""
    mm = torch.mm

    def typed_mm(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return mm(x.to(out_dtype), weight.to(out_dtype))

    def decode_rows(values: torch.Tensor, scales: torch.Tensor, rows_per_scale: int = 1) -> torch.Tensor:
        assert values.dtype == scales.dtype == torch.uint8
        return DENSE._scaled(values.view(torch.float8_e4m3fn), scales, rows_per_scale)

    def block_scaled_mm(
        A: torch.Tensor,
        B: torch.Tensor,
        As: torch.Tensor,
        Bs: torch.Tensor,
        block_size: list[int],
        output_dtype: torch.dtype = torch.float16,
    ) -> torch.Tensor:
        rows, columns = block_size
        assert A.shape[1] == As.shape[1] * columns and As.dtype == Bs.dtype == torch.float32
        x = A.float() * As.repeat_interleave(columns, 1)
        weight = B.float() * Bs.repeat_interleave(rows, 0)[: len(B)].repeat_interleave(columns, 1)
        return (x @ weight.mT).to(output_dtype)

    monkeypatch.setattr(torch, "mm", typed_mm)
    vllm = "vllm.model_executor.layers.quantization.utils.fp8_utils"
    ours = "deepinfer_plugins.kernels.triton_matmul"
    for module, function in ((vllm, block_scaled_mm), (ours, decode_rows)):
        name = "w8a8_triton_block_scaled_mm" if module == vllm else "decode_rows"
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: function}))  # type: ignore[misc]


def test_a_rival_samples_what_the_filters_keep() -> None:
    """By a sort, as the definition by values."""
    (case,) = (case for case in CASES if case.op == "filter_log_probs")
    args = case.make(TOKENS, kernel_cases.Draw(torch.device("cpu")))
    (_, prepare), want = case.rivals[0], reference(case.op)(**args)
    torch.testing.assert_close(prepare(args)(), want, atol=1e-4, rtol=1e-4)
    assert 1 < int(want.isfinite().sum(1).min()) <= int(want.isfinite().sum(1).max()) <= 40
    (sample,) = (case for case in CASES if (case.op, case.name) == ("sample", "filtered"))
    token = sample.rivals[0][1](sample.make(TOKENS, kernel_cases.Draw(torch.device("cpu"))))()
    assert bool(want.gather(1, token[:, None]).isfinite().all())


def test_names_are_unique() -> None:
    names = [(case.op, case.name) for case in kernel_cases.all_cases(preset("release"))]
    assert len(names) == len(set(names))


def test_the_plot_is_of_the_fastest_rival() -> None:
    plots = importlib.import_module("kernel_plots")
    rivals = [{"rival_over_ours": 0.9}, {"rival_over_ours": 0.7}, {"rival_error": "not installed"}]
    results = [
        {"op": "linear", "name": "head", "tokens": 64, "rivals": rivals},
        {"op": "linear", "name": "head", "tokens": 1, "rivals": rivals[:1]},
        {"op": "route", "name": "gate", "tokens": 1, "rivals": rivals[2:]},
    ]
    found = plots.series({"results": results})
    assert list(found) == ["linear head"]
    assert [(one["tokens"], one["ratio"]) for one in found["linear head"]] == [(1, 0.9), (64, 0.7)]
