"""The shared tests themselves: providers that are wrong on purpose are caught."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.kernels import catalogue, registry
from deepinfer_plugins.kernels.rms_norm.reference import rms_norm
from deepinfer_plugins.kernels.spec import Bitwise, Provider

from .conformance import Draw, check_agreement, check_rows
from .test_rms_norm import TestRmsNorm as _Cases


def depends_on_count(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Sums in another precision when there are many rows, as a kernel chosen by batch size would."""
    if len(x) < 16:
        return rms_norm(x, weight, eps)
    mean = (x * x).mean(-1, keepdim=True)
    return (x * (mean + eps).rsqrt() * weight).bfloat16()


def depends_on_position(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Treats the last row apart, as a kernel with a ragged tail would."""
    out = rms_norm(x, weight, eps)
    out[-1:] = depends_on_count(x[-1:].expand(16, -1), weight, eps)[:1]
    return out


@pytest.mark.parametrize("wrong", [depends_on_count, depends_on_position])
def test_a_row_that_depends_on_the_batch_is_caught(wrong: object, device: torch.device) -> None:
    case = _Cases().case(Draw(device), 23, "bfloat16")
    check_rows(rms_norm, case)
    with pytest.raises(AssertionError, match="first difference"):
        check_rows(wrong, case)  # type: ignore[arg-type]


def test_a_provider_that_disagrees_is_caught(device: torch.device) -> None:
    wrong = Provider(
        op="rms_norm",
        name="wrong",
        path=f"{__name__}:depends_on_count",
        archs=frozenset(Arch),
        batch_invariant=False,
        agrees=Bitwise(),
    )
    case = _Cases().case(Draw(device), 23, "bfloat16")
    with pytest.raises(AssertionError, match="rms_norm by wrong, result 0: first difference"):
        check_agreement(wrong, case)


def test_an_unchecked_claim_of_invariance_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = registry.choose("rms_norm", Want(Arch.CPU)).provider
    new = dataclasses.replace(
        kept, name="new", archs=frozenset({Arch.SM100, Arch.SM90}), unchecked=frozenset({Arch.SM100})
    )
    monkeypatch.setattr(registry, "_PROVIDERS", {"rms_norm": {"new": new, kept.name: kept}})
    chosen = registry.choose("rms_norm", Want(Arch.SM100))
    assert chosen.provider == kept
    assert "unchecked on sm100; DEEPINFER_PLUGINS_RMS_NORM=new" in chosen.passed_over["new"]
    assert registry.choose("rms_norm", Want(Arch.SM100, batch_invariant=False)).provider == new
    assert registry.choose("rms_norm", Want(Arch.SM90)).provider == new
    monkeypatch.setenv("DEEPINFER_PLUGINS_RMS_NORM", "new")
    assert registry.choose("rms_norm", Want(Arch.SM100)).provider == new


def test_a_provider_for_all_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_PLUGINS_PROVIDER", "torch")
    chosen = catalogue.choices(Want(Arch.SM90))
    assert {choice.provider.name for choice in chosen.values()} == {"torch"}
    assert chosen["rope"].passed_over == {"triton": "DEEPINFER_PLUGINS_PROVIDER=torch"}
    monkeypatch.setenv("DEEPINFER_PLUGINS_LINEAR", "triton")
    assert registry.choose("linear", Want(Arch.SM90)).provider.name == "triton"
    monkeypatch.setenv("DEEPINFER_PLUGINS_PROVIDER", "triton")
    with pytest.raises(registry.NoProvider, match="triton: built for"):
        registry.choose("rope", Want(Arch.CPU))


def test_every_operator_is_in_the_catalogue_and_tested() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tested = re.findall(r'^    op = "(\w+)"$', tests, re.MULTILINE)
    assert sorted(tested) == registry.operators() == sorted(catalogue.choices(Want(Arch.CPU)))


def test_listing_the_operators_imports_no_torch() -> None:
    code = "import sys, deepinfer_plugins.kernels.catalogue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
