"""What every layer needs to know of a step, computed once per step."""

from __future__ import annotations

import torch

from deepinfer_plugins.model.step import NO_TOKEN, Paged, Step


class Rows:
    """The rows a run of layers computes, and where they read and write.

    ``all`` rows are those whose keys are written; ``local`` rows are those whose queries this rank
    computes. They differ only when a step is spread over ranks.

    Attributes:
        positions: ``[num_local]``, int64; ``NO_POSITION``: padding, which has no slot and sees no key.
        angles: ``[num_local]``, int64; row of each position in a rotary table.
        request: ``[num_local]``, int64.
        window_start: ``[num_local]``, int64; first position of each row's sliding window.
        image: ``[num_local]``, bool; None if no row of the step is one.
    """

    def __init__(self, step: Step, sliding_window: int) -> None:
        self.step = step
        self.positions = self.local(step.positions)
        self.angles = self.positions.clamp(min=0)
        self.request = self.local(step.request)
        self.image = None if step.image is None else self.local(step.image)
        self.window_start = (self.positions - (sliding_window - 1)).clamp(min=0)
        if step.window_floor is not None:
            self.window_start = torch.maximum(self.window_start, self.local(step.window_floor))
        self._slots: dict[tuple[int, int, str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._lengths: dict[int, torch.Tensor] = {}

    def local(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``x``, ``[num_all, ...]``."""
        return x if self.step.local_rows is None else x[self.step.local_rows]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All rows of ``x``, ``[num_local, ...]``."""
        return x if self.step.local_rows is None else self.step.gather(x)

    def lengths(self, ratio: int) -> torch.Tensor:
        """How many compressed entries each local row may see: those complete at its position."""
        if ratio not in self._lengths:
            self._lengths[ratio] = (self.positions + 1) // ratio
        return self._lengths[ratio]

    def position_slots(self, cache: Paged) -> torch.Tensor:
        """Slot of each row in a cache with one entry a position, ``[num_all]``."""
        return self._slot(cache, "position", 1)

    def entry_slots(self, cache: Paged, ratio: int) -> torch.Tensor:
        """Slot of the entry that each row completes; -1 for a row that completes none, ``[num_all]``."""
        return self._slot(cache, "entry", ratio)

    def partner_slots(self, cache: Paged) -> torch.Tensor:
        """Slot of the row before each odd row, and an even row's own, ``[num_all]``."""
        return self._slot(cache, "partner", 2)

    def _slot(self, cache: Paged, what: str, ratio: int) -> torch.Tensor:
        key = (id(cache.table), cache.page_size, what, ratio)
        if key not in self._slots:
            positions = self.step.positions
            if what == "entry":
                entries = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
            elif what == "partner":
                entries = positions - positions % ratio
            else:
                entries = positions
            # The table is kept beside its slots: an id is only good while the object lives.
            self._slots[key] = (cache.table, cache.slots(self.step.request, entries))
        return self._slots[key][1]


def ngram_context(step: Step, compressed: torch.Tensor, pad: int, size: int) -> torch.Tensor:
    """Compressed ids of each row's token and of the tokens before it.

    The first token that has no compressed id (before the start of the request, an image, an id the
    tokenizer does not know) and everything older than it become ``pad``.

    Args:
        step: All its rows are used, whichever rank computes them.
        compressed: ``[num_ids]``, int64; compressed id of each token id.
        pad: Compressed id of the padding token.
        size: Length of the longest n-gram.

    Returns:
        ``[num_rows, size]``, int64, nearest first: column 0 is the row's own token.
    """
    tokens = step.token_ids if step.image is None else step.token_ids.masked_fill(step.image, NO_TOKEN)
    columns = [tokens]
    same = torch.ones_like(step.request, dtype=torch.bool)
    inside = torch.zeros_like(step.request)
    for distance in range(1, size):
        earlier = torch.roll(tokens, distance)
        same = same & (torch.roll(step.request, distance) == step.request)
        # A roll wraps around: the first rows of the step have no row before them.
        same[:distance] = False
        before_step = step.context_ids[step.request, distance - 1 - inside]
        columns.append(torch.where(same, earlier, before_step))
        inside = inside + same
    context = torch.stack(columns, dim=1)
    known = (context >= 0) & (context < compressed.shape[0])
    ids = torch.where(known, compressed[context.clamp(0, compressed.shape[0] - 1)], NO_TOKEN)
    unbroken = (ids >= 0).cumprod(dim=1).bool()
    return torch.where(unbroken, ids, pad)
