"""experts."""

import pytest
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels import row_blocks
from deepinfer_plugins.kernels.experts import torch as provider
from deepinfer_plugins.kernels.experts.torch import experts
from deepinfer_plugins.kernels.formats import decode_e2m1, decode_mxfp8, decode_ue8m0
from deepinfer_plugins.kernels.mxfp8_cast.reference import mxfp8_cast

from .conformance import Case, Conformance, Draw


class TestExperts(Conformance):
    op = "experts"
    variants = ("all here", "some elsewhere")
    wide = ("whole steps of 128",)

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        elsewhere = 2 if variant == "some elsewhere" else 0
        k, d = (256, 128) if variant in self.wide else (64, 32)
        values, scales = mxfp8_cast(draw.normal(num_rows, k))
        chosen = [draw.order(5 + 2 * elsewhere)[:3] for _ in range(num_rows)]
        args = {
            "values": values,
            "scales": scales,
            "ids": torch.stack(chosen) if chosen else draw.ints(0, 5, 0, 3),
            "weights": draw.normal(num_rows, 3, dtype=torch.float32),
            "w13": draw.ints(0, 256, 5, 2 * d, k // 2, dtype=torch.uint8),
            "w13_scales": draw.scales(5, 2 * d, k // 32),
            "w2": draw.ints(0, 256, 5, k, d // 2, dtype=torch.uint8),
            "w2_scales": draw.scales(5, k, d // 32),
            "first_expert": elsewhere,
            "limit": 10.0,
        }
        return Case(args, rows=("values", "scales", "ids", "weights"))


def test_agrees_with_the_formula(device: torch.device) -> None:
    args = TestExperts().case(Draw(device), 6, "some elsewhere").args
    got = experts(**args)

    def weight(name: str, expert: int) -> torch.Tensor:
        return decode_e2m1(args[name][expert]) * decode_ue8m0(
            args[f"{name}_scales"][expert]
        ).repeat_interleave(32, 1)

    x = decode_mxfp8(args["values"], args["scales"])
    for row, ids in enumerate(args["ids"].tolist()):
        for place, expert in enumerate(ids):
            if not 2 <= expert < 7:
                assert not got[row, place].any()
                continue
            gate, up = (weight("w13", expert - 2) * x[row]).sum(1).bfloat16().double().chunk(2)
            gate, up = gate.clamp(max=10), up.clamp(-10, 10)
            hidden = gate / (1 + (-gate).exp()) * up * args["weights"][row, place]
            hidden = decode_mxfp8(*mxfp8_cast(hidden[None].float()))[0]
            want = (weight("w2", expert - 2) * hidden).sum(1).bfloat16()
            assert_same_bits(got[row, place], want, f"row {row}, place {place}")


def test_ranks_add_up_to_the_whole(device: torch.device) -> None:
    args = TestExperts().case(Draw(device), 9, "all here").args
    whole = experts(**args)
    parts = []
    for first, last in [(0, 2), (2, 5)]:
        shard = {name: args[name][first:last] for name in ("w13", "w13_scales", "w2", "w2_scales")}
        parts.append(experts(**args | shard | {"first_expert": first}))
    assert_same_bits(parts[0] + parts[1], whole, "two ranks")
    assert not torch.logical_and(parts[0] != 0, parts[1] != 0).any()


def test_a_large_weight_in_parts_changes_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = TestExperts().case(Draw(device), 9, "all here").args
    want = experts(**args)
    monkeypatch.setattr(row_blocks, "_WEIGHT_ELEMENTS", 1)
    assert_same_bits(experts(**args), want, "32 rows of the weight at a time")


def test_weights_that_stay_decoded_change_nothing(device: torch.device) -> None:
    args = TestExperts().case(Draw(device), 9, "some elsewhere").args
    want = experts(**args)
    with torch.inference_mode(False):
        kept = {name: args[name].clone() for name in ("w13", "w13_scales", "w2", "w2_scales")}
    assert not any(tensor.is_inference() for tensor in kept.values())
    assert_same_bits(experts(**args | kept), want, "kept")


def test_the_host_need_not_know_who_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a device that the host does not wait for, on a CPU."""
    args = TestExperts().case(Draw(torch.device("cpu")), 23, "some elsewhere").args
    want = experts(**args)
    arrange = provider._arrange
    monkeypatch.setattr(provider, "_arrange", lambda expert, count, look: arrange(expert, count, False))
    assert_same_bits(experts(**args), want, "block by block")
