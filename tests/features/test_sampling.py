"""What a request's parameters do to its logits, row by row, and that a slot forgets its former owner."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_plugins.features.sampling import (
    NO_SLOT,
    Rows,
    SamplingParams,
    SamplingState,
    child_seed,
    choose_verify,
    fresh_seed,
    signed_seed,
)

VOCAB = 37


def expected_logits(
    logits: list[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    allowed: set[int] | None = None,
) -> list[float]:
    """The definition, one entry at a time, on Python's numbers."""
    result = []
    for v, x in enumerate(logits):
        x += params.logit_bias.get(v, 0.0)
        barred = params.allowed_token_ids is not None and v not in params.allowed_token_ids
        barred |= len(output) < params.min_tokens and v in params.suppressed
        for word in params.bad_words:
            start = list(word[:-1])
            barred |= (
                word[-1] == v
                and list(output[len(output) - len(start) :]) == start
                and len(output) >= len(start)
            )
        if v in prompt or v in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * list(output).count(v)
        x -= params.presence_penalty * (v in output)
        barred |= allowed is not None and v not in allowed
        result.append(-math.inf if barred else x)
    return result


def bitmask(allowed: Sequence[set[int]], vocab_size: int = VOCAB) -> torch.Tensor:
    words = [
        [sum(1 << bit for bit in range(32) if 32 * w + bit in row) for w in range(-(-vocab_size // 32))]
        for row in allowed
    ]
    return torch.tensor(words).to(torch.int32)


def rows(slots: Sequence[int], positions: Sequence[int], prefixes: Sequence[Sequence[int]]) -> Rows:
    width = max(map(len, prefixes), default=0)
    padded = [[*prefix, *[-1] * (width - len(prefix))] for prefix in prefixes]
    return Rows(torch.tensor(slots), torch.tensor(positions), torch.tensor(padded).reshape(len(slots), width))


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)
words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4)
parameters = st.builds(
    SamplingParams,
    seed=st.integers(-(2**63), 2**64 - 1),
    temperature=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.0]), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1),
    bad_words=words,
    min_tokens=st.integers(0, 4),
    suppressed=st.lists(st.integers(0, VOCAB - 1), max_size=3),
)
few_tokens = st.lists(st.integers(0, 3), max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(parameters, tokens.filter(bool), few_tokens, few_tokens, st.booleans()),
        min_size=1,
        max_size=4,
    ),
    draw=st.randoms(use_true_random=False),
)
def test_logits_are_the_definitions(
    requests: list[tuple[SamplingParams, list[int], list[int], list[int], bool]], draw: random.Random
) -> None:
    """Whatever was in the slots, whether the output was added or committed, with any draft prefix, in any order."""
    state = SamplingState(4, VOCAB, "cpu")
    for slot in range(4):
        former = SamplingParams(
            1,
            repetition_penalty=2.0,
            logit_bias={slot: 50.0},
            allowed_token_ids=[1, 2],
            bad_words=[[1], [0, 1], [2, 2, 2]],
            min_tokens=99,
            suppressed=[0, 1],
        )
        state.add(slot, former, [slot], [0, 1, 2, 3])
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    slots = draw.sample(range(4), len(requests))
    order, expected, allowed = [], [], []
    for slot, (params, prompt, output, prefix, committed) in zip(slots, requests):
        state.add(slot, params, prompt, [] if committed else output)
        if committed:
            cut = draw.randint(0, len(output))
            for part in (output[:cut], output[cut:]):
                state.commit(torch.tensor([slot]), torch.tensor([[*part, -1, -1]]))
        order.append((slot, len(prompt + output + prefix), prefix))
        allowed.append(set(draw.sample(range(VOCAB), 30)))
        history = output + prefix
        expected.append(expected_logits(logits[slot].tolist(), params, prompt, history, allowed[-1]))
    columns = rows(*zip(*order))._replace(bitmask=bitmask(allowed))
    before = logits.clone()
    got = state.process(logits[slots], columns)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert torch.equal(before, logits)


def test_a_draft_prefix_counts_as_committed_tokens() -> None:
    """Bit for bit: what makes a token independent of speculation."""
    params = SamplingParams(
        3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, bad_words=[[4, 5, 6], [6]]
    )
    state = SamplingState(2, VOCAB, "cpu")
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    state.add(0, params, [1, 4], [4])
    state.add(1, params, [1, 4], [4, 5, 5, 4, 5])
    drafted = state.process(logits, rows([0], [7], [[5, 5, 4, 5]]))
    committed = state.process(logits, rows([1], [7], [[]]))
    assert torch.equal(drafted, committed) and committed[0, 6] == -math.inf


def test_unused_features_cost_nothing() -> None:
    state = SamplingState(2, VOCAB, "cpu")
    state.add(0, SamplingParams(1, temperature=0.0), [1, 2])
    logits = torch.zeros(1, VOCAB)
    sampled = state.sample(logits, rows([0], [2], [[]]))
    assert sampled.logits is logits
    state.commit(torch.tensor([0]), sampled.tokens[:, None])
    assert state._counts is None and state._bias is None and state._record is None
    assert state.filters(torch.tensor([0]))[1:] == (None, None, None)
    state.add(1, SamplingParams(1, top_k=3, bad_words=[[1]], presence_penalty=1.0), [1])
    assert state.uses("top_k") and state.uses("penalties")
    state.remove(1)
    assert not state.uses("top_k") and not state.uses("penalties") and not state.uses("noise")


def test_only_requests_that_are_attended_count() -> None:
    state = SamplingState(4, 40, "cpu")
    state.add(0, SamplingParams(seed=1, temperature=0, repetition_penalty=1.5), [3])
    state.add(2, SamplingParams(seed=2, top_k=3), [3])
    assert state.features() == {"penalties", "noise", "top_k"}
    for slots, used in (([0], {"penalties"}), ([2, 1], {"noise", "top_k"}), ([], set()), ([0, 2], None)):
        state.attend(slots)
        assert state.features() == ({"penalties", "noise", "top_k"} if used is None else used)
    state.attend([0])
    with state.assuming(frozenset({"noise"})):
        assert state.uses("noise") and not state.uses("penalties")
    assert state.uses("penalties") and not state.uses("noise")
    # A new owner is seen at once.
    state.add(0, SamplingParams(seed=3, temperature=0, logit_bias={5: 1.0}), [3])
    assert state.features() == {"bias"}
    state.remove(0)
    assert not state.features()


def test_padding_rows_are_greedy_and_touch_no_slot() -> None:
    state = SamplingState(2, VOCAB, "cpu")
    state.add(1, SamplingParams(1, temperature=5.0, presence_penalty=5.0, bad_words=[[3, 3]]), [1], [2])
    logits = torch.zeros(2, VOCAB)
    logits[:, 3] = 1.0
    mixed = rows([NO_SLOT, 1], [0, 2], [[], []])
    state.commit(torch.tensor([NO_SLOT, NO_SLOT, 1]), torch.tensor([[3], [3], [-1]]))
    sampled = state.sample(logits, mixed)
    assert sampled.tokens[0] == 3
    assert torch.equal(sampled.logits[1], torch.where(torch.arange(VOCAB) == 2, -5.0, logits[1]))


def test_no_leftovers_in_a_reused_slot() -> None:
    state, clean = SamplingState(3, VOCAB, "cpu"), SamplingState(3, VOCAB, "cpu")
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    former = SamplingParams(
        9,
        temperature=2.0,
        top_k=2,
        logit_bias={1: 9.0},
        bad_words=[[1], [2, 3]],
        frequency_penalty=2.0,
        verify="rejection",
    )
    state.add(1, former, [5], [6, 6])
    state.commit(torch.tensor([1]), torch.tensor([[2, 3]]))
    state.draft_sampler(torch.tensor([1]), torch.tensor([5]))(logits[:1], 0)
    # A neighbour keeps every table in use.
    for each in (state, clean):
        each.add(0, former, [1], [2])
        each.add(1, SamplingParams(4), [7, 8], [9])
    step = rows([1], [3], [[2]])
    got, want = state.sample(logits[1:2], step), clean.sample(logits[1:2], step)
    assert torch.equal(got.logits, want.logits) and torch.equal(got.tokens, want.tokens)
    assert state.record is not None and (state.record.position[1] == -1).all()


def test_grammar_masks_odd_vocabularies() -> None:
    for vocab_size in (1, 31, 32, 33, 1000):
        state = SamplingState(1, vocab_size, "cpu")
        state.add(0, SamplingParams(0, temperature=0.0), [0])
        allowed = {v for v in range(vocab_size) if v % 3 == 0 or v == vocab_size - 1}
        step = rows([0], [1], [[]])._replace(bitmask=bitmask([allowed], vocab_size))
        got = state.sample(torch.zeros(1, vocab_size), step).logits[0]
        assert set((got == 0).nonzero()[:, 0].tolist()) == allowed
        assert (got == -math.inf).sum() == vocab_size - len(allowed)


def test_log_probs_are_what_is_sampled() -> None:
    state = SamplingState(1, VOCAB, "cpu")
    state.add(0, SamplingParams(0, temperature=0.5, top_k=3), [0])
    logits = torch.arange(VOCAB).float()[None]
    log_probs = state.log_probs(logits, torch.tensor([0]))[0]
    weights = [math.exp(2.0 * x) for x in (-2, -1, 0)]
    assert log_probs[-3:].exp().tolist() == pytest.approx([w / sum(weights) for w in weights], rel=1e-6)
    assert (log_probs[:-3] == -math.inf).all()


def test_how_much_a_record_takes() -> None:
    record = SamplingState(3, VOCAB, "cpu").reserve_record(2)
    assert SamplingState.record_bytes(3, 2, VOCAB) == record.log_probs.nbytes


def test_drafts_are_sampled_in_turn() -> None:
    state = SamplingState(1, VOCAB, "cpu")
    state.add(0, SamplingParams(0), [0])
    sampler = state.draft_sampler(torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="draft 1 is out of turn: 0 were sampled"):
        sampler(torch.zeros(1, VOCAB), 1)


def test_seeds() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100 and max(seeds) < 2**63 and max(seeds) > 2**60
    assert [child_seed(5, index) for index in range(3)] == [5, 6, 7]
    assert child_seed(2**64 - 1, 1) == 0 and child_seed(-1, 0) == 2**64 - 1
    numbers = {0: 0, 2**63 - 1: 2**63 - 1, 2**63: -(2**63), 2**64 - 1: -1, -5: -5}
    assert {seed: signed_seed(seed) for seed in numbers} == numbers
    # Signed or not, 64 bits are the same seed; and each of them counts.
    state = SamplingState(4, VOCAB, "cpu")
    for slot, seed in enumerate([-1, 2**64 - 1, 2**63 - 1, 2**32 - 1]):
        state.add(slot, SamplingParams(seed), [0])
    tokens = torch.stack(
        [state.sample(torch.zeros(4, VOCAB), rows(range(4), [p] * 4, [[]] * 4)).tokens for p in range(1, 9)]
    ).T.tolist()
    assert tokens[0] == tokens[1] and len({tuple(line) for line in tokens}) == 3


@pytest.mark.parametrize(
    "setting, seeded, invariant, chosen",
    [
        ("auto", True, False, "coupling"),
        ("auto", False, True, "coupling"),
        ("auto", False, False, "rejection"),
        ("coupling", False, False, "coupling"),
        ("rejection", True, True, "rejection"),
    ],
)
def test_how_drafts_are_verified(setting: str, seeded: bool, invariant: bool, chosen: str) -> None:
    assert choose_verify(setting, seeded, invariant) == chosen


def test_an_unknown_way_to_verify_is_refused() -> None:
    with pytest.raises(
        ValueError, match="DEEPINFER_PLUGINS_VERIFY='exact': supported are auto, coupling, rejection"
    ):
        choose_verify("exact", True, True)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"temperature": -1.0}, "temperature=-1.0: must be finite and at least 0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k=-1: must be at least 0, 0 for off"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"presence_penalty": math.inf}, "presence_penalty=inf"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"verify": "exact"}, "verify='exact': must be coupling or rejection"),
        ({"seed": 2**64}, "seed=18446744073709551616: must be 64 bits"),
    ],
)
def test_parameters_out_of_range_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"seed": 0, **params})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "slot, params, message",
    [
        (2, {}, "slot 2: there are 2, from 0 on"),
        (0, {"logit_bias": {37: 1.0}}, "logit_bias: token 37 is not in the vocabulary of 37"),
        (0, {"bad_words": [[1, 99]]}, "bad_words: token 99"),
        (0, {"suppressed": [-1]}, "suppressed: token -1"),
        (0, {"allowed_token_ids": [40]}, "allowed_token_ids: token 40"),
        (0, {"allowed_token_ids": []}, "allowed_token_ids: empty"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(
    slot: int, params: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingState(2, VOCAB, "cpu").add(slot, SamplingParams(0, **params), [0])  # type: ignore[arg-type]
