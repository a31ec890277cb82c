"""mxfp8_cast; the format itself is tested in test_formats.py."""

import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.mxfp8_cast.reference import mxfp8_cast

from .conformance import Case, Conformance, Draw


class TestMxfp8Cast(Conformance):
    op = "mxfp8_cast"
    sizes = (0, 1, 63, 1000)
    variants = ("bfloat16", "float32")
    wide = ("bfloat16, wide", "float32, wide")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        dtype, _, wide = variant.partition(", ")
        x = draw.normal(num_rows, 256 if wide else 96, dtype=getattr(torch, dtype), scale=20)
        return Case({"x": x}, rows=("x",))


def test_agrees_with_torchs_own_cast(device: torch.device) -> None:
    x = Draw(device).normal(5, 64, dtype=torch.float32, scale=100)
    values, scales = mxfp8_cast(x)
    by_group = x.view(5, 2, 32)
    exponent = (by_group.abs().amax(-1) / 448).log2().ceil()
    assert scales.tolist() == (exponent + 127).tolist()
    want = (by_group / exponent.exp2()[..., None]).to(torch.float8_e4m3fn).view(5, 64)
    assert_same_bits(values, want, "values")
