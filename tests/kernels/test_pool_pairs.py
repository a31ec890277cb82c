"""pool_pairs."""

import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.pool_pairs.reference import pool_pairs

from .conformance import Case, Conformance, Draw


class TestPoolPairs(Conformance):
    op = "pool_pairs"
    sizes = (0, 1, 63, 1000)

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        args = {
            name: draw.normal(num_rows, 2, 96, dtype=torch.float32, scale=4) for name in ("gates", "latents")
        }
        return Case(args, rows=tuple(args))


def test_is_a_softmax_over_the_pair(device: torch.device) -> None:
    args = TestPoolPairs().case(Draw(device), 9, "").args
    shares = args["gates"].double().softmax(1)
    want = (shares * args["latents"].double()).sum(1).bfloat16()
    assert_same_bits(pool_pairs(**args), want, "pool_pairs")


def test_extreme_gates_choose_one(device: torch.device) -> None:
    latents = Draw(device).normal(1, 2, 32, dtype=torch.float32)
    gates = torch.zeros_like(latents)
    gates[:, 1] = 1e30
    assert_same_bits(pool_pairs(gates, latents), latents[:, 1].bfloat16(), "later")
    assert_same_bits(pool_pairs(-gates, latents), latents[:, 0].bfloat16(), "earlier")
