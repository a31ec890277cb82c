"""mxfp8_grouped_linear."""

import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.mxfp8_cast.reference import mxfp8_cast
from deepinfer_plugins.kernels.mxfp8_grouped_linear.torch import mxfp8_grouped_linear
from deepinfer_plugins.kernels.mxfp8_linear.reference import mxfp8_linear

from .conformance import Case, Conformance, Draw


class TestMxfp8GroupedLinear(Conformance):
    op = "mxfp8_grouped_linear"
    wide = ("wide",)

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        m, k = (64, 256) if variant == "wide" else (32, 64)
        values, scales = mxfp8_cast(draw.normal(num_rows, 3 * k))
        args = {"values": values.view(-1, 3, k), "scales": scales.view(-1, 3, k // 32)}
        args |= {"weight": draw.e4m3(3 * m, k), "weight_scales": draw.scales(3 * m // 32, k // 32)}
        return Case(args, rows=("values", "scales"))


def test_is_a_block_diagonal_linear(device: torch.device) -> None:
    draw = Draw(device)
    values, scales = mxfp8_cast(draw.normal(4, 2 * 64))
    weight, weight_scales = draw.e4m3(2 * 32, 64), draw.scales(2, 2)
    blocks, block_scales = torch.zeros(64, 128, device=device), torch.full((2, 4), 127, device=device)
    for group in range(2):
        blocks[group * 32 :][:32, group * 64 :][:, :64] = weight[group * 32 :][:32].float()
        block_scales[group, group * 2 :][:2] = weight_scales[group]
    want = mxfp8_linear(values, scales, blocks.to(torch.float8_e4m3fn), block_scales.to(torch.uint8))
    got = mxfp8_grouped_linear(values.view(4, 2, 64), scales.view(4, 2, 2), weight, weight_scales)
    assert_same_bits(got.flatten(1), want, "grouped")


def test_a_weight_that_stays_decoded_changes_nothing(device: torch.device) -> None:
    args = TestMxfp8GroupedLinear().case(Draw(device), 23, "").args
    with torch.inference_mode(False):
        kept = {name: args[name].clone() for name in ("weight", "weight_scales")}
    assert not any(tensor.is_inference() for tensor in kept.values())
    assert_same_bits(mxfp8_grouped_linear(**args | kept), mxfp8_grouped_linear(**args), "kept")
    for row in (0, 22):
        alone = {name: args[name][row : row + 1] for name in ("values", "scales")}
        got = mxfp8_grouped_linear(**args | kept | alone)
        assert_same_bits(got[0], mxfp8_grouped_linear(**args)[row], f"row {row} alone")
