"""Drafts that grammars allow: those of a request with one are chosen among the tokens that can come next there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

SampleDraft: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]


@contextmanager
def following(reqs: Sequence[Any], sample: SampleDraft) -> Iterator[SampleDraft]:
    """``sample`` with the logits of what no grammar allows at -inf.

    Each draft brings its request's grammar a token further, for the next one; at the end all are put back. On a GPU the
    host waits for every draft of a batch with grammars.

    Args:
        reqs: Of the batch, their grammars up to the last token.
        sample: The draft ``index`` of every request, int64 ``[B]``, from logits ``[B, vocab_size]`` and ``index``.
    """
    live = {
        row: req.grammar
        for row, req in enumerate(reqs)
        if req.grammar is not None and not req.finished() and not req.grammar.is_terminated()
    }
    ahead = Counter[int]()

    def masked(logits: torch.Tensor, index: int) -> torch.Tensor:
        if not live:
            return sample(logits, index)
        rows = list(live)
        grammar = live[rows[0]]
        mask = grammar.allocate_vocab_mask(logits.shape[1], len(rows), logits.device)
        for place, row in enumerate(rows):
            live[row].fill_vocab_mask(mask, place)
        where = torch.tensor(rows, device=logits.device)
        allowed = logits[where].float()
        # A bit for each token, 32 to a number.
        grammar.apply_vocab_mask(allowed, grammar.move_vocab_mask(mask, logits.device))
        tokens = sample(logits.float().index_copy(0, where, allowed), index)
        for place, (row, token) in enumerate(zip(rows, tokens[where].tolist(), strict=True)):
            # Other parameters may leave nothing of what a grammar allows; then it can't follow.
            if is_allowed := int(mask[place, token // 32]) >> token % 32 & 1:
                live[row].accept_token(token)
                ahead[row] += 1
            if not is_allowed or live[row].is_terminated():
                del live[row]
        return tokens

    try:
        yield masked
    finally:
        for row, count in ahead.items():
            reqs[row].grammar.rollback(count)
