"""``records.py`` in Triton: where the bytes of a record lie in paged, possibly interleaved, memory."""

# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl


def check_record_bytes(record_bytes: int, pages: torch.Tensor) -> None:
    """Fail unless ``pages`` hold records of ``record_bytes`` bytes."""
    if pages.shape[2] != record_bytes:
        raise ValueError(f"a record has {record_bytes} bytes, but the pages hold records of {pages.shape[2]}")


def alignment(pages: torch.Tensor) -> int:
    """What divides the address of every record, up to 16."""
    page_stride, entry_stride, byte_stride = pages.stride()
    return math.gcd(16, pages.data_ptr(), page_stride, entry_stride) if byte_stride == 1 else 1


@triton.jit
def slot_offset(slot, page_size, page_stride, entry_stride):
    """Bytes, int64, from the first page to the record of ``slot``, int64; of slot 0 where it is negative."""
    slot = tl.maximum(slot, 0)
    return slot // page_size * page_stride + slot % page_size * entry_stride


@triton.jit
def load_pairs(x, column_stride, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """Even and odd columns of a row, float32 ``[GROUPS, PAIRS]`` each; zeros from group ``NUM_GROUPS`` on."""
    group = tl.arange(0, GROUPS)
    column = 2 * (group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :])
    present = (group < NUM_GROUPS)[:, None]
    low = tl.load(x + column * column_stride, mask=present, other=0.0).to(tl.float32)
    high = tl.load(x + (column + 1) * column_stride, mask=present, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def store_groups(
    record, values, scales, byte_stride, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    """Write a record: bytes ``values [GROUPS, SIZE]`` of its ``NUM_GROUPS`` groups, then ``scales [GROUPS]``."""
    group = tl.arange(0, GROUPS)
    place = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(record + place * byte_stride, values.to(tl.uint8), mask=(group < NUM_GROUPS)[:, None])
    place = record + (NUM_GROUPS * SIZE + group) * byte_stride
    tl.store(place, scales.to(tl.uint8), mask=group < NUM_GROUPS)


@triton.jit
def entry_records(
    pages, table, table_stride, entry, valid, page_size, page_stride, entry_stride, ALIGN: tl.constexpr
):
    """Pointers ``[n, 1]`` to the records of entries; to some record where ``valid`` is false.

    Args:
        pages: Of the cache.
        table: Pointer to the page ids of the request.
        table_stride: Elements between page ids.
        entry: ``[n]``, int32.
        valid: ``[n]``, bool.
        page_size: Entries of a page.
        page_stride: Bytes between pages.
        entry_stride: Bytes between entries.
        ALIGN: ``alignment(pages)``.
    """
    entry = tl.where(valid, entry, 0)
    page = tl.load(table + entry // page_size * table_stride, mask=valid, other=0).to(tl.int64)
    offset = page * page_stride + (entry % page_size * entry_stride).to(tl.int64)
    return tl.multiple_of((pages + offset)[:, None], [ALIGN, ALIGN])


@triton.jit
def load_words(record, valid, start, byte_stride, WORDS: tl.constexpr, ALIGN: tl.constexpr):
    """Words ``[n, WORDS]`` of four bytes of records from byte ``start`` on; zeros where ``valid`` is false.

    Args:
        record: ``[n, 1]``, as of :func:`entry_records`.
        valid: ``[n]``, bool.
        start: A multiple of 4.
        byte_stride: Bytes between the bytes of a record.
        WORDS: Of the result.
        ALIGN: ``alignment(pages)``.
    """
    word = tl.arange(0, WORDS)[None, :]
    if ALIGN % 4 == 0:
        return tl.load((record + start).to(tl.pointer_type(tl.int32)) + word, mask=valid[:, None], other=0)
    else:
        words = tl.zeros((valid.shape[0], WORDS), tl.int32)
        for i in tl.static_range(4):
            byte = tl.load(record + (start + 4 * word + i) * byte_stride, mask=valid[:, None], other=0)
            words |= byte.to(tl.int32) << (8 * i)
        return words
