"""Reading and writing cache records in paged, possibly interleaved, memory."""

from __future__ import annotations

import torch


def write_records(records: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Write row ``i`` of ``records`` to slot ``slots[i]``, in place; a negative slot is not written.

    Args:
        records: ``[n, record_bytes]``, uint8.
        pages: ``[num_pages, page_size, record_bytes]``, uint8, any strides.
        slots: ``[n]``, int64, ``page * page_size + offset``; those not negative are distinct.

    Raises:
        ValueError: If ``pages`` holds records of another size.
    """
    if pages.shape[2] != records.shape[1]:
        raise ValueError(
            f"a record has {records.shape[1]} bytes, but the pages hold records of {pages.shape[2]}"
        )
    if slots.is_cpu:
        kept = (slots >= 0).nonzero().squeeze(1)
        slots, records = slots[kept], records[kept]
    elif len(slots):
        slots, records = _all_with_slots(records, pages, slots)
    pages[slots // pages.shape[1], slots % pages.shape[1]] = records


def _all_with_slots(
    records: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and records of a write that has the same effect, but no negative slot.

    A row without a slot does what some row with one does. The host need not know how many there are.
    """
    kept = slots >= 0
    rows = torch.arange(len(slots), device=slots.device)
    source = torch.where(kept, rows, kept.int().argmax())
    slots, records = slots[source], records[source]
    # If no row has a slot, they all write what is there.
    unchanged = pages[0, 0].expand_as(records)
    return slots.clamp(min=0), torch.where((slots < 0)[:, None], unchanged, records)


def read_slots(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Records ``[n, record_bytes]`` at ``slots [n]``, int64; zeros where the slot is negative."""
    page_size = pages.shape[1]
    missing = slots < 0
    slots = slots.masked_fill(missing, 0)
    return pages[slots // page_size, slots % page_size].masked_fill(missing[:, None], 0)


def read_entries(
    pages: torch.Tensor,
    table: torch.Tensor,
    request: torch.Tensor,
    entries: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    """Records of entries, by page table.

    Args:
        pages: ``[num_pages, page_size, record_bytes]``, uint8, any strides.
        table: ``[num_requests, max_pages]``, int32 or int64.
        request: int64, any shape that broadcasts to that of ``entries``.
        entries: int64.
        valid: bool, shape of ``entries``.

    Returns:
        Shape of ``entries`` and ``record_bytes``, uint8; zeros, which decode to zeros, where ``valid`` is false:
        what was never written may be NaN, and a factor of zero would not remove that.
    """
    page_size = pages.shape[1]
    missing = ~valid
    entries = entries.masked_fill(missing, 0)
    page = table[request, entries // page_size].long().masked_fill_(missing, 0)
    return pages[page, entries % page_size].masked_fill_(missing[..., None], 0)
