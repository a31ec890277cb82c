"""The reference loop: speculation changes no token, and the record of it is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from deepinfer_plugins.evaluation.engine import Generated, ReferenceEngine
from deepinfer_plugins.features.sampling import SamplingParams
from deepinfer_plugins.model.checkpoint import Checkpoint
from deepinfer_plugins.model.draft import Drafted
from deepinfer_plugins.model.make_checkpoint import make_checkpoint
from deepinfer_plugins.model.oracle import Oracle, compressed_vocab
from deepinfer_plugins.model.step import Caches, Step

LENGTHS = (1, 2, 17, 64, 131)
NEW_TOKENS = 17


@dataclass(frozen=True)
class Case:
    engine: ReferenceEngine
    oracle: Oracle
    prompts: list[list[int]]
    plain: list[Generated]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, "tiny")
    opened = Checkpoint.open(folder)
    tensors = {name: opened.read(name) for name in opened.names}
    oracle = Oracle(opened.config, tensors, compressed_vocab(folder / "tokenizer.json"))
    rng = random.Random(7)
    prompts = [[rng.randrange(3, opened.config.vocab_size) for _ in range(n)] for n in LENGTHS]
    # Fewer places than prompts: a place is used again at once.
    engine = ReferenceEngine(folder, max_positions=150, max_requests=3)
    return Case(engine, oracle, prompts, engine.generate(prompts, NEW_TOKENS))


def tokens(generated: list[Generated]) -> list[list[int]]:
    return [each.token_ids for each in generated]


def test_generates_what_the_oracle_generates(case: Case) -> None:
    for prompt, generated in zip(case.prompts, case.plain, strict=True):
        assert len(generated.token_ids) == NEW_TOKENS and generated.verifications == []
        assert case.oracle.verify(prompt, generated.token_ids) is None


@pytest.mark.parametrize("depth", range(1, 9))
def test_speculation_changes_no_token(case: Case, depth: int) -> None:
    generated = case.engine.generate(case.prompts, 7, depth)
    assert tokens(generated) == [each.token_ids[:7] for each in case.plain]
    for each in generated:
        assert all(len(v.confidence_logits) == depth for v in each.verifications)
        # The prompt gives one token, and each verification its accepted drafts and one more if the text goes on.
        assert 1 + sum(v.accepted + v.whole for v in each.verifications) == 7


@pytest.mark.parametrize("depth", [1, 6])
def test_speculation_changes_no_sampled_token(case: Case, depth: int) -> None:
    """Seeded, with every feature that looks at the tokens before; the checkpoint is random, so most drafts fail."""
    params = [
        SamplingParams(
            seed=seed,
            temperature=0.7,
            top_k=40,
            top_p=0.95,
            min_p=0.01,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            bad_words=[[5, 6]],
        )
        for seed in range(len(case.prompts))
    ]
    plain = case.engine.generate(case.prompts, 7, 0, params)
    assert tokens(plain) != [each.token_ids[:7] for each in case.plain]
    assert tokens(case.engine.generate(case.prompts, 7, depth, params)) == tokens(plain)


def test_first_drafts_are_the_oracles(case: Case) -> None:
    """And so are their confidences: the context keys are those of the main forward."""
    seen: list[Drafted] = []
    original = case.engine.model.draft

    def spy(*arguments: object) -> Drafted:
        seen.append(original(*arguments))  # type: ignore[arg-type]
        return seen[-1]

    case.engine.model.draft = spy  # type: ignore[method-assign]
    try:
        case.engine.generate(case.prompts[:3], 2, 4)
    finally:
        del case.engine.model.draft
    for row, (prompt, plain) in enumerate(zip(case.prompts[:3], case.plain)):
        want = case.oracle.draft(prompt, plain.token_ids[0], 4)
        assert seen[0].tokens[row].tolist() == want.tokens.tolist()
        assert torch.allclose(seen[0].confidences()[row], want.confidence, rtol=2**-20, atol=0)


Script = Callable[[int, int], int]


def scripted(case: Case, monkeypatch: pytest.MonkeyPatch, right: Script) -> dict[tuple[int, int], int]:
    """Make drafts that agree with the target for as many tokens as ``right(place, position)`` says.

    Returns:
        Filled while generating: what was asked of each place and position.
    """
    asked: dict[tuple[int, int], int] = {}
    text = {len(p): p + g.token_ids for p, g in zip(case.prompts, case.plain)}
    vocabulary = case.engine.config.vocab_size

    def draft(step: Step, caches: Caches, depth: int, sample: object) -> Drafted:
        rows = []
        places = caches.window[0].table[:, 0].tolist()
        for place, token, position in zip(
            places, step.token_ids.tolist(), step.positions.tolist(), strict=True
        ):
            whole = next(t for n, t in text.items() if n <= position < len(t) and t[position] == token)
            count = asked[place, position] = right(place, position)
            ahead = whole[position + 1 :][:count]
            wrong = ((whole + [0] * 99)[position + 1 + len(ahead)] + 1) % vocabulary
            rows.append((ahead + [wrong] * depth)[:depth])
        logits = torch.zeros(len(rows), depth)
        return Drafted(torch.tensor(rows), torch.zeros(len(rows), depth, vocabulary), logits)

    monkeypatch.setattr(case.engine.model, "draft", draft)
    return asked


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_accepted_drafts_change_no_token(case: Case, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    rng = random.Random(depth)
    asked = scripted(case, monkeypatch, lambda place, position: rng.randint(0, depth))
    generated = case.engine.generate(case.prompts, NEW_TOKENS, depth)
    assert tokens(generated) == tokens(case.plain)
    whole = [v for each in generated for v in each.verifications if v.whole]
    assert len({v.accepted for v in whole}) > min(depth, 4), [v.accepted for v in whole]
    assert sum(v.accepted for v in whole) <= sum(asked.values())


def test_the_record_of_a_text_that_ends_inside_a_window(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(case, monkeypatch, lambda place, position: 5)
    prompt, text = case.prompts[2], case.plain[2].token_ids
    (by_length,) = case.engine.generate([prompt], 9, 5)
    assert by_length.token_ids == text[:9]
    # One token from the prompt, six from the first window, two from the second.
    assert [(v.verified, v.accepted, v.whole) for v in by_length.verifications] == [
        (5, 5, True),
        (2, 2, False),
    ]
    stop = text[3]
    assert stop not in text[:3]
    (by_token,) = case.engine.generate([prompt], 9, 5, stop=[stop])
    assert by_token.token_ids == text[:4]
    assert [(v.verified, v.accepted, v.whole) for v in by_token.verifications] == [(3, 3, False)]


def test_progress_counts_every_token(case: Case) -> None:
    counted: list[int] = []
    case.engine.generate(case.prompts[:3], 4, 2, on_tokens=counted.append)
    assert sum(counted) == 12


def test_log_probabilities_are_the_oracles(case: Case) -> None:
    got = case.engine.log_probabilities(case.prompts[:5])
    for prompt, found in zip(case.prompts, got):
        want = case.oracle.logits(prompt).double().log_softmax(-1)
        want = want[:-1].gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
        assert torch.allclose(found, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("depth", [0, 3])
def test_new_tokens_are_told_with_their_log_probabilities(case: Case, depth: int) -> None:
    """To the bit: whether a text was the prompt or was generated does not matter."""
    for prompt, one in zip(
        case.prompts[:4], case.engine.generate(case.prompts[:4], 6, depth, log_probs=True), strict=True
    ):
        (known,) = case.engine.log_probabilities([[*prompt, *one.token_ids]])
        assert one.log_probs == known[-6:].tolist()


def test_long_sequences_are_cut_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that do not fit into a step, and texts scored in pieces."""
    whole = case.engine.log_probabilities([case.prompts[-1]])[0]
    monkeypatch.setattr(case.engine, "prompt_rows", 50)
    assert torch.equal(case.engine.log_probabilities([case.prompts[-1]])[0], whole)
    generated = case.engine.generate(case.prompts, 3, 2)
    assert tokens(generated) == [each.token_ids[:3] for each in case.plain]


@pytest.mark.parametrize(
    ("prompt", "new", "depth", "message"),
    [
        ([], 3, 0, "a prompt of 0 tokens"),
        ([1] * 148, 3, 0, "no more than 150"),
        ([1], 3, 9, "depth is 9"),
    ],
)
def test_bad_input(case: Case, prompt: list[int], new: int, depth: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        case.engine.generate([prompt], new, depth)


def test_without_draft_layers(tmp_path: Path) -> None:
    from dataclasses import replace

    from deepinfer_plugins.model.presets import tiny

    config = tiny()
    bare = replace(
        config,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        compress_ratios=config.compress_ratios[: config.num_hidden_layers],
    )
    make_checkpoint(tmp_path / "bare", bare)
    engine = ReferenceEngine(tmp_path / "bare", max_positions=20, max_requests=2)
    assert len(engine.generate([[5, 6]], 2)[0].token_ids) == 2
    with pytest.raises(ValueError, match="no draft layers"):
        engine.generate([[5, 6]], 2, 1)
