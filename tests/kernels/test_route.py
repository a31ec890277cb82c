"""route."""

import math

import pytest
import torch

from deepinfer_plugins.kernels.route.torch import route

from .conformance import Case, Conformance, Draw


class TestRoute(Conformance):
    op = "route"
    variants = ("one bias", "a bias for each row", "all experts")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        args = {
            "logits": draw.normal(num_rows, 24, dtype=torch.float32, scale=4),
            "bias": draw.normal(*([num_rows] if "each" in variant else []), 24, dtype=torch.float32),
            "topk": 24 if variant == "all experts" else 6,
            "scaling": 1.5,
        }
        return Case(args, rows=("logits", "bias") if "each" in variant else ("logits",))


def float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def test_agrees_with_the_formula(device: torch.device) -> None:
    args = TestRoute().case(Draw(device), 40, "one bias").args
    ids, weights = route(**args)
    bias = args["bias"].tolist()
    for row, logits in enumerate(args["logits"].tolist()):
        scores = [float32(math.sqrt(math.log1p(math.exp(x)))) for x in logits]
        chosen = sorted(range(24), key=lambda e: (-float32(scores[e] + bias[e]), e))[:6]
        assert ids[row].tolist() == chosen
        total = math.fsum(scores[e] for e in chosen) + 1e-20
        assert weights[row].tolist() == [float32(scores[e] / total * 1.5) for e in chosen]


def test_ties_go_to_the_lower_expert(device: torch.device) -> None:
    logits = torch.zeros(2, 384, device=device)
    logits[1, 100] = 1
    ids, weights = route(logits, torch.zeros(384, device=device), 6, 1.5)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [100, 0, 1, 2, 3, 4]]
    assert weights.sum(1).tolist() == pytest.approx([1.5, 1.5])


def test_bias_decides_but_does_not_weigh(device: torch.device) -> None:
    logits, bias = torch.zeros(1, 8, device=device), torch.zeros(8, device=device)
    bias[7] = 100
    ids, weights = route(logits, bias, 2, 1.0)
    assert ids.tolist() == [[7, 0]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_large_and_small_logits_stay_exact(device: torch.device) -> None:
    logits = torch.tensor([[60.0, -60.0]], device=device)
    _, weights = route(logits, torch.zeros(2, device=device), 2, 1.0)
    scores = [math.sqrt(60), math.sqrt(math.exp(-60))]
    assert weights[0].tolist() == pytest.approx([s / sum(scores) for s in scores], rel=1e-6)
