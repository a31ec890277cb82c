"""hc_mix."""

import math

import pytest
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.hc_mix.torch import _sinkhorn, _sinkhorn_on_cpu, hc_mix

from .conformance import Case, Conformance, Draw


class TestHcMix(Conformance):
    op = "hc_mix"
    sizes = (0, 1, 63, 1000)
    variants = ("4 streams", "2 streams", "1 iteration")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        streams = 2 if variant == "2 streams" else 4
        mixes = streams * (2 + streams)
        args = {
            "streams": draw.normal(num_rows, streams, 48),
            "fn": draw.normal(mixes, streams * 48, dtype=torch.float32, scale=0.1),
            "base": draw.normal(mixes, dtype=torch.float32),
            "scale": draw.normal(3, dtype=torch.float32),
            "norm_eps": 1e-20,
            "hc_eps": 1e-6,
            "iters": 1 if variant == "1 iteration" else 20,
        }
        return Case(args, rows=("streams",))


def sinkhorn(logits: list[list[float]], eps: float, iters: int) -> list[list[float]]:
    """By its definition, one number at a time."""
    size = range(len(logits))
    a = [[math.exp(x - max(row)) for x in row] for row in logits]
    a = [[x / math.fsum(row) + eps for x in row] for row in a]
    for iteration in range(iters):
        if iteration:
            a = [[x / (math.fsum(row) + eps) for x in row] for row in a]
        columns = [math.fsum(a[i][j] for i in size) + eps for j in size]
        a = [[a[i][j] / columns[j] for j in size] for i in size]
    return a


def test_agrees_with_the_formula(device: torch.device) -> None:
    args = TestHcMix().case(Draw(device), 5, "4 streams").args
    pre, post, comb = hc_mix(**args)
    fn, base, scale = args["fn"].tolist(), args["base"].tolist(), args["scale"].tolist()
    for row, flat in enumerate(args["streams"].flatten(1).tolist()):
        mean = math.fsum(x * x for x in flat) / len(flat)
        z = [math.fsum(w * x for w, x in zip(weights, flat)) / math.sqrt(mean + 1e-20) for weights in fn]
        z = torch.tensor(z, dtype=torch.float32).tolist()
        logits = [x * scale[min(i // 4, 2)] + b for i, (x, b) in enumerate(zip(z, base))]
        gates = [1 / (1 + math.exp(-x)) for x in logits[:8]]
        rows = sinkhorn([logits[8 + 4 * i :][:4] for i in range(4)], 1e-6, 20)
        # One unit in the last place of float32: the logits above may round to the other side.
        assert pre[row].tolist() == pytest.approx([gate + 1e-6 for gate in gates[:4]], rel=1.2e-7)
        assert post[row].tolist() == pytest.approx([2 * gate for gate in gates[4:]], rel=1.2e-7)
        assert comb[row].flatten().tolist() == pytest.approx(sum(rows, []), rel=1.2e-7)


def test_comb_is_doubly_stochastic(device: torch.device) -> None:
    _, _, comb = hc_mix(**TestHcMix().case(Draw(device), 63, "4 streams").args)
    ones = torch.ones(63, 4, device=device)
    torch.testing.assert_close(comb.sum(1), ones, atol=1e-5, rtol=0)
    torch.testing.assert_close(comb.sum(2), ones, atol=1e-2, rtol=0)


def test_large_logits_do_not_overflow(device: torch.device) -> None:
    args = TestHcMix().case(Draw(device), 3, "4 streams").args
    for result in hc_mix(**args | {"scale": args["scale"] * 1e4}):
        assert result.isfinite().all()


def test_numpy_and_torch_take_the_same_steps() -> None:
    planes = Draw(torch.device("cpu")).normal(4, 4, 16, dtype=torch.float64).exp()
    by_torch, by_numpy = planes.clone(), planes.clone()
    _sinkhorn(by_torch, 1e-6, 20)
    _sinkhorn_on_cpu(by_numpy.numpy(), 1e-6, 20)
    assert_same_bits(by_numpy, by_torch, "by numpy")
