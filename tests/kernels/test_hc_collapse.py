"""hc_collapse."""

import numpy as np
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.hc_collapse.reference import hc_collapse

from .conformance import Case, Conformance, Draw


class TestHcCollapse(Conformance):
    op = "hc_collapse"
    sizes = (0, 1, 63, 1000)
    wide = ("wide",)

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        d = 640 if variant == "wide" else 96
        args = {"streams": draw.normal(num_rows, 4, d), "pre": draw.normal(num_rows, 4, dtype=torch.float32)}
        return Case(args, rows=tuple(args))


def test_agrees_with_the_formula(device: torch.device) -> None:
    args = TestHcCollapse().case(Draw(device), 7, "").args
    streams, pre = (value.double().cpu().numpy() for value in args.values())
    want = np.matmul(pre[:, None], streams)[:, 0]
    assert_same_bits(hc_collapse(**args).cpu(), torch.from_numpy(want).bfloat16(), "hc_collapse")


def test_one_hot_gives_the_stream(device: torch.device) -> None:
    streams = Draw(device).normal(3, 4, 96)
    pre = torch.tensor([[0.0, 0, 1, 0]] * 3, device=device)
    assert_same_bits(hc_collapse(streams, pre), streams[:, 2], "one-hot")
