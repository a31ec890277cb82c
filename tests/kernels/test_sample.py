"""sample."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_plugins.kernels import filtering, noise
from deepinfer_plugins.kernels.sample.torch import sample

from .conformance import Case, Conformance, Draw
from .sampling_cases import VARIANTS, noise_args, sampling_args
from .test_noise import uniform


class TestSample(Conformance):
    op = "sample"
    variants = (*VARIANTS, "greedy")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        args = sampling_args(draw, num_rows, variant) | noise_args(draw, num_rows)
        args["stream"] = draw.ints(0, 2, num_rows)
        if variant == "greedy":
            args |= {"temperature": None, "min_p": None, "top_k": None, "top_p": None}
        return Case(args, rows=tuple(args))


def rows(n: int, device: torch.device, **args: float) -> dict[str, torch.Tensor | None]:
    """Arguments of ``n`` equal rows at positions 0, 1, 2, …"""

    def column(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.full((n,), args[name], dtype=dtype, device=device) if name in args else None

    return {
        "temperature": torch.full((n,), args.get("temperature", 1.0), dtype=torch.float64, device=device),
        "min_p": column("min_p", torch.float64),
        "top_k": column("top_k", torch.int64),
        "top_p": column("top_p", torch.float64),
        "seed": torch.full((n,), int(args.get("seed", 0)), device=device),
        "position": torch.arange(n, device=device),
        "stream": torch.zeros(n, dtype=torch.int64, device=device),
    }


def kept(logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float) -> set[int]:
    """What the filters keep, by sorting and adding on Python's numbers."""
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    order = [v for v in order if weights[v] >= min_p]
    order = order[: top_k or None]
    total, before, left = math.fsum(weights[v] for v in order), 0.0, set()
    for v in order:
        if top_p >= 1 or before < top_p * total:
            left.add(v)
        before += weights[v]
    return left


def test_token_is_the_formulas(device: torch.device) -> None:
    draw = Draw(device, seed=5)
    args = TestSample().case(draw, 40, "filters").args
    got = sample(**args).tolist()
    for row, token in enumerate(got):
        logits = args["logits"][row].tolist()
        temperature = args["temperature"][row].item()
        if temperature == 0:
            assert token == logits.index(max(logits))
            continue
        filters = (float(args[name][row]) for name in ("min_p", "top_k", "top_p"))
        min_p, top_k, top_p = filters
        key = (int(args["seed"][row]), int(args["position"][row]), int(args["stream"][row]))
        scores = {
            v: logits[v] / temperature - math.log(-math.log(uniform(*key, v)))
            for v in kept(logits, temperature, min_p, int(top_k), top_p)
        }
        assert token == max(scores, key=lambda v: (scores[v], -v))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=20),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.integers(0, 25),
    st.sampled_from([1e-6, 0.31, 0.77, 0.97, 1.0]),
)
def test_filters_keep_what_sorting_keeps(
    halves: list[int], temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    logits = [half / 2 for half in halves]
    args = rows(1, torch.device("cpu"), temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    shifted, mass = filtering.filtered(
        torch.tensor([logits]), *(args[name] for name in ("temperature", "min_p", "top_k", "top_p"))
    )
    left = set((shifted[0] > -math.inf).nonzero()[:, 0].tolist())
    assert left == kept(logits, temperature, min_p, top_k, top_p)
    assert mass.item() / 2**40 == pytest.approx(shifted.exp().sum().item(), rel=1e-9)


@pytest.mark.parametrize("vocab_size", [63, 1000])
def test_filters_agree_with_transformers(vocab_size: int, device: torch.device) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = Draw(device, seed=3).normal(64, vocab_size, dtype=torch.float32, scale=2)
    for temperature, min_p, top_k, top_p in [(0.7, 0.05, 40, 0.95), (1.0, 0.0, 5, 0.5), (1.5, 0.01, 0, 0.8)]:
        args = rows(64, device, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
        shifted, _ = filtering.filtered(
            logits, *(args[name] for name in ("temperature", "min_p", "top_k", "top_p"))
        )
        want = (logits.double() / temperature).cpu()
        if min_p:
            want = process.MinPLogitsWarper(min_p)(None, want)
        if top_k:
            want = process.TopKLogitsWarper(top_k)(None, want)
        want = process.TopPLogitsWarper(top_p)(None, want)
        assert torch.equal((shifted > -math.inf).cpu(), want > -math.inf)


def test_release_vocabulary(device: torch.device) -> None:
    logits = Draw(device, seed=4).normal(2, 129280, dtype=torch.float32, scale=2)
    args = rows(2, device, temperature=0.9, min_p=1e-4, top_k=500, top_p=0.8)
    tokens = sample(logits, **args).tolist()
    for row, token in enumerate(tokens):
        values = logits[row].tolist()
        left = kept(values, 0.9, 1e-4, 500, 0.8)
        scores = {v: values[v] / 0.9 - math.log(-math.log(uniform(0, row, 0, v))) for v in left}
        assert token == max(scores, key=lambda v: (scores[v], -v))


def test_ties_go_to_the_lower_id(device: torch.device) -> None:
    logits = torch.zeros(4, 1000, device=device)
    logits[1, [300, 700]] = 5
    greedy = rows(4, device, temperature=0)
    assert sample(logits, **greedy).tolist() == [0, 300, 0, 0]
    # Minus zero is no lower than zero.
    logits[2, 0] = -0.0
    only = rows(4, device, top_k=1)
    assert sample(logits, **only).tolist() == [0, 300, 0, 0]
    half = rows(4, device, top_p=0.004)
    assert set(sample(logits, **half)[[0, 2]].tolist()) <= {0, 1, 2, 3}


def test_nothing_barred_is_sampled_and_a_barred_row_is_defined(device: torch.device) -> None:
    logits = torch.full((64, 9), -math.inf, device=device)
    assert sample(logits, **rows(64, device, top_p=0.9, min_p=0.1)).tolist() == [0] * 64
    assert sample(logits, **rows(64, device)).tolist() == [0] * 64
    logits[:, 7], logits[:, 4] = 1e30, -1e30
    assert sample(logits, **rows(64, device)).tolist() == [7] * 64
    logits[:, 7] = -1e30
    assert set(sample(logits, **rows(64, device)).tolist()) == {4, 7}


def test_seeds_streams_and_positions_are_independent(device: torch.device) -> None:
    n = 20000
    logits = torch.zeros(n, 10, device=device)
    base = rows(n, device, seed=1)
    others = [
        base | {"seed": base["seed"] + 1},
        base | {"seed": base["seed"] + 2**32},
        base | {"stream": base["stream"] + 1},
        base | {"position": base["position"] + 1},
        base | {"position": base["position"] + 2**32},
    ]
    first = sample(logits, **base)
    assert torch.equal(first, sample(logits, **base))
    for other in others:
        equal = (first == sample(logits, **other)).double().mean().item()
        assert abs(equal - 0.1) < 5 * math.sqrt(0.09 / n)


def chi_square_limit(freedom: int) -> float:
    """What a chi-square variate exceeds once in 3.5 million draws (5 sigma), by Wilson and Hilferty."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 5.0 * math.sqrt(part)) ** 3


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 6, "top_p": 0.93, "min_p": 0.02}])
def test_tokens_have_the_filtered_distribution(filters: dict[str, float], device: torch.device) -> None:
    n, logits = 200_000 if filters else 1_000_000, [0.3, -1.0, 2.0, 1.5, -3.0, 0.0, 1.9, 0.7]
    args = rows(n, device, **filters)
    tokens = sample(torch.tensor(logits, device=device).repeat(n, 1), **args)
    seen = tokens.bincount(minlength=len(logits)).tolist()
    temperature = filters.get("temperature", 1.0)
    left = kept(
        logits,
        temperature,
        filters.get("min_p", 0.0),
        int(filters.get("top_k", 0)),
        filters.get("top_p", 1.0),
    )
    weights = [math.exp(x / temperature) * (v in left) for v, x in enumerate(logits)]
    expected = [n * w / sum(weights) for w in weights]
    assert all(s == 0 for s, e in zip(seen, expected) if e == 0)
    statistic = sum((s - e) ** 2 / e for s, e in zip(seen, expected) if e)
    assert statistic < chi_square_limit(len(left) - 1)


def test_draft_noise_is_not_the_targets() -> None:
    assert len({noise.TARGET, noise.DRAFT, noise.COIN}) == 3
