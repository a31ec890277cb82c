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
STAGES = 2
# Of the partial results that are kept at a time: 72 MiB, those of 192 rows of the release.
ELEMENTS_AT_ONCE = 9 << 21
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
    request, window_start, window_end, sinks = (
        part.contiguous() for part in (request, window_start, window_end, sinks)
    )
    out = torch.empty(n, num_heads, d, dtype=torch.bfloat16, device=q.device)
    has_indices = indices is not None and indices.shape[1] > 0
    parts = 1 + INDEX_PARTS if has_indices else 1
    partial = total = highest = out
    at_once = n
    if has_indices:
        at_once = min(n, max(ELEMENTS_AT_ONCE // (parts * num_heads * d), 1))
        partial = torch.empty(at_once, parts, num_heads, d, dtype=torch.float32, device=q.device)
        total, highest = (
            torch.empty(at_once, parts, num_heads, dtype=torch.float32, device=q.device) for _ in range(2)
        )

    def attend(
        rows: slice, pages: torch.Tensor, table: torch.Tensor, chosen: torch.Tensor | None, num_parts: int
    ) -> None:
        """Attend to one of the caches."""
        _attend[(rows.stop - rows.start, triton.cdiv(num_heads, HEADS), num_parts)](
            out[rows],
            partial,
            total,
            highest,
            q[rows],
            pages,
            table,
            request[rows],
            window_start[rows],
            window_end[rows],
            chosen,
            sinks,
            scale * LOG2_E,
            *q.stride(),
            *pages.stride(),
            *table.stride(),
            *((0, 0) if chosen is None else chosen.stride()),
            num_heads,
            0 if chosen is None else chosen.shape[1],
            PARTS=parts,
            D=d,
            KEYS=KEYS,
            HEADS=HEADS,
            PAGE_SIZE=pages.shape[1],
            GROUP=MXFP8_GROUP if chosen is None else FP4_GROUP,
            ALIGN=alignment(pages),
            num_warps=8,
            num_stages=STAGES,
        )

    for first in range(0, n, at_once or 1):
        rows = slice(first, min(first + at_once, n))
        attend(rows, window_pages, window_table, None, 1)
        if has_indices:
            attend(rows, compressed_pages, compressed_table, indices[rows], INDEX_PARTS)
            _add_parts[(rows.stop - first, num_heads)](
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
def _attend(
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
    PARTS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Attention of ``HEADS`` heads of one row to its window, or to a part of its indices if there are any.

    What is kept of a part: keys times shares, float32 ``[n, PARTS, num_heads, D]``; the sum of the shares; and the
    exponent whose share is 1.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, D)
    is_head = head < num_heads
    queries = q + row * q_row_stride + head[:, None] * q_head_stride + column[None, :] * q_stride
    query = tl.load(queries, mask=is_head[:, None], other=0.0)
    table += tl.load(request + row) * table_row_stride
    if indices is None:
        first = tl.maximum(tl.load(window_start + row), 0).to(tl.int32)
        end = tl.load(window_end + row).to(tl.int32) + 1
        last = end
    else:
        indices += row * index_row_stride
        num_tiles = tl.cdiv(num_indices, KEYS)
        first = num_tiles * part // (PARTS - 1) * KEYS
        last = num_tiles * (part + 1) // (PARTS - 1) * KEYS
        end = num_indices

    # Shares are powers of two. With the sink among the scores no maximum is minus infinity.
    sink = tl.load(sinks + head, mask=is_head, other=0.0) * 1.4426950408889634
    highest = tl.maximum(sink, -1e30)
    total = tl.zeros((HEADS,), tl.float32)
    weighted = tl.zeros((HEADS, D), tl.float32)
    for start in range(first, last, KEYS):
        entry = start + tl.arange(0, KEYS)
        valid = entry < end
        if indices is not None:
            entry = tl.load(indices + entry * index_stride, mask=valid, other=-1).to(tl.int32)
            valid = entry >= 0
        record = entry_records(
            pages, table, table_stride, entry, valid, PAGE_SIZE, page_stride, entry_stride, ALIGN
        )
        if indices is None:
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

    if indices is None:
        # The sink's own share counts once.
        total += tl.exp2(sink - highest)
    else:
        part += 1
    if PARTS == 1:
        place = out + (row * num_heads + head)[:, None] * D + column[None, :]
        tl.store(place, to_bfloat16(weighted / total[:, None]), mask=is_head[:, None])
    else:
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
