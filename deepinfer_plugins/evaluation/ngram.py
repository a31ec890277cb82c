"""The baseline a checkpoint must beat: an n-gram model with interpolated, modified Kneser-Ney smoothing.

Source: Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1999), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


# Where counts are too few, or too even, to estimate discounts from them.
FALLBACK = (0.0, 0.5, 1.0, 1.5)


def discounts(counts: Ints) -> Floats:
    """What is taken off a count: ``[0, D1, D2, D3]``, the last for three and more.

    Args:
        counts: Count of each n-gram.
    """
    n1, n2, n3, n4 = (int((counts == size).sum()) for size in (1, 2, 3, 4))
    if not (n1 and n2 and n3):
        return np.array(FALLBACK)
    ratio = n1 / (n1 + 2 * n2)
    found = (0.0, 1 - 2 * ratio * n2 / n1, 2 - 3 * ratio * n3 / n2, 3 - 4 * ratio * n4 / n3)
    return np.array(found if min(found) >= 0 else FALLBACK)


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """N-grams of one length. A key is the n-gram's ids as the digits of one number; a history is a key without
    its last digit.

    Args:
        keys: int64, ascending.
        kept: Of each key: its count less the discount, over the history's count.
        histories: int64, ascending.
        backoff: Of each history: what the discounts leave to the shorter n-grams.
    """

    keys: Ints
    kept: Floats
    histories: Ints
    backoff: Floats

    @classmethod
    def of(cls, keys: Ints, counts: Ints, base: int) -> _Level:
        discount = discounts(counts)[np.minimum(counts, 3)]
        histories, owner = np.unique(keys // base, return_inverse=True)
        total = np.bincount(owner, counts)
        return cls(keys, (counts - discount) / total[owner], histories, np.bincount(owner, discount) / total)

    def interpolate(self, keys: Ints, base: int, shorter: Floats) -> Floats:
        """Probabilities of n-grams' last tokens, from those that the next shorter n-grams give."""
        kept = _look_up(self.keys, self.kept, keys, 0.0)
        return kept + _look_up(self.histories, self.backoff, keys // base, 1.0) * shorter


def _look_up(keys: Ints, values: Floats, wanted: Ints, absent: float) -> Floats:
    if not len(keys):
        return np.full(len(wanted), absent)
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], absent)


def _keys(document: Ints, size: int, base: int) -> Ints:
    """Key of the n-gram that ends at each token from the ``size``-th on."""
    keys = np.zeros(max(0, len(document) - size + 1), dtype=np.int64)
    for first in range(size):
        keys = keys * base + document[first : first + len(keys)]
    return keys


class KneserNey:
    """Probability of a token given the ``order - 1`` before it.

    Args:
        documents: Token ids of each text to learn from, its start token first; n-grams do not cross texts.
        vocab_size: Number of token ids.
        order: Length of the longest n-grams, at least 2.

    Raises:
        ValueError: There is nothing to learn from, or n-grams of that length have no 64-bit key.
    """

    def __init__(self, documents: Sequence[Ints], vocab_size: int, order: int = 3) -> None:
        if order < 2 or vocab_size**order >= 2**63:
            raise ValueError(
                f"order is {order}; for {vocab_size} ids it must be 2 or more, with a 64-bit key"
            )
        if not any(len(document) >= order for document in documents):
            raise ValueError(f"no document has {order} tokens, so there is no n-gram to learn from")
        self.vocab_size, self.order = vocab_size, order
        levels: list[_Level] = []
        longest = np.concatenate([_keys(document, order, vocab_size) for document in documents])
        keys, counts = np.unique(longest, return_counts=True)
        for size in range(order, 1, -1):
            levels.append(_Level.of(keys, counts, vocab_size))
            # A shorter n-gram counts the different tokens seen before it. Before a text's start there is
            # none, so what starts a text counts as often as it occurs.
            shorter = [keys % vocab_size ** (size - 1)]
            if size > 2:
                shorter += [_keys(document[: size - 1], size - 1, vocab_size) for document in documents]
            keys, counts = np.unique(np.concatenate(shorter), return_counts=True)
        self._levels = levels[::-1]
        discount = discounts(counts)[np.minimum(counts, 3)]
        self._single = np.full(vocab_size, discount.sum() / counts.sum() / vocab_size)
        self._single[keys] += (counts - discount) / counts.sum()

    def log_probabilities(self, document: Ints) -> Floats:
        """Natural logarithm of the probability of every token but the first, given those before it.

        Args:
            document: int64 ``[n]``, its start token first.

        Returns:
            ``[n - 1]``.
        """
        found = self._single[document[1:]]
        for size, level in enumerate(self._levels, 2):
            keys = _keys(document, size, self.vocab_size)
            found[size - 2 :] = level.interpolate(keys, self.vocab_size, found[size - 2 :])
        return np.log(found)
