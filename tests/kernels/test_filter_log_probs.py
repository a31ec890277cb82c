"""filter_log_probs."""

from __future__ import annotations

import math

import torch

from deepinfer_plugins.kernels.filter_log_probs.torch import filter_log_probs

from .conformance import Case, Conformance, Draw
from .sampling_cases import VARIANTS, sampling_args
from .test_sample import kept


class TestFilterLogProbs(Conformance):
    op = "filter_log_probs"
    variants = VARIANTS

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        args = sampling_args(draw, num_rows, variant)
        return Case(args, rows=tuple(args))


def test_agrees_with_the_formula(device: torch.device) -> None:
    args = TestFilterLogProbs().case(Draw(device, seed=8), 40, "filters").args
    got = filter_log_probs(**args).double().cpu()
    for row, logits in enumerate(args["logits"].tolist()):
        temperature, min_p, top_p = (args[name][row].item() for name in ("temperature", "min_p", "top_p"))
        if temperature == 0:
            left, temperature = {logits.index(max(logits))}, 1.0
        else:
            left = kept(logits, temperature, min_p, int(args["top_k"][row]), top_p)
        total = math.log(math.fsum(math.exp(logits[v] / temperature) for v in left))
        want = [x / temperature - total if v in left else -math.inf for v, x in enumerate(logits)]
        torch.testing.assert_close(got[row], torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_is_log_softmax_without_filters(device: torch.device) -> None:
    logits = Draw(device).normal(5, 1000, dtype=torch.float32, scale=3)
    temperature = torch.ones(5, dtype=torch.float64, device=device)
    got = filter_log_probs(logits, temperature, None, None, None)
    torch.testing.assert_close(got, logits.double().log_softmax(1).float(), rtol=1e-6, atol=1e-6)


def test_a_barred_row_is_its_first_entry(device: torch.device) -> None:
    logits = torch.full((1, 5), -math.inf, device=device)
    one = torch.ones(1, dtype=torch.float64, device=device)
    assert filter_log_probs(logits, one, None, None, one * 0.9).tolist() == [[0.0] + [-math.inf] * 4]
