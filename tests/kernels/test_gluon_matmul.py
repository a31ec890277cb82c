"""Products in Gluon. They run on an SM90 alone; without one, the order of columns and the choice of tiles can be seen.

That they compile for SM90: ``test_triton_compiles.py``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.mxfp8_cast.reference import mxfp8_cast
from deepinfer_plugins.kernels.registry import choose, providers

from .conformance import Case, Draw
from .test_triton_dense import cancelling, check_some_rows

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_sm90 = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs an SM90",
)
OPS = ["mxfp8_linear", "mxfp8_grouped_linear"]


@pytest.fixture
def gluon() -> Any:
    return pytest.importorskip("deepinfer_plugins.kernels.gluon_matmul")


def case(device: torch.device, num_rows: int, m: int, k: int, groups: int = 1) -> Case:
    draw = Draw(device, seed=3)
    values, scales = mxfp8_cast(draw.normal(num_rows, groups, k))
    args = {"values": values, "scales": scales}
    if groups == 1:
        args = {name: tensor[:, 0] for name, tensor in args.items()}
    args |= {
        "weight": draw.e4m3(groups * m, k),
        "weight_scales": draw.scales(-(-groups * m // 32), k // 32),
    }
    return Case(args, rows=("values", "scales"))


def function(op: str, name: str) -> Any:
    return next(provider for provider in providers(op) if provider.name == name).load()


@pytest.mark.parametrize("op", OPS)
def test_is_preferred_on_sm90_alone(op: str) -> None:
    assert choose(op, Want(Arch.SM90)).provider.name == "gluon"
    assert choose(op, Want(Arch.SM90, batch_invariant=False)).provider.name == "gluon"
    assert "sm90, not sm100" in choose(op, Want(Arch.SM100, batch_invariant=False)).passed_over["gluon"]


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1; a GPU runs the products themselves")
@pytest.mark.parametrize("num_rows", [0, 1, 63])
def test_rows_are_decoded_in_the_order_of_the_words(num_rows: int, gluon: Any) -> None:
    values, scales = mxfp8_cast(Draw(torch.device("cpu")).normal(num_rows, 160))
    got = gluon.decode_rows(values.view(torch.uint8), scales)
    want = values.float() * torch.exp2(scales.float() - 127 + 40).repeat_interleave(32, 1)
    assert_same_bits(got, want.unflatten(1, (-1, 16))[..., list(gluon.COLUMNS)].flatten(1).bfloat16(), "rows")


def test_the_order_of_columns_is_what_a_thread_of_the_matrix_unit_holds(gluon: Any) -> None:
    """Lane ``t`` of four has columns 2t, 2t+1, 2t+8 and 2t+9 of the left operand (PTX ISA, wgmma, matrix A in
    registers): at these places must stand the four bytes of the word that it read, number ``t``."""
    for lane in range(4):
        places = [2 * lane, 2 * lane + 1, 2 * lane + 8, 2 * lane + 9]
        assert [gluon.COLUMNS[place] for place in places] == list(range(4 * lane, 4 * lane + 4))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("m", [32, 384, 1792, 5120, 32768])
def test_tiles_fit_a_multiprocessor(m: int, splits: int, gluon: Any) -> None:
    for n in (1, 16, 17, 63, 65, 128, 256, 257, 512, 1000, 4096, 8192):
        tile, separate = gluon.tiling(n, m, 1, splits)
        sums = 1 if separate or splits == 1 else 2
        # Registers of a thread that sums take, of 255; bytes of shared memory, of 227 KiB.
        assert tile.outputs * tile.rows * sums // (32 * tile.num_warps) <= 128
        assert tile.num_stages * (tile.outputs * 64 + tile.rows * 128) <= 220 << 10
        assert not (separate and splits == 1)


def test_what_a_weight_must_be_does_not_depend_on_rows(gluon: Any) -> None:
    def can_serve(m: int, k: int, groups: int = 1, start: int = 0) -> bool:
        weight = torch.empty(m * k + 16, dtype=torch.uint8)[start : start + m * k].view(m, k)
        return bool(gluon.can_serve(weight, torch.empty(-(-m // 32), k // 32, dtype=torch.uint8), groups))

    assert can_serve(77, 128) and can_serve(64, 5120, groups=2)
    assert not can_serve(160, 96) and not can_serve(77, 128, start=3)
    assert not can_serve(0, 128)
    whole = torch.empty(64, 256, dtype=torch.uint8)
    assert not gluon.can_serve(whole[:, :128], torch.empty(2, 4, dtype=torch.uint8), 1)


@on_sm90
@pytest.mark.parametrize("num_rows", [1, 16, 33, 64, 65, 200, 513])
@pytest.mark.parametrize(("m", "k", "groups"), [(77, 128, 1), (1792, 5120, 1), (160, 8192, 1), (64, 256, 3)])
def test_bits_are_those_of_triton(m: int, k: int, groups: int, num_rows: int) -> None:
    op = OPS[groups > 1]
    args = case(torch.device("cuda"), num_rows, m, k, groups).args
    assert_same_bits(function(op, "gluon")(**args), function(op, "triton")(**args), op)


@on_sm90
def test_rows_alone_and_a_split_that_depends_on_the_batch(
    monkeypatch: pytest.MonkeyPatch, gluon: Any
) -> None:
    several = cancelling("mxfp8_linear", torch.device("cuda"), 70, 8192)
    check_some_rows(function("mxfp8_linear", "gluon"), several)
    of_batch = gluon._multiply

    def multiply(values: Any, *args: Any) -> None:
        with monkeypatch.context() as patch:
            if len(values) < 9:
                patch.setattr(gluon.triton_matmul, "num_splits", lambda k, m: 1)
            of_batch(values, *args)

    monkeypatch.setattr(gluon, "_multiply", multiply)
    with pytest.raises(AssertionError, match="rows"):
        check_some_rows(function("mxfp8_linear", "gluon"), several)


@on_sm90
def test_a_scale_that_is_nan_gives_nan() -> None:
    args = case(torch.device("cuda"), 70, 96, 256).args
    args["scales"][3, 2] = 0xFF
    args["weight_scales"][1, 5] = 0xFF
    got = function("mxfp8_linear", "gluon")(**args)
    assert got[3].isnan().all() and got[:, 32:64].isnan().all()
    assert got[4:, :32].isfinite().all() and got[4:, 64:].isfinite().all()
