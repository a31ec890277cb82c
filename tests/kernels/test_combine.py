"""combine."""

import math

import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.combine.reference import combine

from .conformance import Case, Conformance, Draw


class TestCombine(Conformance):
    op = "combine"
    sizes = (0, 1, 63, 1000)

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        args = {"chosen": draw.normal(num_rows, 6, 96), "shared": draw.normal(num_rows, 96)}
        return Case(args, rows=tuple(args))


def test_agrees_with_exact_sums(device: torch.device) -> None:
    args = TestCombine().case(Draw(device), 7, "").args
    together = torch.cat([args["chosen"], args["shared"][:, None]], 1).mT.tolist()
    want = torch.tensor([[math.fsum(terms) for terms in row] for row in together], dtype=torch.float64)
    assert_same_bits(combine(**args).cpu(), want.bfloat16(), "combine")


def test_order_of_experts_does_not_matter(device: torch.device) -> None:
    args = TestCombine().case(Draw(device), 63, "").args
    other = combine(args["chosen"].flip(1), args["shared"])
    assert_same_bits(combine(**args), other, "reversed")
