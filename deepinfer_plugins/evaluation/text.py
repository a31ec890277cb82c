"""The held-out text as tokens: what is scored, and what is continued."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deepinfer_plugins.core.shipped import Document, is_for_test
from deepinfer_plugins.evaluation.ngram import Ints

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Tokens of a document that are scored: what the shipped checkpoint was trained on.
LENGTH = 512
# Documents of one source at most: one long file is not to stand for its kind.
PER_SOURCE = 8
# A prompt has this many tokens, and at most half of its document.
PROMPT_LENGTHS = range(16, 97)


class Piece(NamedTuple):
    """The beginning of a document.

    Args:
        kind: Of the document.
        tokens: From its start token on.
    """

    kind: str
    tokens: list[int]


class Text(NamedTuple):
    """What is asked of a checkpoint; nothing is both scored and continued."""

    scored: list[Piece]
    prompts: list[Piece]


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        ValueError: ``tokenizer.json`` is missing or is none.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing more precise)
        raise ValueError(f"{path} is no tokenizer that can be read: {error}") from error


def tokenize(tokenizer: Tokenizer, documents: Iterable[Document], end: int) -> list[Ints]:
    """Token ids of each document, from the start token to ``end``."""
    encoded = tokenizer.encode_batch_fast([document.text for document in documents], add_special_tokens=True)
    return [np.array([*item.ids, end], dtype=np.int64) for item in encoded]


def choose(
    tokenizer: Tokenizer, documents: Sequence[Document], end: int, tokens: int, prompts: int, seed: int = 0
) -> Text:
    """Draw held-out documents that nothing was fitted to, of each kind in turn, and take their beginnings.

    Args:
        tokenizer: The model's; it puts a start token first.
        documents: The corpus.
        end: The token that ends a document.
        tokens: How many to score; the last document is cut short for it.
        prompts: How many to continue.
        seed: Of the draw.

    Raises:
        ValueError: There is not as much held-out text.
    """
    rng = random.Random(seed)
    # What a generator made twice can be on both sides.
    known = {document.text for document in documents if not is_for_test(document.name)}
    held_out = [
        document for document in documents if is_for_test(document.name) and document.text not in known
    ]
    rng.shuffle(held_out)
    held_out = _in_turn(held_out)
    encoded = tokenize(tokenizer, held_out, end)
    left = deque(
        Piece(document.kind, ids[:LENGTH].tolist()) for document, ids in zip(held_out, encoded, strict=True)
    )
    available = sum(len(piece.tokens) - 1 for piece in left)
    scored: list[Piece] = []
    missing = tokens
    while missing > 0 and left:
        piece = left.popleft()
        scored.append(piece._replace(tokens=piece.tokens[: missing + 1]))
        missing -= len(scored[-1].tokens) - 1
    long_enough = [piece for piece in left if len(piece.tokens) >= 2 * PROMPT_LENGTHS.start][:prompts]
    if missing > 0 or len(long_enough) < prompts:
        raise ValueError(
            f"{tokens} tokens to score and then {prompts} prompts to continue are more than is held out: "
            f"{len(held_out)} documents, whose beginnings have {available} tokens"
        )
    return Text(
        scored,
        [
            piece._replace(tokens=piece.tokens[: min(rng.choice(PROMPT_LENGTHS), len(piece.tokens) // 2)])
            for piece in long_enough
        ],
    )


def _in_turn(documents: Iterable[Document]) -> list[Document]:
    """Of each kind one after the other, as long as there are some, none twice; of one source at most ``PER_SOURCE``."""
    kinds: dict[str, list[Document]] = defaultdict(list)
    taken: Counter[str] = Counter()
    for document in {document.text: document for document in documents}.values():
        taken[document.source] += 1
        if taken[document.source] <= PER_SOURCE:
            kinds[document.kind].append(document)
    rounds = zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return [document for each in rounds for document in each if document is not None]
