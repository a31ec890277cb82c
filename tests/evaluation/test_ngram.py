"""The n-gram baseline against its formula, written with dictionaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from deepinfer_plugins.evaluation.ngram import KneserNey, discounts

VOCABULARY = 11
START = 0


def texts(seed: int, count: int = 23) -> list[np.ndarray]:
    """Of 1 to 60 tokens, in which some n-grams are much more frequent than others."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens = [START]
        for _ in range(int(rng.integers(0, 60))):
            following = (tokens[-1] * 3 + 1) % (VOCABULARY - 1) + 1
            tokens.append(following if rng.random() < 0.4 else int(rng.zipf(1.7)) % (VOCABULARY - 1) + 1)
        made.append(np.array(tokens))
    return made


class Formula:
    """Chen and Goodman's equations, one n-gram at a time."""

    def __init__(self, documents: Sequence[np.ndarray], order: int) -> None:
        grams: dict[int, Counter[tuple[int, ...]]] = {size: Counter() for size in range(1, order + 1)}
        for document in documents:
            for size, counter in grams.items():
                counter.update(
                    tuple(int(t) for t in document[i : i + size]) for i in range(len(document) - size + 1)
                )
        self.counts: dict[int, dict[tuple[int, ...], int]] = {order: dict(grams[order])}
        for size in range(order - 1, 0, -1):
            before: dict[tuple[int, ...], set[int]] = {}
            for gram in grams[size + 1]:
                before.setdefault(gram[1:], set()).add(gram[0])
            self.counts[size] = {gram: len(tokens) for gram, tokens in before.items()}
            if size > 1:
                self.counts[size] |= {g: c for g, c in grams[size].items() if g[0] == START}

    def discount(self, size: int, count: int) -> float:
        n = [sum(c == wanted for c in self.counts[size].values()) for wanted in (1, 2, 3, 4)]
        if 0 in n[:3]:
            return (0.5, 1, 1.5)[min(count, 3) - 1]
        y = n[0] / (n[0] + 2 * n[1])
        d = (1 - 2 * y * n[1] / n[0], 2 - 3 * y * n[2] / n[1], 3 - 4 * y * n[3] / n[2])
        return (d if min(d) >= 0 else (0.5, 1, 1.5))[min(count, 3) - 1]

    def probability(self, history: tuple[int, ...], token: int) -> float:
        size = len(history) + 1
        shorter = self.probability(history[1:], token) if history else 1 / VOCABULARY
        known = {gram: count for gram, count in self.counts[size].items() if gram[:-1] == history}
        if not known:
            return shorter
        count = known.get((*history, token), 0)
        kept = count - self.discount(size, count) if count else 0.0
        left = sum(self.discount(size, count) for count in known.values())
        return (kept + left * shorter) / sum(known.values())


@pytest.mark.parametrize("order", [2, 3, 4])
def test_equals_the_formula(order: int) -> None:
    documents, unseen = texts(1), texts(2, 5)
    model, formula = KneserNey(documents, VOCABULARY, order), Formula(documents, order)
    checked = 0
    for document in [*documents[:7], *unseen]:
        got = np.exp(model.log_probabilities(document))
        for index in range(1, len(document)):
            history = tuple(int(t) for t in document[max(0, index - order + 1) : index])
            want = formula.probability(history, int(document[index]))
            assert got[index - 1] == pytest.approx(want, rel=1e-12), (history, document[index])
            checked += 1
    assert checked > 200


def test_probabilities_sum_to_one_in_every_context() -> None:
    model = KneserNey(texts(3), VOCABULARY)
    for first in range(VOCABULARY):
        for second in range(VOCABULARY):
            documents = [np.array([first, second, token]) for token in range(VOCABULARY)]
            last = [np.exp(model.log_probabilities(document))[-1] for document in documents]
            assert sum(last) == pytest.approx(1, abs=1e-12) and min(last) > 0, (first, second)
    after_one = [np.exp(model.log_probabilities(np.array([START, t])))[0] for t in range(VOCABULARY)]
    assert sum(after_one) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    "counts",
    [[1, 1, 1, 1], [5, 6], [1, 2, 2, 2] + [3] * 15],
    ids=["no twos", "no ones", "more threes than ones"],
)
def test_discounts_that_cannot_be_estimated(counts: list[int]) -> None:
    assert discounts(np.array(counts)).tolist() == [0, 0.5, 1, 1.5]


def test_discounts() -> None:
    """Five ones, three twos, two threes, one four: Y = 5/11."""
    found = discounts(np.array([1] * 5 + [2] * 3 + [3] * 2 + [4, 9]))
    assert found.tolist() == pytest.approx([0, 1 - 6 / 11, 2 - 10 / 11, 3 - 10 / 11])


def test_learns() -> None:
    """A longer history helps where text depends on it, as in a walk where each token follows from two."""

    def walks(seed: int, count: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        made = []
        for _ in range(count):
            tokens = [START, int(rng.integers(1, VOCABULARY))]
            for _ in range(40):
                told = (tokens[-1] * 3 + tokens[-2] * 7) % (VOCABULARY - 1) + 1
                tokens.append(told if rng.random() < 0.7 else int(rng.integers(1, VOCABULARY)))
            made.append(np.array(tokens))
        return made

    documents, unseen = walks(5, 200), walks(6, 50)

    def perplexity(order: int) -> float:
        model = KneserNey(documents, VOCABULARY, order)
        return float(np.exp(-np.concatenate([model.log_probabilities(d) for d in unseen]).mean()))

    assert perplexity(3) < 0.5 * perplexity(2) < 0.5 * VOCABULARY


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="order is 1"):
        KneserNey(texts(1), VOCABULARY, 1)
    with pytest.raises(ValueError, match="64-bit key"):
        KneserNey(texts(1), 2**32, 3)
    with pytest.raises(ValueError, match="no document has 3 tokens"):
        KneserNey([np.array([START, 4])], VOCABULARY)
