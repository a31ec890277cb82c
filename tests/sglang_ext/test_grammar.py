"""Drafts follow grammars, and leave them as they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from deepinfer_plugins.sglang_ext.grammar import following

VOCAB = 70


class Counting:
    """A grammar of the numbers ``first``, ``first + 1`` and so on up to ``last``."""

    def __init__(self, first: int, last: int) -> None:
        self.next, self.last = first, last
        self.accepted: list[int] = []

    def accept_token(self, token: int) -> None:
        assert token == self.next
        self.accepted.append(token)
        self.next += 1

    def rollback(self, count: int) -> None:
        assert count <= len(self.accepted)
        self.next -= count
        del self.accepted[len(self.accepted) - count :]

    def is_terminated(self) -> bool:
        return self.next > self.last

    def allocate_vocab_mask(self, vocab_size: int, rows: int, device: Any) -> torch.Tensor:
        return torch.full((rows, (vocab_size + 31) // 32), -1, dtype=torch.int32)

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        mask[row] = 0
        mask[row, self.next // 32] = torch.tensor(1 << self.next % 32).int()

    @staticmethod
    def move_vocab_mask(mask: torch.Tensor, device: Any) -> torch.Tensor:
        return mask.to(device)

    def apply_vocab_mask(self, logits: torch.Tensor, mask: torch.Tensor) -> None:
        for row in range(logits.shape[0]):
            for token in range(VOCAB):
                if not int(mask[row, token // 32]) >> token % 32 & 1:
                    logits[row, token] = -torch.inf


def request(grammar: Counting | None, finished: bool = False) -> Any:
    return SimpleNamespace(grammar=grammar, finished=lambda: finished)


def test_drafts_are_what_grammars_allow() -> None:
    """Of a batch: none, one that goes on, one that ends, one of a request that has ended, one at its end."""
    grammars = [None, Counting(30, 60), Counting(5, 6), Counting(8, 9), Counting(4, 3)]
    reqs = [request(grammar, finished=index == 3) for index, grammar in enumerate(grammars)]
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(1).tolist()
    with following(reqs, lambda given, index: given.argmax(1)) as sample:
        drafts = torch.stack([sample(logits, index) for index in range(4)], dim=1).tolist()
    assert drafts[0] == [best[0]] * 4
    assert drafts[1] == [30, 31, 32, 33]
    assert drafts[2] == [5, 6, best[2], best[2]]
    assert drafts[3] == [best[3]] * 4 and drafts[4] == [best[4]] * 4
    assert [(g.next, g.accepted) for g in grammars if g] == [(30, []), (5, []), (8, []), (4, [])]


def test_a_draft_that_no_grammar_allows_ends_its_following() -> None:
    """Where another parameter bars all that it allows."""
    grammar = Counting(3, 9)
    with following(
        [request(grammar)], lambda given, index: torch.tensor([3 if index == 0 else 50])
    ) as sample:
        drafts = [int(sample(torch.zeros(1, VOCAB), index)) for index in range(3)]
        assert grammar.accepted == [3]
    assert drafts == [3, 50, 50] and grammar.accepted == []


def test_grammars_are_put_back_when_drafting_fails() -> None:
    grammar = Counting(3, 9)
    try:
        with following([request(grammar)], lambda given, index: given.argmax(1)) as sample:
            sample(torch.zeros(1, VOCAB), 0)
            raise ArithmeticError
    except ArithmeticError:
        assert grammar.next == 3
