"""engram_gate."""

import math

import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.engram_gate.torch import engram_gate

from .conformance import Case, Conformance, Draw


class TestEngramGate(Conformance):
    op = "engram_gate"
    variants = ("", "skip")
    wide = ("wide", "wide, one projection", "wide, skip")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        d = 512 if "wide" in variant else 96
        args = {
            "streams": draw.normal(num_rows, 4, d),
            "keys": draw.normal(num_rows, 4, d),
            "value": draw.normal(num_rows, d),
            "weight": draw.normal(4, d, dtype=torch.float32),
            "eps": 1e-20,
            "skip": draw.ints(0, 2, num_rows).bool() if "skip" in variant else None,
        }
        if "one projection" in variant:
            both = draw.normal(num_rows, 5, d)
            args["keys"], args["value"] = both[:, :4], both[:, 4]
        return Case(args, rows=("streams", "keys", "value", "skip"))


def test_agrees_with_the_formula(device: torch.device) -> None:
    args = TestEngramGate().case(Draw(device), 5, "skip").args
    got = engram_gate(**args)
    for row in range(5):
        value = args["value"][row].tolist()
        for stream in range(4):
            x, k = args["streams"][row, stream].tolist(), args["keys"][row, stream].tolist()
            w = args["weight"][stream].tolist()
            dot = math.fsum(a * b * c for a, b, c in zip(x, w, k))
            norms = (math.fsum(a * a for a in x) / 96 * math.fsum(b * b for b in k) / 96) ** 0.5
            agreement = dot / norms / math.sqrt(96)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(agreement), 1e-6)), agreement)))
            if args["skip"][row]:
                gate = 0.0
            want = torch.tensor([a + gate * b for a, b in zip(x, value)], dtype=torch.float64)
            assert_same_bits(got[row, stream].cpu(), want.bfloat16(), f"row {row}, stream {stream}")


def test_no_agreement_opens_the_gate_half(device: torch.device) -> None:
    args = TestEngramGate().case(Draw(device), 2, "").args
    args["keys"] = torch.zeros_like(args["keys"])
    want = (args["streams"].double() + args["value"].double()[:, None] / 2).bfloat16()
    assert_same_bits(engram_gate(**args), want, "half")
