"""rope."""

import numpy as np
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.rope.reference import rope

from .conformance import Case, Conformance, Draw


def table(draw: Draw, positions: int, rope_dim: int) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, rope_dim, 2) / rope_dim)
    return torch.cat([angles.cos(), angles.sin()], -1).to(draw.device)


class TestRope(Conformance):
    op = "rope"
    sizes = (0, 1, 63, 1000)
    variants = ("forward", "inverse", "all dimensions")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        rope_dim = 48 if variant == "all dimensions" else 32
        args = {"x": draw.normal(num_rows, 3, 48), "positions": draw.ints(0, 500, num_rows)}
        args |= {"table": table(draw, 500, rope_dim), "inverse": variant == "inverse"}
        return Case(args, rows=("x", "positions"))


def test_is_a_complex_product(device: torch.device) -> None:
    draw = Draw(device)
    x, positions, cos_sin = draw.normal(6, 2, 48), draw.ints(0, 500, 6), table(draw, 500, 32)
    cos, sin = np.split(cos_sin.double().cpu().numpy()[positions.cpu()], 2, -1)
    numbers = x[..., 16:].double().cpu().numpy()
    numbers = numbers[..., 0::2] + 1j * numbers[..., 1::2]
    for inverse in (False, True):
        turned = numbers * (cos - 1j * sin if inverse else cos + 1j * sin)[:, None]
        want = np.stack([turned.real, turned.imag], -1).reshape(6, 2, 32)
        got = rope(x, positions, cos_sin, inverse)
        assert_same_bits(got[..., :16], x[..., :16], "dimensions in front")
        assert_same_bits(got[..., 16:].cpu(), torch.from_numpy(want).bfloat16(), f"inverse={inverse}")


def test_inverse_turns_back(device: torch.device) -> None:
    draw = Draw(device)
    x, positions, cos_sin = draw.normal(6, 2, 32), draw.ints(0, 500, 6), table(draw, 500, 32)
    there_and_back = rope(rope(x, positions, cos_sin, False), positions, cos_sin, True)
    torch.testing.assert_close(there_and_back, x, atol=2e-2, rtol=2e-2)
