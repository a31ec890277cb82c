"""Speculation changes nothing: by coupling no token, by rejection no distribution."""

from __future__ import annotations

import math
import random

import pytest
import torch

from deepinfer_plugins.evaluation import distribution
from deepinfer_plugins.evaluation.distribution import draw_pairs
from deepinfer_plugins.features import sampling
from deepinfer_plugins.features.sampling import Rows, SamplingParams, SamplingState
from deepinfer_plugins.features.verification import verify

from .toy_engine import VOCAB, Model, Request, generate

EVERYTHING = {
    "temperature": 0.9,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {3: 2.0, 4: -1.0},
    "allowed_token_ids": list(range(33)),
    "bad_words": [[5], [7, 8], [1, 2, 3], [9, 9]],
    "min_tokens": 9,
    "suppressed": [0, 1],
}
KINDS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "filters": {"temperature": 0.7, "top_p": 0.95, "top_k": 10, "min_p": 0.05},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.5},
    "bad words": {"bad_words": [[a, b] for a in range(6) for b in range(0, VOCAB, 2)] + [[11, 12, 13, 14]]},
    "greedy, penalties": {"temperature": 0.0, "frequency_penalty": 0.8, "min_tokens": 5, "suppressed": [2]},
    "everything": EVERYTHING,
}


def requests(verify: str = "coupling", length: int = 18) -> list[Request]:
    """One of each kind, of different lengths; every other has a grammar."""
    made = []
    for number, params in enumerate([*KINDS.values(), {}]):
        prompt = [(3 * number + 5 * place) % VOCAB for place in range(2 + number % 3)]
        full = SamplingParams(seed=number * 2**40 - 7, verify=verify, **params)  # type: ignore[arg-type]
        made.append(Request(full, prompt, length - number % 5, grammar=number % 2 == 1))
    return made


@pytest.fixture(scope="module")
def without_drafts() -> list[list[int]]:
    plain = requests()
    generate(Model(), plain, depth=0)
    return [request.output for request in plain]


def outputs(depth: int, **how) -> list[list[int]]:
    made = requests()
    generate(how.pop("model", Model()), made, depth, **how)
    return [request.output for request in made]


def test_requests_are_not_trivial(without_drafts: list[list[int]]) -> None:
    assert len({tuple(output) for output in without_drafts}) == len(without_drafts)
    everything = without_drafts[list(KINDS).index("everything")]
    assert not {0, 1} & set(everything[:9]) and max(everything) < 33


@pytest.mark.parametrize("depth", range(1, 9))
def test_no_depth_changes_a_token(depth: int, without_drafts: list[list[int]]) -> None:
    assert outputs(depth) == without_drafts


@pytest.mark.parametrize("seed", range(3))
def test_trimming_preemption_and_reuse_change_no_token(seed: int, without_drafts: list[list[int]]) -> None:
    assert outputs(5, chaos=random.Random(seed)) == without_drafts
    assert outputs(0, chaos=random.Random(seed), batch=3) == without_drafts


@pytest.mark.parametrize("batch", [1, 8])
def test_concurrency_changes_no_token(batch: int, without_drafts: list[list[int]]) -> None:
    assert outputs(3, batch=batch) == without_drafts


def test_no_draft_changes_a_token(without_drafts: list[list[int]]) -> None:
    draw = random.Random(0)

    def anything(index: int, drafts: list[int]) -> list[int]:
        return [draw.choice([token, draw.randrange(VOCAB), -1]) for token in drafts]

    assert outputs(4, replace_draft=anything) == without_drafts
    assert outputs(4, replace_draft=lambda index, drafts: [-1] * len(drafts)) == without_drafts
    assert outputs(2, model=Model(error=5.0)) == without_drafts


def test_a_perfect_draft_is_kept_whole(without_drafts: list[list[int]]) -> None:
    made = requests()
    for request in made:
        request.grammar = False
    counts = generate(Model(error=0.0), made, depth=3, sharpening=1.0)
    # All but what runs past the end of a request is verified.
    assert counts.accepted == counts.drafted > 60


@pytest.mark.parametrize("sharpening", [0.5, 3.0])
def test_no_sharpening_changes_a_token(sharpening: float, without_drafts: list[list[int]]) -> None:
    assert outputs(3, sharpening=sharpening) == without_drafts


def test_a_good_draft_is_mostly_kept() -> None:
    made = requests()
    counts = generate(Model(error=0.2), made, depth=3)
    assert counts.accepted > 0.5 * counts.drafted


def shifted_position(self, logits, index):
    """A draft sampler that is one position off."""
    self._first_position = self._first_position + (index == 0)
    return _call(self, logits, index)


_call = sampling.DraftSampler.__call__


def test_a_draft_at_another_position_is_seldom_kept(
    monkeypatch: pytest.MonkeyPatch, without_drafts: list[list[int]]
) -> None:
    """A mutant of the counter: harmless to the tokens, and seen in what is kept."""
    hot = [Request(SamplingParams(seed, temperature=2.0), [1, 2], 20) for seed in range(6)]
    right = generate(Model(error=0.0), hot, depth=3, sharpening=1.0)
    monkeypatch.setattr(sampling.DraftSampler, "__call__", shifted_position)
    assert outputs(3) == without_drafts
    wrong = generate(Model(error=0.0), [Request(r.params, [1, 2], 20) for r in hot], depth=3, sharpening=1.0)
    assert right.accepted == right.drafted and wrong.accepted < 0.3 * wrong.drafted


@pytest.mark.parametrize("mutant", ["keep every draft", "ignore the prefix", "ignore the position"])
def test_mutants_change_tokens(
    mutant: str, monkeypatch: pytest.MonkeyPatch, without_drafts: list[list[int]]
) -> None:
    """What the tests above would say if verification were wrong."""
    sample, choose = SamplingState.sample, SamplingState.choose

    def keep_every_draft(self, logits, rows):
        sampled = sample(self, logits, rows)
        following = torch.cat([rows.prefix[1:], rows.prefix[:1] * 0 - 1])
        number = (rows.prefix >= 0).sum(1, keepdim=True).clamp(max=rows.prefix.shape[1] - 1)
        draft = following.gather(1, number)[:, 0]
        return sampled._replace(tokens=torch.where(draft >= 0, draft, sampled.tokens))

    def ignore_the_prefix(self, logits, rows):
        return sample(self, logits, rows._replace(prefix=torch.full_like(rows.prefix, -1)))

    def ignore_the_position(self, processed, slot, position):
        return choose(self, processed, slot, position - position % 2)

    name = "choose" if mutant == "ignore the position" else "sample"
    monkeypatch.setattr(SamplingState, name, locals()[mutant.replace(" ", "_")])
    assert outputs(4) != without_drafts


def test_ragged_rows_by_hand() -> None:
    """A request that keeps all, one that keeps none, one without drafts, one without rows, one with -1."""
    state = SamplingState(5, VOCAB, "cpu")
    for slot in range(5):
        state.add(slot, SamplingParams(slot, temperature=0.0), [1, 2])
    best = [10, 11, 12, 20, 21, 30, 15, 16]
    logits = torch.nn.functional.one_hot(torch.tensor(best), VOCAB).float()
    rows = Rows(
        torch.tensor([0, 0, 0, 1, 1, 2, 4, 4]),
        torch.tensor([2, 3, 4, 2, 3, 2, 2, 3]),
        torch.tensor([[-1, -1], [10, -1], [10, 11], [-1, -1], [9, -1], [-1, -1], [-1, -1], [-1, -1]]),
    )
    verified = verify(state, logits, rows, torch.tensor([0, 3, 5, 6, 6, 8]))
    assert verified.tokens.tolist() == [[10, 11, 12], [20, -1, -1], [30, -1, -1], [-1, -1, -1], [15, -1, -1]]
    assert verified.num_accepted.tolist() == [2, 0, 0, 0, 0]
    assert verified.row_of_token.tolist() == [[0, 1, 2], [3, -1, -1], [5, -1, -1], [-1, -1, -1], [6, -1, -1]]


def test_no_rows_at_all() -> None:
    state = SamplingState(2, VOCAB, "cpu")
    rows = Rows(*(torch.zeros(0, dtype=torch.int64) for _ in range(2)), torch.zeros(0, 3, dtype=torch.int64))
    verified = verify(state, torch.zeros(0, VOCAB), rows, torch.zeros(3, dtype=torch.int64))
    assert verified.tokens.tolist() == [[-1] * 4] * 2 and verified.num_accepted.tolist() == [0, 0]


def many(n: int, verify: str, **params) -> SamplingState:
    """``n`` requests that differ by their seeds."""
    state = SamplingState(n, 7, "cpu")
    state.add(0, SamplingParams(seed=0, verify=verify, **params), [1])
    for table in (state._floats, state._ints):
        table[:] = table[:, :1].clone()
    state._ints[sampling._SEED] = torch.arange(n + 1) * 1000003
    return state


@pytest.mark.parametrize("way", ["coupling", "rejection"])
@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 5}])
def test_pairs_of_tokens_have_the_targets_distribution(way: str, params: dict[str, float]) -> None:
    fit = draw_pairs(way, 100_000, torch.device("cpu"), **params)
    assert fit.fits, fit
    # Rejection keeps as many first drafts as any scheme can, coupling fewer.
    if way == "rejection":
        assert fit.kept == pytest.approx(fit.most, abs=0.01)
        assert fit.overlap == pytest.approx(fit.most, abs=1e-3)
    else:
        assert 0.75 * fit.most < fit.kept < fit.most + 0.005 and math.isnan(fit.overlap)


def test_a_wrong_distribution_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are always kept."""

    def keep_all(state, logits, rows, offsets):
        verified = verify(state, logits, rows, offsets)
        drafts = rows.prefix.unflatten(0, (-1, 3))[:, 2]
        return verified._replace(tokens=torch.cat([drafts, verified.tokens[:, 2:]], 1))

    monkeypatch.setattr(distribution, "verify", keep_all)
    assert not draw_pairs("coupling", 20_000, torch.device("cpu")).fits


def test_rejection_keeps_only_drafts_that_it_recorded() -> None:
    """A draft of another position, another token or a former owner of the slot is never kept."""
    n = 2000
    state = many(n, "rejection")
    slots = torch.arange(n)
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, 0.0, 1.5]).repeat(n, 1)
    drafts = state.draft_sampler(slots, torch.full((n,), 1))(logits, 0)

    def kept(position: int, tokens: torch.Tensor) -> torch.Tensor:
        prefix = torch.full((n, 2, 1), -1)
        prefix[:, 1, 0] = tokens
        rows = Rows(
            slots.repeat_interleave(2),
            torch.tensor([position, position + 1]).repeat(n),
            prefix.flatten(0, 1),
        )
        verified = verify(state, logits.repeat_interleave(2, 0), rows, torch.arange(n + 1) * 2)
        return verified.num_accepted

    assert kept(1, drafts).double().mean() > 0.99
    assert not kept(2, drafts).any()
    assert not kept(1, (drafts + 1) % 7).any()
    state.add(5, SamplingParams(seed=5, verify="rejection"), [1])
    assert kept(1, drafts)[5] == 0 and kept(1, drafts)[:5].double().mean() > 0.5


def test_rejection_repeats_and_mixes_with_coupling() -> None:
    def run(**how) -> list[list[int]]:
        made = requests()
        for number, request in enumerate(requests("rejection")):
            if number % 3:
                made[number] = request
        generate(Model(), made, **how)
        return [request.output for request in made]

    first = run(depth=3)
    assert first == run(depth=3)
    # Those of them that are coupled are what they are among themselves.
    plain = requests()
    generate(Model(), plain, depth=0)
    assert [first[i] for i in range(0, len(first), 3)] == [plain[i].output for i in range(0, len(plain), 3)]
    assert first != [request.output for request in plain]


def test_the_functions_do_not_wait_for_the_device() -> None:
    """No tensor is read: on the meta device that would fail."""
    state = SamplingState(4, VOCAB, "meta")
    state.add(0, SamplingParams(0, **EVERYTHING, verify="rejection"), [1, 2], [3])  # type: ignore[arg-type]
    slots = torch.zeros(6, dtype=torch.int64, device="meta")
    prefix = torch.zeros(6, 2, dtype=torch.int64, device="meta")
    bitmask = torch.zeros(6, 2, dtype=torch.int32, device="meta")
    logits = torch.zeros(6, VOCAB, device="meta")
    state.draft_sampler(slots, slots)(logits, 0)
    offsets = torch.zeros(3, dtype=torch.int64, device="meta")
    verified = verify(state, logits, Rows(slots, slots, prefix, bitmask), offsets)
    state.commit(slots[:2], verified.tokens)
    assert verified.tokens.shape == (2, 3)
