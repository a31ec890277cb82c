"""linear."""

import math

import pytest
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels import row_blocks
from deepinfer_plugins.kernels.linear.torch import linear

from .conformance import Case, Conformance, Draw


class TestLinear(Conformance):
    op = "linear"
    variants = ("bfloat16", "float32")
    wide = ("bfloat16, wide", "float32, wide")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        dtype, _, wide = variant.partition(", ")
        k = 264 if wide else 100
        args = {
            "x": draw.normal(num_rows, k),
            "weight": draw.normal(37, k),
            "out_dtype": getattr(torch, dtype),
        }
        return Case(args, rows=("x",))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_agrees_with_exact_sums(device: torch.device, dtype: torch.dtype) -> None:
    draw = Draw(device)
    x, weight = draw.normal(3, 200, scale=30), draw.normal(7, 200)
    want = [[math.fsum(a * b for a, b in zip(r, w)) for w in weight.tolist()] for r in x.tolist()]
    got = linear(x, weight, dtype).cpu()
    assert_same_bits(got, torch.tensor(want, dtype=torch.float64).to(dtype), "linear")


def test_a_large_weight_in_parts_changes_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = TestLinear().case(Draw(device), 9, "float32").args
    want = linear(**args)
    monkeypatch.setattr(row_blocks, "_WEIGHT_ELEMENTS", 1)
    assert_same_bits(linear(**args), want, "32 rows of the weight at a time")
