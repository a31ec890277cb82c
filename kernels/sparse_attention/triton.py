"""``sparse_attention`` in tiles of ``KEYS`` keys, each read and decoded once for all heads of a row.

A row's list has parts: ``INDEX_PARTS`` of its indices, and its window with the sink's share. A part is cut into tiles
from its beginning and keeps a running maximum; the parts are added in their order. All of that follows from the row's
window and the number of indices, so a prompt's chunk and a decode step get the same bits from the same kernel. A tile
has ``HEADS`` heads, however many there are.

Keys are exact in bfloat16, products of them with a query too; sums are in float32, and a key's share is rounded to
bfloat16 before it meets the key. Workspace: float32 results of the parts of some rows, at most ``ELEMENTS_AT_ONCE``.

A program has all scores of its part but only some columns of the result: what a program sums up then fits the registers
of four warps, two programs share a multiprocessor, and one decodes while the other multiplies. Codes are read and
decoded as words of four bytes, since Triton keeps every byte in a register of its own.
"""

# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.cache_layout import FP4_GROUP, MXFP8_GROUP
from deepinfer_plugins.kernels.triton_formats import (
    decode_e2m1_words,
    decode_e4m3,
    decode_e4m3_words,
    dot,
    to_bfloat16,
    twice_bfloat16,
    twice_ue8m0,
)
from deepinfer_plugins.kernels.triton_records import alignment, entry_records, load_words

KEYS = 32
HEADS = 64
# Columns of a key that are decoded at a time, and programs that share the columns of a result.
COLUMNS = 128
SHARES = 2
# Of the partial results that are kept at a time: 36 MiB, which a second-level cache holds; those of 96 rows of the
# release.
ELEMENTS_AT_ONCE = 9 << 20
# Parts of the indices, so that a decode step of 64 rows fills a chip.
INDEX_PARTS = 2
# Up to so many rows one kernel attends to both caches, with more one to each: with the same bits.
FEW_ROWS = 16
BOTH, INDICES, WINDOW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

LOG2_E = math.log2(math.e)

# Compressed keys are decoded to this much of themselves, so that what decodes them is a bfloat16: their scale times
# 2^126, the inverse of what the bits of an e2m1 number are of it. The shares of other keys are made as small instead.
SMALLER = tl.constexpr(2.0**-16)


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
    request, window_start, window_end, sinks = (
        part.contiguous() for part in (request, window_start, window_end, sinks)
    )
    out = torch.empty(n, num_heads, d, dtype=torch.bfloat16, device=q.device)
    columns = min(COLUMNS, d)
    shares = min(SHARES, d // columns)
    parts = 1
    partial = total = highest = out
    at_once = n
    if indices is None or not indices.shape[1]:
        # Neither is read.
        compressed_pages, compressed_table, indices = window_pages, window_table, None
    else:
        parts += INDEX_PARTS
        at_once = min(n, max(ELEMENTS_AT_ONCE // (parts * num_heads * d), 1))
        partial = torch.empty(at_once, parts, num_heads, d, dtype=torch.float32, device=q.device)
        total, highest = (
            torch.empty(at_once, parts, shares, num_heads, dtype=torch.float32, device=q.device)
            for _ in range(2)
        )
    for first in range(0, n, at_once or 1):
        rows = slice(first, min(first + at_once, n))
        chosen = None if indices is None else indices[rows]
        # A kernel for both leaves room for fewer results in registers, but a few rows wait for one thing less.
        both = rows.stop - first <= FEW_ROWS
        for which, count in ((BOTH, parts),) if both else ((INDICES, parts - 1), (WINDOW, 1)):
            if count:
                _attend[(rows.stop - first, triton.cdiv(num_heads, HEADS) * shares, count)](
                    out[rows],
                    partial,
                    total,
                    highest,
                    q[rows],
                    window_pages,
                    window_table,
                    compressed_pages,
                    compressed_table,
                    request[rows],
                    window_start[rows],
                    window_end[rows],
                    chosen,
                    sinks,
                    scale * LOG2_E,
                    *q.stride(),
                    *window_pages.stride(),
                    *window_table.stride(),
                    *compressed_pages.stride(),
                    *compressed_table.stride(),
                    *((0, 0) if chosen is None else chosen.stride()),
                    num_heads,
                    0 if chosen is None else chosen.shape[1],
                    WHICH=which.value,
                    PARTS=parts,
                    SHARES=shares,
                    D=d,
                    COLUMNS=columns,
                    KEYS=KEYS,
                    HEADS=HEADS,
                    WINDOW_PAGE_SIZE=window_pages.shape[1],
                    WINDOW_GROUP=MXFP8_GROUP,
                    WINDOW_ALIGN=alignment(window_pages),
                    PAGE_SIZE=compressed_pages.shape[1],
                    GROUP=FP4_GROUP,
                    ALIGN=alignment(compressed_pages),
                    num_warps=4,
                    num_stages=1,
                )
        if parts > 1:
            _add_parts[(rows.stop - first, num_heads)](
                out[rows], partial, total, highest, num_heads, PARTS=parts, SHARES=shares, D=d, num_warps=4
            )
    return out


@triton.jit
def _side_by_side(numbers, KEYS: tl.constexpr, COLUMNS: tl.constexpr):
    """``numbers`` as ``[KEYS, COLUMNS]``. As integers, since Triton would move the change of shape of what a product
    takes to the shared memory, and fails to where it is narrow."""
    bits = tl.reshape(numbers.to(tl.int16, bitcast=True), (KEYS, COLUMNS))
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _window_keys(words, powers, KEYS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Keys ``[KEYS, COLUMNS]``, bfloat16, of the words of window records and of their groups' scales."""
    factors = twice_ue8m0(powers)[:, :, None]
    factors = tl.broadcast_to(factors, (KEYS, COLUMNS // GROUP, GROUP // 4))
    a, b, c, d = decode_e4m3_words(words, tl.reshape(factors, (KEYS, COLUMNS // 4)))
    return _side_by_side(tl.join(tl.join(a, c), tl.join(b, d)), KEYS, COLUMNS)


@triton.jit
def _compressed_keys(words, scales, KEYS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The same of compressed records, times ``SMALLER``."""
    factors = twice_bfloat16(to_bfloat16(decode_e4m3(scales) * (2.0**126 * SMALLER)))[:, :, None]
    factors = tl.broadcast_to(factors, (KEYS, COLUMNS // GROUP, GROUP // 8))
    a, b, c, d, e, f, g, h = decode_e2m1_words(words, tl.reshape(factors, (KEYS, COLUMNS // 8)))
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return _side_by_side(tl.join(even, odd), KEYS, COLUMNS)


@triton.jit
def _entries(indices, index_stride, start, last, KEYS: tl.constexpr):
    """Entries of ``KEYS`` keys from place ``start`` on, and which of them there are."""
    place = start + tl.arange(0, KEYS)
    if indices is None:
        return place, place < last
    else:
        entry = tl.load(indices + place * index_stride, mask=place < last, other=-1).to(tl.int32)
        return entry, entry >= 0


@triton.jit
def _attend_part(
    out,
    partial,
    totals,
    highests,
    q,
    pages,
    table,
    request,
    window_start,
    window_end,
    indices,
    sinks,
    scale,
    q_row_stride,
    q_head_stride,
    q_stride,
    page_stride,
    entry_stride,
    byte_stride,
    table_row_stride,
    table_stride,
    index_row_stride,
    index_stride,
    num_heads,
    num_indices,
    row,
    part,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Attention of ``HEADS`` heads of one row to its window, or to a part of its indices if there are any."""
    share = tl.program_id(1) % SHARES
    head = tl.program_id(1) // SHARES * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    column = tl.arange(0, COLUMNS)
    # Columns are taken round from those of the program's own results, which then come first.
    OWN: tl.constexpr = D // COLUMNS // SHARES
    base = tl.multiple_of(share * (D // SHARES), COLUMNS)
    queries = q + row * q_row_stride + head[:, None] * q_head_stride + column[None, :] * q_stride
    query = ()
    for i in tl.static_range(D // COLUMNS):
        start_column = tl.multiple_of((base + i * COLUMNS) % D, COLUMNS)
        query = query + (tl.load(queries + start_column * q_stride, mask=is_head[:, None], other=0.0),)
    weighted = ()
    for _ in tl.static_range(OWN):
        weighted = weighted + (tl.zeros((HEADS, COLUMNS), tl.float32),)
    # Shares are powers of two. With the sink among the scores no maximum is minus infinity.
    sink = tl.load(sinks + head, mask=is_head, other=0.0) * 1.4426950408889634
    highest = tl.maximum(sink, -1e30)
    total = tl.zeros((HEADS,), tl.float32)

    table += tl.load(request + row) * table_row_stride
    IS_WINDOW: tl.constexpr = indices is None
    if IS_WINDOW:
        first = tl.maximum(tl.load(window_start + row), 0).to(tl.int32)
        last = tl.load(window_end + row).to(tl.int32) + 1
        CODES: tl.constexpr = D
        BLANK: tl.constexpr = 127
        SHARE_SCALE: tl.constexpr = 1.0 if PARTS == 1 else SMALLER
        score_scale = scale
    else:
        indices += row * index_row_stride
        num_tiles = tl.cdiv(num_indices, KEYS)
        first = num_tiles * part // (PARTS - 1) * KEYS
        last = tl.minimum(num_tiles * (part + 1) // (PARTS - 1) * KEYS, num_indices)
        CODES: tl.constexpr = D // 2
        BLANK: tl.constexpr = 0
        SHARE_SCALE: tl.constexpr = 1.0
        score_scale = scale / SMALLER
    BYTES: tl.constexpr = CODES * COLUMNS // D
    GROUPS: tl.constexpr = COLUMNS // GROUP

    # Where the next tile's records lie is known before this one is looked at, and which they are one tile earlier.
    entry, valid = _entries(indices, index_stride, first, last, KEYS)
    record = entry_records(
        pages, table, table_stride, entry, valid, PAGE_SIZE, page_stride, entry_stride, ALIGN
    )
    entry, is_next = _entries(indices, index_stride, first + KEYS, last, KEYS)
    for start in range(first, last, KEYS):
        keys = ()
        for i in tl.static_range(D // COLUMNS):
            chunk = (base // COLUMNS + i) % (D // COLUMNS)
            words = load_words(
                record, valid, tl.multiple_of(chunk * BYTES, BYTES), byte_stride, BYTES // 4, ALIGN
            )
            group = CODES + tl.multiple_of(chunk * GROUPS, GROUPS) + tl.arange(0, GROUPS)
            scales = tl.load(record + group[None, :] * byte_stride, mask=valid[:, None], other=BLANK)
            if IS_WINDOW:
                keys = keys + (_window_keys(words, scales, KEYS, COLUMNS, GROUP),)
            else:
                keys = keys + (_compressed_keys(words, scales, KEYS, COLUMNS, GROUP),)
        is_key, valid = valid, is_next
        record = entry_records(
            pages, table, table_stride, entry, valid, PAGE_SIZE, page_stride, entry_stride, ALIGN
        )
        entry, is_next = _entries(indices, index_stride, start + 2 * KEYS, last, KEYS)

        scores = tl.zeros((HEADS, KEYS), tl.float32)
        for i in tl.static_range(D // COLUMNS):
            scores = dot(query[i], tl.trans(keys[i]), scores)
        scores = tl.where(is_key[None, :], scores * score_scale, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        weights = to_bfloat16(weights * SHARE_SCALE)
        sums = ()
        for i in tl.static_range(OWN):
            sums = sums + (dot(weights, keys[i], weighted[i] * shrink[:, None]),)
        weighted = sums
        highest = higher

    if IS_WINDOW:
        # The sink's own share counts once.
        total += tl.exp2(sink - highest)
    number = (row * PARTS + part) * num_heads + head
    for i in tl.static_range(OWN):
        own_column = (base + i * COLUMNS + column)[None, :]
        if PARTS == 1:
            result = to_bfloat16(weighted[i] / total[:, None])
            tl.store(out + number[:, None] * D + own_column, result, mask=is_head[:, None])
        else:
            tl.store(partial + number[:, None] * D + own_column, weighted[i], mask=is_head[:, None])
    if PARTS > 1:
        number = ((row * PARTS + part) * SHARES + share) * num_heads + head
        tl.store(totals + number, total, mask=is_head)
        tl.store(highests + number, highest, mask=is_head)


@triton.jit
def _attend(
    out,
    partial,
    totals,
    highests,
    q,
    window_pages,
    window_table,
    pages,
    table,
    request,
    window_start,
    window_end,
    indices,
    sinks,
    scale,
    q_row_stride,
    q_head_stride,
    q_stride,
    window_page_stride,
    window_entry_stride,
    window_byte_stride,
    window_table_row_stride,
    window_table_stride,
    page_stride,
    entry_stride,
    byte_stride,
    table_row_stride,
    table_stride,
    index_row_stride,
    index_stride,
    num_heads,
    num_indices,
    WHICH: tl.constexpr,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    WINDOW_PAGE_SIZE: tl.constexpr,
    WINDOW_GROUP: tl.constexpr,
    WINDOW_ALIGN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """One part of one row: of its indices, which take longer and start first, or its window.

    What is kept of a part: keys times shares, float32 ``[n, PARTS, num_heads, D]``, times ``SMALLER``; and for each
    of ``SHARES`` the sum of the shares and the exponent whose share is 1.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    if WHICH == WINDOW:
        part = PARTS - 1
    if WHICH != WINDOW and PARTS > 1:
        if part < PARTS - 1:
            _attend_part(
                out,
                partial,
                totals,
                highests,
                q,
                pages,
                table,
                request,
                window_start,
                window_end,
                indices,
                sinks,
                scale,
                q_row_stride,
                q_head_stride,
                q_stride,
                page_stride,
                entry_stride,
                byte_stride,
                table_row_stride,
                table_stride,
                index_row_stride,
                index_stride,
                num_heads,
                num_indices,
                row,
                part,
                PARTS,
                SHARES,
                D,
                COLUMNS,
                KEYS,
                HEADS,
                PAGE_SIZE,
                GROUP,
                ALIGN,
            )
            return
    if WHICH != INDICES:
        _attend_part(
            out,
            partial,
            totals,
            highests,
            q,
            window_pages,
            window_table,
            request,
            window_start,
            window_end,
            None,
            sinks,
            scale,
            q_row_stride,
            q_head_stride,
            q_stride,
            window_page_stride,
            window_entry_stride,
            window_byte_stride,
            window_table_row_stride,
            window_table_stride,
            0,
            0,
            num_heads,
            0,
            row,
            part,
            PARTS,
            SHARES,
            D,
            COLUMNS,
            KEYS,
            HEADS,
            WINDOW_PAGE_SIZE,
            WINDOW_GROUP,
            WINDOW_ALIGN,
        )


@triton.jit
def _add_parts(
    out,
    partial,
    totals,
    highests,
    num_heads,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    D: tl.constexpr,
):
    """The parts of one head of one row, added in their order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    share = tl.arange(0, SHARES)
    column = share[:, None] * (D // SHARES) + tl.arange(0, D // SHARES)[None, :]
    first = (row * PARTS * SHARES + share) * num_heads + head
    highest = tl.load(highests + first)
    for part in tl.static_range(1, PARTS):
        highest = tl.maximum(highest, tl.load(highests + first + part * SHARES * num_heads))
    total = tl.zeros((SHARES,), tl.float32)
    weighted = tl.zeros((SHARES, D // SHARES), tl.float32)
    for part in tl.static_range(PARTS):
        number = first + part * SHARES * num_heads
        grow = tl.exp2(tl.load(highests + number) - highest)
        total += tl.load(totals + number) * grow
        number = (row * PARTS + part) * num_heads + head
        weighted += tl.load(partial + number * D + column) * grow[:, None]
    result = weighted / total[:, None] / SMALLER
    tl.store(out + (row * num_heads + head) * D + column, to_bfloat16(result))
