"""``experts`` in Gluon: by its stand-in and Triton's interpreter, or on an SM90."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.formats import decode_e2m1
from deepinfer_plugins.kernels.mxfp8_cast.reference import mxfp8_cast
from deepinfer_plugins.kernels.registry import choose, providers
from deepinfer_plugins.kernels.spec import Provider

from .conformance import Case, Draw, check_agreement
from .gluon_stand_in import StandIn
from .test_triton_dense import check_some_rows

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter is slow.
MANY = 12 if INTERPRETED else 70


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("deepinfer_plugins.kernels.experts.gluon")
    if INTERPRETED:
        monkeypatch.setattr(module, "_grouped", StandIn(module._grouped))
    return module


@pytest.fixture
def chip() -> torch.device:
    if INTERPRETED:
        return torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        return torch.device("cuda")
    pytest.skip("needs TRITON_INTERPRET=1 or an SM90")


def provider(name: str = "gluon") -> Provider:
    return next(provider for provider in providers("experts") if provider.name == name)


def case(device: torch.device, num_rows: int, k: int = 256, d: int = 128, first_expert: int = 0) -> Case:
    """Three experts, with more pairs elsewhere if ``first_expert`` is not 0; rows of some steps of 128."""
    draw = Draw(device, seed=5)
    values, scales = mxfp8_cast(draw.normal(num_rows, k))
    args = {
        "values": values,
        "scales": scales,
        "ids": draw.ints(0, 3 + 2 * first_expert, num_rows, 2),
        "weights": draw.normal(num_rows, 2, dtype=torch.float32),
        "w13": draw.ints(0, 256, 3, 2 * d, k // 2, dtype=torch.uint8),
        "w13_scales": draw.scales(3, 2 * d, k // 32),
        "w2": draw.ints(0, 256, 3, k, d // 2, dtype=torch.uint8),
        "w2_scales": draw.scales(3, k, d // 32),
        "first_expert": first_expert,
        "limit": 10.0,
    }
    return Case(args, rows=("values", "scales", "ids", "weights"))


def test_is_preferred_on_sm90_alone() -> None:
    assert choose("experts", Want(Arch.SM90)).provider.name == "gluon"
    assert choose("experts", Want(Arch.SM90, batch_invariant=False)).provider.name == "gluon"
    assert (
        "sm90, not sm100" in choose("experts", Want(Arch.SM100, batch_invariant=False)).passed_over["gluon"]
    )


@pytest.mark.parametrize("num_rows", [0, 1, MANY])
def test_agrees_as_claimed(num_rows: int, gluon: Any, chip: torch.device) -> None:
    check_agreement(provider(), case(chip, num_rows, first_expert=1))


def test_more_steps_than_stages(gluon: Any, chip: torch.device) -> None:
    check_agreement(provider(), case(chip, 2, k=1024, d=640))


def test_row_does_not_depend_on_the_batch(gluon: Any, chip: torch.device) -> None:
    check_some_rows(gluon.experts, case(chip, MANY))


def test_blocks_and_tiles_of_any_size_give_the_same_bits(
    gluon: Any, chip: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = case(chip, MANY)
    want = gluon.experts(**several.args)
    tiles = [(16, (64, 4, 3)), (32, None), (32, (128, 8, 2)), (64, None), (128, None)]
    for size, tile in tiles[::2][:2] if INTERPRETED else tiles:
        with monkeypatch.context() as patch:
            patch.setattr(gluon.by_triton, "block_size", lambda *_, size=size: size)
            if tile:
                patch.setitem(gluon._TILES, size, tile)
            assert_same_bits(gluon.experts(**several.args), want, f"blocks of {size}, {tile}")
    monkeypatch.setattr(gluon, "_AT_ONCE", 7)
    assert_same_bits(gluon.experts(**several.args), want, "7 rows at a time")


def test_a_split_that_depends_on_the_batch_is_caught(
    gluon: Any, chip: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows have their sums in two parts, as a kernel would that has a chip to fill."""
    several, multiply = case(chip, MANY), gluon._multiply

    def split(out: torch.Tensor, x: torch.Tensor, *args: Any, **options: Any) -> None:
        parts = x.clone(), x.clone()
        parts[0][:, : x.shape[1] // 2], parts[1][:, x.shape[1] // 2 :] = 0, 0
        sums = torch.empty_like(out), torch.empty_like(out)
        for part, total in zip(parts, sums, strict=True):
            multiply(total, part, *args, **options)
        torch.add(*sums, out=out)

    def mutant(**args: Any) -> Any:
        monkeypatch.setattr(gluon, "_multiply", split if len(args["values"]) < 3 else multiply)
        return gluon.experts(**args)

    with pytest.raises(AssertionError, match="first difference"):
        check_some_rows(mutant, several)


def test_what_a_weight_must_be_does_not_depend_on_rows(
    gluon: Any, chip: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other widths, and weights that lie askew, are computed by the Triton provider, whatever the rows."""
    odd = case(chip, 5, k=160, d=96)
    askew = case(chip, 5)
    whole = torch.zeros(askew.args["w2"].numel() + 16, dtype=torch.uint8, device=chip)
    askew.args["w2"] = whole[8:-8].view_as(askew.args["w2"]).copy_(askew.args["w2"])
    parts = case(chip, 5)
    parts.args["w13_scales"] = torch.stack([parts.args["w13_scales"]] * 2, -1)[..., 0]
    monkeypatch.setattr(gluon, "_experts", None)
    for other in (odd, askew, parts):
        want = provider("triton").load()(**other.args)
        assert_same_bits(gluon.experts(**other.args), want, "left to Triton's")


def test_scales_and_rows_that_are_extreme(gluon: Any, chip: torch.device) -> None:
    """As the Triton provider has them: exact from 2^-86 to 2^41, NaN for 255; a row of NaN is alone."""
    extreme = case(chip, 8).args
    extreme["w13"].fill_(0x22)
    extreme["w13_scales"][:] = 127 - 40
    extreme["w13_scales"][0] = 127 - 86
    extreme["w13_scales"][1, 3] = 255
    extreme["w2_scales"][2] = 127 + 41
    extreme["scales"][6] = 255
    got, want = (provider(name).load()(**extreme) for name in ("gluon", "triton"))
    assert got[6].isnan().all() and want[6].isnan().all()
    assert torch.equal(got.isnan(), want.isnan())
    finite = want.isfinite()
    assert finite.any() and torch.equal(finite, got.isfinite())
    torch.testing.assert_close(got[finite], want[finite], atol=0.0, rtol=2.0**-7)


def test_the_order_of_columns_is_what_a_thread_of_the_matrix_unit_holds(gluon: Any) -> None:
    """Lane ``t`` of four has columns 2t, 2t+1, 2t+8 and 2t+9 of the left operand (PTX ISA, wgmma, matrix A in
    registers): of two products of 16 columns these must be the eight codes of word number ``t``."""
    decode = StandIn(gluon._decode_words).function
    one = torch.tensor(0x3F803F80)
    for lane in range(4):
        words = torch.zeros(64, 8, dtype=torch.int32)
        words[:, lane] = 0x22222222
        places = decode(words, one, 64, None)[0].nonzero().flatten().tolist()
        assert places == [first + 2 * lane + i for first in (0, 16) for i in (0, 1, 8, 9)]


def test_every_code_is_decoded_to_its_number(gluon: Any) -> None:
    """In the order in which rows are gathered, times a power of two."""
    words = torch.tensor([[0x76543210, -0x01234568] * 4] * 64, dtype=torch.int32)
    stored = words.view(torch.uint8)
    column = torch.arange(64)
    source = getattr(gluon._source, "fn", gluon._source)(column)
    assert sorted(source.tolist()) == column.tolist()
    factor = torch.tensor(0x3F803F80)
    got = StandIn(gluon._decode_words).function(words, factor, 64, None).double() * 2.0**126
    assert_same_bits(got, decode_e2m1(stored).double()[:, source], "codes")
