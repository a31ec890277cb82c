"""rms_norm."""

import numpy as np
import pytest
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.rms_norm.reference import rms_norm

from .conformance import Case, Conformance, Draw


class TestRmsNorm(Conformance):
    op = "rms_norm"
    sizes = (0, 1, 63, 1000)
    variants = ("bfloat16", "float32", "odd width")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        d = 75 if variant == "odd width" else 128
        x = draw.normal(num_rows, d, dtype=torch.float32 if variant == "float32" else torch.bfloat16)
        return Case({"x": x, "weight": draw.normal(d), "eps": 1e-20}, rows=("x",))


@pytest.mark.parametrize("d", [1, 63, 512])
def test_agrees_with_the_formula(device: torch.device, d: int) -> None:
    draw = Draw(device, seed=d)
    x, weight = draw.normal(9, d, scale=3), draw.normal(d)
    wide, scale = x.double().cpu().numpy(), weight.double().cpu().numpy()
    want = np.stack([row / np.sqrt(np.dot(row, row) / d + 1e-6) * scale for row in wide])
    assert_same_bits(rms_norm(x, weight, 1e-6).cpu(), torch.from_numpy(want).bfloat16(), "rms_norm")


def test_a_row_of_zeros_stays_zero_at_the_releases_tiny_eps(device: torch.device) -> None:
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
    assert_same_bits(rms_norm(x, torch.ones_like(x[0]), 1e-20), x, "zeros")
