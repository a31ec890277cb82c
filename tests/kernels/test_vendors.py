"""Providers that call a vendor's library, without it: what is registered, when they are chosen, what they pass on.

``stand_ins/`` holds packages of the libraries' names. Their functions have the real signatures, refuse what the real
ones refuse, and compute the formula in float64. The four tests of ``conformance.py`` run where there is a GPU and the
real library.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.kernels import catalogue, packed_scales, vendors
from deepinfer_plugins.kernels.registry import NoProvider, choose, operators, providers
from deepinfer_plugins.kernels.spec import Provider
from deepinfer_plugins.platforms.survey import survey

from .conformance import BATCH, Conformance, Draw, check_agreement, check_rows
from .test_engram_gate import TestEngramGate as _EngramGate
from .test_hc_collapse import TestHcCollapse as _HcCollapse
from .test_hc_merge import TestHcMerge as _HcMerge
from .test_linear import TestLinear as _Linear
from .test_mxfp8_cast import TestMxfp8Cast as _Mxfp8Cast
from .test_mxfp8_grouped_linear import TestMxfp8GroupedLinear as _Mxfp8GroupedLinear
from .test_mxfp8_linear import TestMxfp8Linear as _Mxfp8Linear
from .test_rms_norm import TestRmsNorm as _RmsNorm
from .test_swiglu_and_cast import TestSwigluAndCast as _SwigluAndCast

LIBRARIES = ("tile_kernels", "deep_gemm")
CPU = torch.device("cpu")
assert catalogue, "importing the catalogue registers the providers"
VENDORS = [provider for op in operators() for provider in providers(op) if provider.name in LIBRARIES]
CASES: dict[str, type[Conformance]] = {
    tests.op: tests
    for tests in (
        _EngramGate,
        _HcCollapse,
        _HcMerge,
        _Linear,
        _Mxfp8Cast,
        _Mxfp8GroupedLinear,
        _Mxfp8Linear,
        _RmsNorm,
        _SwigluAndCast,
    )
}

every_vendor = pytest.mark.parametrize(
    "provider", VENDORS, ids=lambda provider: f"{provider.op}-{provider.name}"
)


def forget_libraries() -> None:
    for name in list(sys.modules):
        if name.split(".")[0] in LIBRARIES:
            del sys.modules[name]
    vendors.deep_gemm.cache_clear()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = {name: module for name, module in sys.modules.items() if name.split(".")[0] in LIBRARIES}
    forget_libraries()
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))
    yield
    forget_libraries()
    sys.modules.update(real)


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    hidden = (*LIBRARIES, "vllm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name))


def test_every_vendor_is_tested_here() -> None:
    assert sorted(CASES) == sorted(provider.op for provider in VENDORS)


@every_vendor
def test_nothing_is_claimed_as_checked(provider: Provider) -> None:
    assert provider.unchecked == provider.archs
    # A graph holds nothing that has not run in one.
    assert not provider.capturable
    names = [other.name for other in providers(provider.op)]
    assert names.index("triton") < names.index(provider.name) < names.index("torch")


@every_vendor
def test_refusal_names_the_function_that_is_missing(provider: Provider, no_libraries: None) -> None:
    (need,) = provider.needs
    for arch in provider.archs:
        assert provider.refusal(Want(arch)) == f"needs {need}, not installed"


@every_vendor
def test_a_library_without_the_function_is_refused(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for need in provider.needs[0].split(" | "):
        module, _, function = need.partition(":")
        file = tmp_path.joinpath(*module.split("."), "__init__.py")
        file.parent.mkdir(parents=True)
        file.write_text(f"from ._kernels import {function}_of_another_version\n")
        for package in file.relative_to(tmp_path).parents[1:-1]:
            (tmp_path / package / "__init__.py").touch()
    forget = [name for name in sys.modules if name.split(".")[0] in (*LIBRARIES, "vllm")]
    for name in forget:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    want = Want(next(iter(provider.archs)))
    assert provider.refusal(want).startswith("needs ")
    file.write_text(file.read_text() + f"from ._kernels import {function}\n")
    assert provider.refusal(want) == ""


@every_vendor
def test_is_chosen_by_name_alone(
    provider: Provider, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arch in provider.archs:
        for batch_invariant in (True, False):
            choice = choose(provider.op, Want(arch, batch_invariant))
            assert choice.provider.name not in LIBRARIES
            assert "not run on hardware" in choice.passed_over[provider.name]
    monkeypatch.setenv(f"DEEPINFER_PLUGINS_{provider.op.upper()}", provider.name)
    for arch in provider.archs:
        assert choose(provider.op, Want(arch)).provider == provider
    for arch in set(Arch) - provider.archs:
        with pytest.raises(NoProvider, match=f"{provider.name}: built for"):
            choose(provider.op, Want(arch))


@every_vendor
def test_invariant_mode_takes_torch_before_what_has_not_run(
    provider: Provider, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name)
    )
    for arch in provider.archs:
        choice = choose(provider.op, Want(arch))
        assert choice.provider.name == "torch"
        assert choice.passed_over[provider.name].startswith("not run on hardware: batch invariance unchecked")


@every_vendor
def test_passes_on_what_the_library_expects(provider: Provider, stand_ins: None) -> None:
    tests = CASES[provider.op]()
    served = set()
    for variant in (*tests.variants, *tests.wide):
        for num_rows in (0, 1, 63):
            try:
                check_agreement(provider, tests.case(Draw(CPU), num_rows, variant))
                served.add(variant)
            except vendors.UnsupportedShape as error:
                assert f"DEEPINFER_PLUGINS_{provider.op.upper()}" in str(error)
    assert served >= {*tests.wide} and served
    for variant in served:
        check_rows(provider.load(), tests.case(Draw(CPU), BATCH, variant))


def test_keys_and_value_of_one_projection_are_not_copied(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = next(provider for provider in VENDORS if provider.op == "engram_gate")
    case = _EngramGate().case(Draw(CPU), 5, "wide, one projection")
    passed = []
    import tile_kernels.engram as library  # type: ignore[import-untyped]

    gate = library.engram_gate_fwd
    monkeypatch.setattr(
        library, "engram_gate_fwd", lambda x, kv, *a, **k: passed.append(kv) or gate(x, kv, *a, **k)
    )
    case.call(provider.load())
    assert passed[0].data_ptr() == case.args["keys"].data_ptr()


def test_keys_and_value_of_two_projections_are_not_mixed_up(stand_ins: None) -> None:
    provider = next(provider for provider in VENDORS if provider.op == "engram_gate")
    case = _EngramGate().case(Draw(CPU), 5, "wide, one projection")
    other = Draw(CPU, seed=1).normal(5, 5, 512)
    check_agreement(provider, dataclasses.replace(case, args=case.args | {"value": other[:, 4]}))


def test_multiplying_by_the_reciprocal_of_448_gives_the_scales_of_a_division() -> None:
    """For every mantissa; an exponent changes neither, since both are exact in powers of two."""
    amax = (torch.arange(1 << 23, dtype=torch.int32) + (127 << 23)).view(torch.float32)

    def exponents(quotient: torch.Tensor) -> torch.Tensor:
        return (quotient.view(torch.int32) - 1) >> 23

    reciprocal = torch.tensor(1 / 448, dtype=torch.float32)
    assert torch.equal(exponents(amax * reciprocal), exponents(amax / 448))


def test_a_weights_scales_are_packed_once_and_again_when_written() -> None:
    with torch.inference_mode(False):
        scales = torch.arange(3 * 8, dtype=torch.uint8).view(3, 8)
        first = packed_scales.pack_weight(scales, 96, 1)
        assert packed_scales.pack_weight(scales, 96, 1) is first
        assert packed_scales.pack_weight(scales[1:], 64, 1)[0, 0].tolist() == first[0, 32].tolist()
        assert first[0, 95].tolist() == [
            16 + 17 * 256 + (18 << 16) + (19 << 24),
            20 + 21 * 256 + (22 << 16) + (23 << 24),
        ]
        scales[2] = 1
        again = packed_scales.pack_weight(scales, 96, 1)
    assert again[0, 95].tolist() == [0x01010101] * 2
    assert again[0, 32].tolist() == first[0, 32].tolist()


def test_vllms_copy_of_deep_gemm_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendors, "is_installed", lambda module: module.startswith("vllm"))
    monkeypatch.setattr(vendors.importlib, "import_module", lambda module: module)
    vendors.deep_gemm.cache_clear()
    assert vendors.deep_gemm() == "vllm.third_party.deep_gemm"
    vendors.deep_gemm.cache_clear()


def test_doctor_warns_of_what_was_forced(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_plugins.platforms import survey as module

    monkeypatch.setattr(module.detect, "want", lambda settings, flag: Want(Arch.SM90))
    assert survey()["warnings"] == []
    monkeypatch.setenv("DEEPINFER_PLUGINS_LINEAR", "deep_gemm")
    assert survey()["warnings"] == ["taken as asked, but not run on hardware (sm90): linear (deep_gemm)"]
    monkeypatch.setattr(module.detect, "want", lambda settings, flag: Want(Arch.SM90, batch_invariant=False))
    assert survey()["warnings"] == []
