"""The Triton providers that sample, in Triton's interpreter. On a GPU the tests of each operator run them for real."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.registry import NoProvider, choose, providers
from deepinfer_plugins.kernels.spec import Provider

from .conformance import Case, Draw, check_agreement
from .test_accept_or_resample import TestAcceptOrResample as _Accept
from .test_filter_log_probs import TestFilterLogProbs as _LogProbs
from .test_sample import TestSample as _Sample

OPERATORS = {tests.op: tests for tests in (_Sample, _LogProbs, _Accept)}

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1; a GPU runs the kernels themselves",
)


def triton_provider(op: str) -> Provider:
    return next(provider for provider in providers(op) if provider.name == "triton")


@pytest.mark.parametrize("op", OPERATORS)
def test_is_chosen_by_name_on_the_chips_it_is_built_for(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"DEEPINFER_PLUGINS_{op.upper()}", "triton")
    assert choose(op, Want(Arch.SM90)).provider == triton_provider(op)
    with pytest.raises(NoProvider, match="built for sm100, sm90, not cpu"):
        choose(op, Want(Arch.CPU))


@interpreted
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("variant", ["ties", "mostly barred", "no filters"])
def test_has_the_definitions_bits(op: str, variant: str) -> None:
    check_agreement(triton_provider(op), OPERATORS[op]().case(Draw(torch.device("cpu"), seed=3), 14, variant))


@interpreted
@pytest.mark.parametrize("op", OPERATORS)
def test_row_does_not_depend_on_the_batch(op: str) -> None:
    """More rows than a program computes; some of them alone, and in another order."""
    case: Case = OPERATORS[op]().case(Draw(torch.device("cpu"), seed=4), 17, "filters")
    function = triton_provider(op).load()
    together = case.call(function)
    rows = torch.tensor([16, 2])
    for got, want in zip(case.call(function, rows), together, strict=True):
        assert_same_bits(got, want[rows], f"{op}, rows {rows.tolist()}")


@interpreted
@pytest.mark.parametrize("op", OPERATORS)
def test_no_rows(op: str) -> None:
    check_agreement(triton_provider(op), OPERATORS[op]().case(Draw(torch.device("cpu")), 0, "filters"))


@interpreted
def test_the_kernels_noise_is_the_definitions() -> None:
    """Triton's own Philox is an implementation that we did not write."""
    from deepinfer_plugins.kernels.sample.reference import sample

    args = _Sample().case(Draw(torch.device("cpu"), seed=6), 16, "no filters").args
    args["logits"] = args["logits"][:, :1].repeat(1, 129)
    kernel = importlib.import_module("deepinfer_plugins.kernels.sample.triton").sample
    assert torch.equal(kernel(**args), sample(**args))
