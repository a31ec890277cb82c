"""hc_merge."""

import numpy as np
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.hc_merge.reference import hc_merge

from .conformance import Case, Conformance, Draw


class TestHcMerge(Conformance):
    op = "hc_merge"
    sizes = (0, 1, 63, 1000)
    wide = ("wide",)

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        d = 640 if variant == "wide" else 96
        args = {"x": draw.normal(num_rows, d), "streams": draw.normal(num_rows, 4, d)}
        args["post"] = draw.normal(num_rows, 4, dtype=torch.float32)
        args["comb"] = draw.normal(num_rows, 4, 4, dtype=torch.float32)
        return Case(args, rows=tuple(args))


def test_agrees_with_the_formula(device: torch.device) -> None:
    args = TestHcMerge().case(Draw(device), 7, "").args
    x, streams, post, comb = (value.double().cpu().numpy() for value in args.values())
    want = post[:, :, None] * x[:, None] + np.einsum("nst,nsd->ntd", comb, streams)
    assert_same_bits(hc_merge(**args).cpu(), torch.from_numpy(want).bfloat16(), "hc_merge")


def test_the_first_index_of_comb_is_the_source(device: torch.device) -> None:
    streams = torch.eye(4, device=device).bfloat16()[None]
    comb = torch.zeros(1, 4, 4, device=device)
    comb[0, 1, 3] = 1
    nothing = torch.zeros(1, 4, device=device)
    merged = hc_merge(nothing.bfloat16(), streams, nothing, comb)
    assert merged[0, 3].tolist() == [0, 1, 0, 0]
    assert not merged[0, :3].any()
