"""accept_or_resample."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_plugins.kernels import noise
from deepinfer_plugins.kernels.accept_or_resample import reference
from deepinfer_plugins.kernels.accept_or_resample.torch import accept_or_resample
from deepinfer_plugins.kernels.filter_log_probs.torch import filter_log_probs
from deepinfer_plugins.kernels.sample.torch import sample

from .conformance import Case, Conformance, Draw
from .sampling_cases import VARIANTS, VOCAB, noise_args, sampling_args
from .test_noise import uniform
from .test_sample import chi_square_limit, kept, rows


class TestAcceptOrResample(Conformance):
    op = "accept_or_resample"
    variants = (*VARIANTS, "no drafts")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        args = sampling_args(draw, num_rows, variant) | noise_args(draw, num_rows)
        names = ("temperature", "min_p", "top_k", "top_p", "seed", "position")
        num_drafts = 0 if variant == "no drafts" else 50
        drafts = sampling_args(draw, num_drafts, "filters")
        args["draft_row"] = draw.ints(-1, num_drafts, num_rows)
        args["draft_token"] = draw.ints(0, VOCAB, num_rows)
        log_probs = filter_log_probs(**drafts)
        if num_drafts:
            # Most drafts are near what the target has, as drafts are; so that some are accepted.
            hot = args["temperature"].clamp(min=0.5)
            near = args["logits"] + draw.normal(num_rows, VOCAB, dtype=torch.float32, scale=0.5)
            log_probs = torch.cat([log_probs, filter_log_probs(near, hot, None, None, None)])
            row = torch.arange(num_rows, device=draw.device)
            args["draft_row"] = torch.where(row % 4 > 0, num_drafts + row, args["draft_row"])
            best = args["logits"].argmax(1)
            args["draft_token"] = torch.where(row % 2 > 0, best, args["draft_token"])
        case_rows = ("logits", *names, "draft_token", "draft_row")
        return Case(args | {"draft_log_probs": log_probs}, rows=case_rows)


def test_result_is_the_formulas(device: torch.device) -> None:
    args = TestAcceptOrResample().case(Draw(device, seed=7), 60, "filters").args
    accepted, tokens, overlap = (result.tolist() for result in accept_or_resample(**args))
    assert 10 < sum(accepted) < 50
    for row, logits in enumerate(args["logits"].tolist()):
        place, draft = int(args["draft_row"][row]), int(args["draft_token"][row])
        if place < 0:
            assert (accepted[row], tokens[row], overlap[row]) == (False, -1, 0.0)
            continue
        temperature, min_p, top_p = (args[name][row].item() for name in ("temperature", "min_p", "top_p"))
        if temperature == 0:
            left, temperature = {logits.index(max(logits))}, 1.0
        else:
            left = kept(logits, temperature, min_p, int(args["top_k"][row]), top_p)
        weights = [math.exp((x - max(logits)) / temperature) * (v in left) for v, x in enumerate(logits)]
        target = [w / math.fsum(weights) for w in weights]
        drafted = [math.exp(d) for d in args["draft_log_probs"][place].tolist()]
        key = (int(args["seed"][row]), int(args["position"][row]))
        ratio = min(1.0, target[draft] / drafted[draft]) if drafted[draft] else math.inf * target[draft]
        assert accepted[row] == (uniform(*key, noise.COIN, 0) < ratio)
        residual = [max(p - q * math.exp(-5e-5), 0.0) for p, q in zip(target, drafted)]
        assert overlap[row] == pytest.approx(1 - math.fsum(residual), abs=1e-6)
        if accepted[row]:
            assert tokens[row] == draft
            continue
        scores = [
            math.log(w) - math.log(-math.log(uniform(*key, noise.TARGET, v))) if w else -math.inf
            for v, w in enumerate(residual)
        ]
        assert tokens[row] == scores.index(max(scores))


def pairs(n: int, device: torch.device, target: list[float], draft: list[float], **filters: float):
    """``n`` rows of one target, and drafts sampled from one draft distribution by the draft's noise."""
    args = rows(n, device, **filters)
    stream = args.pop("stream")
    hot = torch.ones(n, dtype=torch.float64, device=device)
    log_probs = filter_log_probs(torch.tensor([draft], device=device), hot[:1], None, None, None)
    key = (args["seed"], args["position"], stream + noise.DRAFT)
    drafts = sample(torch.tensor(draft, device=device).repeat(n, 1), hot, None, None, None, *key)
    return args | {
        "logits": torch.tensor(target, device=device).repeat(n, 1),
        "draft_token": drafts,
        "draft_row": stream,
        "draft_log_probs": log_probs,
    }


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 6, "top_p": 0.93, "min_p": 0.02}])
def test_tokens_have_the_targets_distribution(filters: dict[str, float], device: torch.device) -> None:
    n = 100_000 if filters else 1_000_000
    logits = [0.3, -1.0, 2.0, 1.5, -3.0, 0.0, 1.9, 0.7]
    args = pairs(n, device, logits, [1.0, -1.0, 0.5, 2.5, -3.0, -2.0, 1.9, 0.9], **filters)
    accepted, tokens, overlap = accept_or_resample(**args)
    some = {
        name: args[name] if args[name] is None else args[name][:1] for name in ("min_p", "top_k", "top_p")
    }
    target = filter_log_probs(args["logits"][:1], args["temperature"][:1], **some)[0].double().exp()
    seen, expected = tokens.bincount(minlength=8).double(), n * target
    left = expected > 0
    assert seen[~left].sum() == 0
    statistic = ((seen - expected)[left] ** 2 / expected[left]).sum().item()
    assert statistic < chi_square_limit(int(left.sum()) - 1)
    # As many are kept as any scheme can: one minus the total variation.
    best = torch.minimum(target, args["draft_log_probs"][0].double().exp()).sum().item()
    assert accepted.double().mean().item() == pytest.approx(best, abs=5 * 0.5 / math.sqrt(n))
    assert overlap[0].item() == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("stream, margin", [("COIN", 0.0), ("TARGET", 0.0), (None, 0.1)])
def test_a_wrong_rule_fails_the_test_of_the_distribution(
    stream: str | None, margin: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coin or residual that share the draft's noise, and a margin that is not small."""
    n = 50_000
    logits = [0.3, -1.0, 2.0, 1.5, -3.0, 0.0, 1.9, 0.7]
    args = pairs(n, device, logits, [1.0, -1.0, 0.5, 2.5, -3.0, -2.0, 1.9, 0.9])
    expected = n * torch.tensor(logits, dtype=torch.float64, device=device).softmax(0)

    def statistic() -> float:
        seen = accept_or_resample(**args)[1].bincount(minlength=8).double()
        return ((seen - expected) ** 2 / expected).sum().item()

    assert statistic() < chi_square_limit(7)
    if stream:
        monkeypatch.setattr(noise, stream, noise.DRAFT)
    else:
        monkeypatch.setattr(reference, "MARGIN", margin)
    assert statistic() > chi_square_limit(7)


def test_a_filtered_draft_is_rejected_and_an_equal_one_kept(device: torch.device) -> None:
    args = pairs(1000, device, [3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0])
    accepted, tokens, overlap = accept_or_resample(**args)
    assert accepted.all() and torch.equal(tokens, args["draft_token"])
    assert overlap.min() > 1 - 1e-4
    args |= {"top_k": torch.full((1000,), 2, device=device)}
    accepted, tokens, _ = accept_or_resample(**args)
    assert not accepted[args["draft_token"] >= 2].any() and accepted[args["draft_token"] < 2].all()
    assert tokens.max() == 1


def test_nothing_left_falls_back_to_the_highest_logit(device: torch.device) -> None:
    """A draft that has everything the target has, and a token that it could not have drawn."""
    args = pairs(3, device, [1.0, 2.0, 0.0], [1.0, 2.0, 0.0])
    args["draft_log_probs"] = torch.tensor([[-math.inf, 1e-3, -math.inf]], device=device)
    args["draft_token"] = torch.zeros(3, dtype=torch.int64, device=device)
    args["temperature"] = torch.zeros(3, dtype=torch.float64, device=device)
    accepted, tokens, overlap = accept_or_resample(**args)
    assert accepted.tolist() == [False] * 3 and tokens.tolist() == [1] * 3 and overlap.tolist() == [1.0] * 3
