"""mxfp8_linear."""

import math

import pytest
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels import row_blocks
from deepinfer_plugins.kernels.mxfp8_cast.reference import mxfp8_cast
from deepinfer_plugins.kernels.mxfp8_linear.torch import mxfp8_linear

from .conformance import Case, Conformance, Draw


class TestMxfp8Linear(Conformance):
    op = "mxfp8_linear"
    variants = ("160 by 96", "77 by 128")
    wide = ("72 by 256",)

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        m, k = map(int, variant.split(" by "))
        values, scales = mxfp8_cast(draw.normal(num_rows, k))
        args = {"values": values, "scales": scales, "weight": draw.e4m3(m, k)}
        args["weight_scales"] = draw.scales(-(-m // 32), k // 32)
        return Case(args, rows=("values", "scales"))


def test_agrees_with_exact_sums(device: torch.device) -> None:
    draw = Draw(device)
    values, scales = mxfp8_cast(draw.normal(3, 64))
    weight, weight_scales = draw.e4m3(40, 64), draw.scales(2, 2)
    x, w = values.double().tolist(), weight.double().tolist()
    want = [
        [
            math.fsum(
                x[i][c]
                * w[j][c]
                * math.ldexp(1, int(scales[i, c // 32]) + int(weight_scales[j // 32, c // 32]) - 254)
                for c in range(64)
            )
            for j in range(40)
        ]
        for i in range(3)
    ]
    got = mxfp8_linear(values, scales, weight, weight_scales)
    assert_same_bits(got.cpu(), torch.tensor(want, dtype=torch.float64).bfloat16(), "mxfp8_linear")


@pytest.mark.parametrize("rows", [1, 5])
def test_a_nan_row_stays_alone(device: torch.device, rows: int) -> None:
    draw = Draw(device)
    values, scales = mxfp8_cast(draw.normal(rows + 1, 64))
    scales[-1] = 0xFF
    got = mxfp8_linear(values, scales, draw.e4m3(32, 64), draw.scales(1, 2))
    assert got[-1].isnan().all() and got[:-1].isfinite().all()


def test_a_large_weight_in_parts_changes_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = TestMxfp8Linear().case(Draw(device), 9, "77 by 128").args
    want = mxfp8_linear(**args)
    monkeypatch.setattr(row_blocks, "_WEIGHT_ELEMENTS", 1)
    assert_same_bits(mxfp8_linear(**args), want, "32 rows of the weight at a time")
