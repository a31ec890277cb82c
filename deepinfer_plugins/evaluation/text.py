"""The held-out text as tokens: what is scored, and what is continued."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deepinfer_plugins.core.shipped import Document, is_held_out
from deepinfer_plugins.evaluation.ngram import Ints

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Tokens of a piece: what the shipped checkpoint was trained on.
LENGTH = 512
# A prompt has this many tokens, and at most half of its piece.
PROMPT_LENGTHS = range(16, 97)


class Text(NamedTuple):
    """What is asked of a checkpoint.

    Args:
        scored: Pieces of held-out documents.
        prompts: Beginnings of other pieces.
    """

    scored: list[list[int]]
    prompts: list[list[int]]


def tokenize(tokenizer: Tokenizer, documents: Iterable[Document], end: int) -> list[Ints]:
    """Token ids of each document, from the start token to ``end``."""
    encoded = tokenizer.encode_batch_fast([document.text for document in documents], add_special_tokens=True)
    return [np.array([*item.ids, end], dtype=np.int64) for item in encoded]


def pieces(documents: Sequence[Ints], seed: int) -> list[list[int]]:
    """All of the documents in pieces of at most ``LENGTH`` tokens, each behind a start token, in random order."""
    cut = [
        [int(document[0]), *document[first : first + LENGTH - 1].tolist()]
        for document in documents
        for first in range(1, len(document), LENGTH - 1)
    ]
    random.Random(seed).shuffle(cut)
    return cut


def choose(
    tokenizer: Tokenizer, documents: Sequence[Document], end: int, tokens: int, prompts: int, seed: int = 0
) -> Text:
    """Choose what to score and what to continue.

    Every token of the held-out text is as likely to be chosen as any other. Nothing is both scored and continued.

    Args:
        tokenizer: The model's; it puts a start token first.
        documents: The corpus.
        end: The token that ends a document.
        tokens: How many to score; the last piece is cut short for it.
        prompts: How many to continue.
        seed: Of the choice.

    Raises:
        ValueError: There is not as much held-out text.
    """
    held_out = [document for document in documents if is_held_out(document.name)]
    found = pieces(tokenize(tokenizer, held_out, end), seed)
    scored: list[list[int]] = []
    left = tokens
    while left > 0 and found:
        scored.append(found.pop()[: left + 1])
        left -= len(scored[-1]) - 1
    rng = random.Random(seed + 1)
    long_enough = [piece for piece in found if len(piece) >= 2 * PROMPT_LENGTHS.start][:prompts]
    if left > 0 or len(long_enough) < prompts:
        raise ValueError(
            f"{tokens} tokens to score and {prompts} prompts to continue are more than the held-out text has: "
            f"{sum(map(len, scored)) + sum(map(len, found))} tokens, in {len(held_out)} documents"
        )
    return Text(scored, [piece[: min(rng.choice(PROMPT_LENGTHS), len(piece) // 2)] for piece in long_enough])
