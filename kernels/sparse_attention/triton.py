"""``sparse_attention`` in tiles of ``KEYS`` keys, each read and decoded once for all heads of a row.

A row's list has parts: its window, with the sink's share, and ``INDEX_PARTS`` of its indices. A part is cut into
tiles from its beginning and keeps a running maximum; the parts are added in their order. All of that follows from the
row's window and the number of indices, so a prompt's chunk and a decode step get the same bits from the same kernel. A
tile has ``HEADS`` heads, however many there are.

Keys are exact in bfloat16, products of them with a query too; sums are in float32, and a key's share is rounded to
bfloat16 before it meets the key. Workspace: float32 results of the parts of some rows, at most ``ELEMENTS_AT_ONCE``.
"""

# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.cache_layout import FP4_GROUP, MXFP8_GROUP
from deepinfer_plugins.kernels.triton_formats import (
    decode_e4m3,
    decode_ue8m0,
    dot,
    e2m1_pairs_as_e4m3,
    to_bfloat16,
)
from deepinfer_plugins.kernels.triton_records import alignment, entry_records

KEYS = 32
HEADS = 64
# Of the partial results that are kept at a time: 64 MiB.
ELEMENTS_AT_ONCE = 1 << 24
# Parts of the indices, so that a decode step of 64 rows fills a chip.
INDEX_PARTS = 2

LOG2_E = math.log2(math.e)


def sparse_attention(
    q: torch.Tensor,
    window_pages: torch.Tensor,
    window_table: torch.Tensor,
    compressed_pages: torch.Tensor | None,
    compressed_table: torch.Tensor | None,
    indices: torch.Tensor | None,
    request: torch.Tensor,
    window_start: torch.Tensor,
    window_end: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As the reference, but for the precision of sums.

    Raises:
        ValueError: If ``d`` is not a power of two from 32 on.
    """
    n, num_heads, d = q.shape
    if d < 32 or d & (d - 1):
        raise ValueError(f"the width of a key is {d}; the triton provider computes powers of two from 32 on")
    if compressed_pages is None or compressed_table is None or indices is None or not indices.shape[1]:
        # Never read: there are no indices.
        compressed_pages, compressed_table, indices = window_pages, window_table, request[:, None][:, :0]
    request, window_start, window_end, sinks = (
        part.contiguous() for part in (request, window_start, window_end, sinks)
    )
    num_indices = indices.shape[1]
    parts = 1 + (INDEX_PARTS if num_indices else 0)
    out = torch.empty(n, num_heads, d, dtype=torch.bfloat16, device=q.device)
    at_once = min(n, max(ELEMENTS_AT_ONCE // (parts * num_heads * d), 1)) if parts > 1 else n
    partial = total = highest = out
    if parts > 1:
        partial = torch.empty(at_once, parts, num_heads, d, dtype=torch.float32, device=q.device)
        total, highest = (
            torch.empty(at_once, parts, num_heads, dtype=torch.float32, device=q.device) for _ in range(2)
        )
    for first in range(0, n, at_once or 1):
        rows = slice(first, min(first + at_once, n))
        num_rows = rows.stop - first
        _attend[(num_rows, triton.cdiv(num_heads, HEADS), parts)](
            out[rows],
            partial,
            total,
            highest,
            q[rows],
            window_pages,
            window_table,
            compressed_pages,
            compressed_table,
            indices[rows],
            request[rows],
            window_start[rows],
            window_end[rows],
            sinks,
            scale * LOG2_E,
            *q.stride(),
            *window_pages.stride(),
            window_pages.shape[1],
            *window_table.stride(),
            *compressed_pages.stride(),
            compressed_pages.shape[1],
            *compressed_table.stride(),
            *indices.stride(),
            num_heads,
            num_indices,
            PARTS=parts,
            D=d,
            KEYS=KEYS,
            HEADS=HEADS,
            WINDOW_GROUP=MXFP8_GROUP,
            COMPRESSED_GROUP=FP4_GROUP,
            WINDOW_ALIGN=alignment(window_pages),
            COMPRESSED_ALIGN=alignment(compressed_pages),
            num_warps=8,
            num_stages=2,
        )
        if parts > 1:
            _add_parts[(num_rows, num_heads)](
                out[rows], partial, total, highest, num_heads, PARTS=parts, D=d, num_warps=4
            )
    return out


@triton.jit
def _window_keys(record, valid, byte_stride, D: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr):
    """Keys ``[KEYS, D]``, bfloat16, of window records; zeros where ``valid`` is false."""
    present = valid[:, None]
    codes = tl.load(record + tl.arange(0, D)[None, :] * byte_stride, mask=present, other=0)
    place = record + (D + tl.arange(0, D // GROUP))[None, :] * byte_stride
    factors = decode_ue8m0(tl.load(place, mask=present, other=127))
    keys = decode_e4m3(tl.reshape(codes, (KEYS, D // GROUP, GROUP))) * factors[:, :, None]
    return tl.reshape(to_bfloat16(keys), (KEYS, D))


@triton.jit
def _compressed_keys(record, valid, byte_stride, D: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr):
    """The same of compressed records."""
    present = valid[:, None]
    pairs = tl.load(record + tl.arange(0, D // 2)[None, :] * byte_stride, mask=present, other=0)
    place = record + (D // 2 + tl.arange(0, D // GROUP))[None, :] * byte_stride
    # An e2m1 number is 64 times the e4m3 number that is decoded in its place.
    factors = decode_e4m3(tl.load(place, mask=present, other=0)) * 64.0
    low, high = e2m1_pairs_as_e4m3(tl.reshape(pairs, (KEYS, D // GROUP, GROUP // 2)))
    low = to_bfloat16(decode_e4m3(low) * factors[:, :, None])
    high = to_bfloat16(decode_e4m3(high) * factors[:, :, None])
    return tl.reshape(tl.interleave(low, high), (KEYS, D))


@triton.jit
def _attend_to_keys(
    queries,
    is_head,
    sink,
    scale,
    pages,
    table,
    indices,
    first,
    last,
    end,
    page_stride,
    entry_stride,
    byte_stride,
    page_size,
    table_stride,
    index_stride,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    IS_WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Attention to one part of a list, relative to the highest score in it or the sink.

    Args:
        queries: Pointers ``[HEADS, D]`` to bfloat16.
        is_head: ``[HEADS]``, bool, which heads there are.
        sink: ``[HEADS]``, float32: a score without a key.
        scale: Of the scores, which are exponents of two.
        pages: Of the cache.
        table: Page ids of the request.
        indices: Of the row; not read for a window.
        first: Entry, or place among the indices, at which the part begins.
        last: One past its last tile.
        end: One past what is valid.

    Returns:
        weighted: ``[HEADS, D]``, float32, keys times shares.
        total: ``[HEADS]``, float32, sum of the shares.
        highest: ``[HEADS]``, float32, the exponent whose share is 1.
    """
    query = tl.load(queries, mask=is_head[:, None], other=0.0)
    # With the sink among the scores no maximum is minus infinity.
    highest = tl.maximum(sink, -1e30)
    total = tl.zeros((HEADS,), tl.float32)
    weighted = tl.zeros((HEADS, D), tl.float32)
    for start in range(first, last, KEYS):
        entry = start + tl.arange(0, KEYS)
        valid = entry < end
        if not IS_WINDOW:
            entry = tl.load(indices + entry * index_stride, mask=valid, other=-1).to(tl.int32)
            valid = entry >= 0
        record = entry_records(
            pages, table, table_stride, entry, valid, page_size, page_stride, entry_stride, ALIGN
        )
        if IS_WINDOW:
            keys = _window_keys(record, valid, byte_stride, D, KEYS, GROUP)
        else:
            keys = _compressed_keys(record, valid, byte_stride, D, KEYS, GROUP)
        scores = dot(query, tl.trans(keys), tl.zeros((HEADS, KEYS), tl.float32), "ieee") * scale
        scores = tl.where(valid[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp2(highest - higher)
        shares = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(shares, axis=1)
        weighted = dot(to_bfloat16(shares), keys, weighted * shrink[:, None], "ieee")
        highest = higher
    return weighted, total, highest


@triton.jit
def _attend(
    out,
    partial,
    totals,
    highests,
    q,
    window_pages,
    window_table,
    compressed_pages,
    compressed_table,
    indices,
    request,
    window_start,
    window_end,
    sinks,
    scale,
    q_row_stride,
    q_head_stride,
    q_stride,
    window_page_stride,
    window_entry_stride,
    window_byte_stride,
    window_page_size,
    window_table_row_stride,
    window_table_stride,
    compressed_page_stride,
    compressed_entry_stride,
    compressed_byte_stride,
    compressed_page_size,
    compressed_table_row_stride,
    compressed_table_stride,
    index_row_stride,
    index_stride,
    num_heads,
    num_indices,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    WINDOW_GROUP: tl.constexpr,
    COMPRESSED_GROUP: tl.constexpr,
    WINDOW_ALIGN: tl.constexpr,
    COMPRESSED_ALIGN: tl.constexpr,
):
    """One part of the list of one row, for ``HEADS`` heads."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, D)
    is_head = head < num_heads
    owner = tl.load(request + row)
    queries = q + row * q_row_stride + head[:, None] * q_head_stride + column[None, :] * q_stride
    # Shares are powers of two.
    sink = tl.load(sinks + head, mask=is_head, other=0.0) * 1.4426950408889634
    if part == 0:
        start = tl.maximum(tl.load(window_start + row), 0).to(tl.int32)
        end = tl.load(window_end + row).to(tl.int32) + 1
        weighted, total, highest = _attend_to_keys(
            queries,
            is_head,
            sink,
            scale,
            window_pages,
            window_table + owner * window_table_row_stride,
            indices,
            start,
            end,
            end,
            window_page_stride,
            window_entry_stride,
            window_byte_stride,
            window_page_size,
            window_table_stride,
            index_stride,
            D,
            KEYS,
            HEADS,
            True,
            WINDOW_GROUP,
            WINDOW_ALIGN,
        )
        total += tl.exp2(sink - highest)
        if PARTS == 1:
            place = out + (row * num_heads + head)[:, None] * D + column[None, :]
            tl.store(place, to_bfloat16(weighted / total[:, None]), mask=is_head[:, None])
        else:
            number = row * PARTS * num_heads + head
            tl.store(partial + number[:, None] * D + column[None, :], weighted, mask=is_head[:, None])
            tl.store(totals + number, total, mask=is_head)
            tl.store(highests + number, highest, mask=is_head)
    elif PARTS > 1:
        num_tiles = tl.cdiv(num_indices, KEYS)
        weighted, total, highest = _attend_to_keys(
            queries,
            is_head,
            sink,
            scale,
            compressed_pages,
            compressed_table + owner * compressed_table_row_stride,
            indices + row * index_row_stride,
            num_tiles * (part - 1) // (PARTS - 1) * KEYS,
            num_tiles * part // (PARTS - 1) * KEYS,
            num_indices,
            compressed_page_stride,
            compressed_entry_stride,
            compressed_byte_stride,
            compressed_page_size,
            compressed_table_stride,
            index_stride,
            D,
            KEYS,
            HEADS,
            False,
            COMPRESSED_GROUP,
            COMPRESSED_ALIGN,
        )
        number = (row * PARTS + part) * num_heads + head
        tl.store(partial + number[:, None] * D + column[None, :], weighted, mask=is_head[:, None])
        tl.store(totals + number, total, mask=is_head)
        tl.store(highests + number, highest, mask=is_head)


@triton.jit
def _add_parts(out, partial, totals, highests, num_heads, PARTS: tl.constexpr, D: tl.constexpr):
    """The parts of one head of one row, added in their order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, D)
    first = row * PARTS * num_heads + head
    highest = tl.load(highests + first)
    for part in tl.static_range(1, PARTS):
        highest = tl.maximum(highest, tl.load(highests + first + part * num_heads))
    total = 0.0
    weighted = tl.zeros((D,), tl.float32)
    for part in tl.static_range(PARTS):
        number = first + part * num_heads
        grow = tl.exp2(tl.load(highests + number) - highest)
        total += tl.load(totals + number) * grow
        weighted += tl.load(partial + number * D + column) * grow
    tl.store(out + (row * num_heads + head) * D + column, to_bfloat16(weighted / total))
