"""Paged caches full of NaN in which some requests have written some entries."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from .conformance import Draw

PAGE_SIZE = 7


class Cache:
    """One kind of cache: ``lengths[r]`` entries of request ``r``, in scattered pages, and NaN elsewhere.

    Args:
        draw: Source of page order and keys.
        encode: From ``[n, d]`` to records.
        d: Width of a key.
        lengths: Entries of each request.
    """

    def __init__(
        self, draw: Draw, encode: Callable[[torch.Tensor], torch.Tensor], d: int, lengths: list[int]
    ) -> None:
        self.keys = [draw.normal(length, d) for length in lengths]
        per_request = -(-max(lengths) // PAGE_SIZE) + 1
        self.table = draw.order(per_request * len(lengths)).view(len(lengths), per_request)
        records = [encode(keys) for keys in self.keys]
        self.pages = draw.pages(self.table.numel(), PAGE_SIZE, records[0].shape[-1])
        for row, record in zip(self.table, records):
            entry = torch.arange(len(record), device=draw.device)
            self.pages[row[entry // PAGE_SIZE], entry % PAGE_SIZE] = record

    def with_unwritten(self, byte: int) -> torch.Tensor:
        """A copy of the pages in which what nobody wrote holds another byte."""
        pages = self.pages.clone()
        return pages.masked_fill_((pages == 0xFF).all(-1, keepdim=True), byte)

    def far_away(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same pages and table with page ids whose bytes begin past ``2**31``."""
        num_pages, page_size, record_bytes = self.pages.shape
        first = 2**31 // (page_size * record_bytes) + 1
        size = (first + num_pages) * page_size * record_bytes
        if self.pages.device.type == "cpu":
            # Costs only the pages that are touched.
            memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        else:
            memory = torch.zeros(size, dtype=torch.uint8, device=self.pages.device)
        pages = memory.view(first + num_pages, page_size, record_bytes)
        pages[first:] = self.pages
        return pages, (self.table + first).int()
