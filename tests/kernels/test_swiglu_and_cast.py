"""swiglu_and_cast."""

import math

import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.mxfp8_cast.reference import mxfp8_cast
from deepinfer_plugins.kernels.swiglu_and_cast.reference import swiglu_and_cast

from .conformance import Case, Conformance, Draw


class TestSwigluAndCast(Conformance):
    op = "swiglu_and_cast"
    sizes = (0, 1, 63, 1000)
    variants = ("weighted", "plain")
    wide = ("weighted, wide", "plain, wide")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        d = 256 if "wide" in variant else 96
        args = {"gate_up": draw.normal(num_rows, 2 * d, scale=8), "limit": 10.0}
        args["weights"] = draw.normal(num_rows, dtype=torch.float32) if "weighted" in variant else None
        return Case(args, rows=("gate_up", "weights"))


def test_agrees_with_the_formula(device: torch.device) -> None:
    args = TestSwigluAndCast().case(Draw(device), 9, "weighted").args
    hidden = []
    for row, weight in zip(args["gate_up"].tolist(), args["weights"].tolist()):
        pairs = zip(row[:96], row[96:])
        hidden.append(
            [min(g, 10) / (1 + math.exp(-min(g, 10))) * max(-10, min(u, 10)) * weight for g, u in pairs]
        )
    want = mxfp8_cast(torch.tensor(hidden, dtype=torch.float64, device=device).float())
    for got, expected in zip(swiglu_and_cast(**args), want):
        assert_same_bits(got, expected, "swiglu_and_cast")


def test_the_gate_has_no_lower_bound(device: torch.device) -> None:
    gate_up = torch.tensor([[-12.0] * 32 + [1e4] * 32], device=device).bfloat16()
    values, scales = swiglu_and_cast(gate_up, None, 10.0)
    got = values[0, 0].float().item() * 2.0 ** (scales[0, 0].item() - 127)
    assert math.isclose(got, -12 / (1 + math.exp(12)) * 10, rel_tol=0.07)
