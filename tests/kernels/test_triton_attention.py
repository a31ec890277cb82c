"""Triton providers of attention, caches, hyper-connections and Engram, in Triton's interpreter.

On a GPU the tests of each operator run them for real.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.registry import NoProvider, choose, providers
from deepinfer_plugins.kernels.spec import Provider

from .conformance import Conformance, Draw, check_agreement
from .test_engram_gate import TestEngramGate as _EngramGate
from .test_engram_gather import TestEngramGather as _EngramGather
from .test_engram_hash import TestEngramHash as _EngramHash
from .test_hc_collapse import TestHcCollapse as _HcCollapse
from .test_hc_merge import TestHcMerge as _HcMerge
from .test_hc_mix import TestHcMix as _HcMix
from .test_index_select import TestIndexSelect as _IndexSelect
from .test_pool_pairs import TestPoolPairs as _PoolPairs
from .test_sparse_attention import TestSparseAttention as _SparseAttention
from .test_stores import TestLoadCompressor as _LoadCompressor
from .test_stores import TestStoreCompressed as _StoreCompressed
from .test_stores import TestStoreCompressor as _StoreCompressor
from .test_stores import TestStoreIndexKey as _StoreIndexKey
from .test_stores import TestStoreWindow as _StoreWindow

OPERATORS: dict[str, type[Conformance]] = {
    tests.op: tests
    for tests in (
        _HcMerge,
        _HcMix,
        _HcCollapse,
        _EngramHash,
        _EngramGather,
        _EngramGate,
        _PoolPairs,
        _LoadCompressor,
        _StoreCompressor,
        _StoreWindow,
        _StoreCompressed,
        _StoreIndexKey,
        _SparseAttention,
        _IndexSelect,
    )
}
VARIANTS = [(op, variant) for op, tests in OPERATORS.items() for variant in tests.variants]

# More than a program computes.
MANY_ROWS = {"hc_mix": 70, "engram_hash": 40, "engram_gather": 19, "hc_merge": 19, "hc_collapse": 19}

CPU = torch.device("cpu")

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1; a GPU runs the kernels themselves",
)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tests take several."""
    monkeypatch.setattr(importlib.import_module("deepinfer_plugins.kernels.index_select.triton"), "KEYS", 256)


def triton_provider(op: str) -> Provider:
    return next(provider for provider in providers(op) if provider.name == "triton")


@pytest.mark.parametrize("op", OPERATORS)
def test_is_chosen_by_name_on_the_chips_it_is_built_for(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"DEEPINFER_PLUGINS_{op.upper()}", "triton")
    assert choose(op, Want(Arch.SM90)).provider == triton_provider(op)
    with pytest.raises(NoProvider, match="built for sm100, sm90, not cpu"):
        choose(op, Want(Arch.CPU))


@interpreted
@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("op, variant", VARIANTS)
def test_agrees_as_claimed(op: str, variant: str, num_rows: int) -> None:
    check_agreement(triton_provider(op), OPERATORS[op]().case(Draw(CPU), num_rows, variant))


@interpreted
@pytest.mark.parametrize("op, variant", VARIANTS)
def test_row_does_not_depend_on_the_batch(op: str, variant: str) -> None:
    """More rows than a program computes; some of them alone, and in another order."""
    case = OPERATORS[op]().case(Draw(CPU, seed=4), MANY_ROWS.get(op, 7), variant)
    function = triton_provider(op).load()
    together = case.call(function)
    last = case.num_rows - 1
    for rows in ([last], [2, 0], [last - 1, 1, last // 2, last, 3]):
        for got, want in zip(case.call(function, torch.tensor(rows)), together, strict=True):
            assert_same_bits(got, want[rows], f"{op}, rows {rows}")
