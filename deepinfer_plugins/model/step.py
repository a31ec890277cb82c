"""The contract between the model and an engine: what one forward needs, as tensors.

An adapter fills these in from its engine's metadata. It holds no arithmetic of the model, and the
model knows nothing of schedulers, batches or page allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

# No token: before the start of a request, or an id the n-gram tables must not see (an image).
NO_TOKEN = -1
# The position of a row of padding.
NO_POSITION = -1


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """One layer's cache of one kind, as this step sees it.

    Args:
        pages: ``[num_pages, page_size, record_bytes]``, uint8, any strides (the engine may interleave
            caches). The size of a page is read from here, never assumed: engines unify page sizes.
        table: ``[num_requests, max_pages]``, int32 or int64. Entry ``e`` of request ``r`` lives in
            page ``table[r, e // page_size]`` at offset ``e % page_size``. An *entry* is one position,
            or for a cache compressed by ``ratio`` the block of ``ratio`` positions it stands for.
            Pages that hold no entry the step reads or writes may have any valid id.
    """

    pages: torch.Tensor
    table: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.pages.shape[1]

    def slots(self, request: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        """Flat slot ``page * page_size + offset`` of each entry; -1 where ``entry`` is negative.

        Args:
            request: int64, any shape.
            entry: int64, same shape.

        Returns:
            int64, same shape. 64-bit: a page id times a record size passes 2**31.
        """
        page = self.table[request, entry.clamp(min=0) // self.page_size].long()
        return torch.where(entry < 0, -1, page * self.page_size + entry % self.page_size)


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """Every cache the model keeps between steps, by kind and then by layer.

    ``kernels/cache_layout.py`` owns the bytes of a record; the engine owns the pages.

    Args:
        window: Sliding-window keys, every layer ``0..num_hidden_layers-1``; one entry a position.
        compressed: Compressed keys, the KV source layers; one entry per ``ratio`` positions.
        index_key: Index keys, the same layers and entries.
        compressor: Rows waiting for their pair, KV sources of ratio 2; one entry a position, of which only the
            last position before a step is ever read.
        draft: Context keys of draft layer ``0..num_nextn_predict_layers-1``; one entry a position.
            Empty if nothing drafts.
    """

    window: Mapping[int, Paged]
    compressed: Mapping[int, Paged]
    index_key: Mapping[int, Paged]
    compressor: Mapping[int, Paged]
    draft: Mapping[int, Paged] = field(default_factory=dict)


def _all_rows(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward: some consecutive tokens of some requests.

    Rows of a request are contiguous and in order of position. A step may hold prompts, single decode
    rows and rows of drafts under verification side by side: the model makes no difference between them.

    Rows of padding fill a step up to a number of rows for which a graph was captured. They come last, have
    position ``NO_POSITION``, any token and any request, write to no cache and change no bit of another row; what
    comes out for them has no meaning.

    Args:
        token_ids: ``[num_rows]``, int64.
        positions: ``[num_rows]``, int64, absolute; ``NO_POSITION``: padding.
        request: ``[num_rows]``, int64; the row of each page table this row belongs to.
        context_ids: ``[num_requests, engram_max_ngram_size - 1]``, int64. Ids of the tokens before
            the request's first row in this step, nearest first; ``NO_TOKEN`` before its start.
        image: ``[num_rows]``, bool; rows of an image span. None if there are none.
        decoder: The rows that the decoder side (layers after the cut) runs on; None for all. Made by
            :meth:`keep`. This is what makes bounded replay a property of the step.
        window_floor: ``[num_rows]``, int64. Lowest position a row may see in the sliding window;
            None for no bound. Set on ``decoder`` by bounded replay.
        local_rows: Indices, among the rows above, of the rows whose queries this rank computes;
            None for all of them. ``gather`` brings per-row results of all ranks together again.
        gather: From ``[num_local_rows, ...]`` to ``[num_rows, ...]``, in step order.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    request: torch.Tensor
    context_ids: torch.Tensor
    image: torch.Tensor | None = None
    decoder: Step | None = None
    decoder_rows: torch.Tensor | None = None
    window_floor: torch.Tensor | None = None
    local_rows: torch.Tensor | None = None
    gather: Callable[[torch.Tensor], torch.Tensor] = _all_rows

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def keep(self, rows: torch.Tensor, window_floor: torch.Tensor | None = None) -> Step:
        """This step with its decoder side narrowed to ``rows``.

        Args:
            rows: ``[num_kept]``, int64, ascending.
            window_floor: ``[num_kept]``, see above.
        """
        if self.local_rows is not None:
            raise ValueError("keep() must be called before rows are spread over ranks, but local_rows is set")
        decoder = replace(
            self,
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            request=self.request[rows],
            image=None if self.image is None else self.image[rows],
            window_floor=window_floor,
            decoder=None,
            decoder_rows=None,
        )
        return replace(self, decoder=decoder, decoder_rows=rows)
