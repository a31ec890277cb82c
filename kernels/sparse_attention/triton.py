"""``sparse_attention`` in tiles of ``KEYS`` keys, each read and decoded once for all heads of a row.

A row's list is its window and then its indices. It is cut into tiles from its beginning, and the tiles into
``num_splits`` equal parts; a part keeps a running maximum, as the sink's share does from the first, and the parts are
added in their order. All of that follows from the row's window and the number of indices, so a prompt's chunk and a
decode step get the same bits from the same kernel. A tile has ``HEADS`` heads, however many there are.

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
    e2m1_as_e4m3,
    to_bfloat16,
)
from deepinfer_plugins.kernels.triton_records import entry_offset

KEYS = 64
HEADS = 64
# Of the partial results that are kept at a time: 64 MiB.
ELEMENTS_AT_ONCE = 1 << 24
# Indices from which on a row's list is cut in two, so that a decode step of 64 rows fills a chip.
LONG_LIST = 256

LOG2_E = math.log2(math.e)


def num_splits(num_indices: int) -> int:
    """Parts into which the list of a row is cut."""
    return 2 if num_indices >= LONG_LIST else 1


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
    num_indices = indices.shape[1]
    splits = num_splits(num_indices)
    out = torch.empty(n, num_heads, d, dtype=torch.bfloat16, device=q.device)
    at_once = min(n, max(ELEMENTS_AT_ONCE // (splits * num_heads * d), 1)) if splits > 1 else n
    partial = total = highest = out
    if splits > 1:
        partial = torch.empty(at_once, splits, num_heads, d, dtype=torch.float32, device=q.device)
        total, highest = (
            torch.empty(at_once, splits, num_heads, dtype=torch.float32, device=q.device) for _ in range(2)
        )
    for first in range(0, n, at_once or 1):
        rows = slice(first, min(first + at_once, n))
        num_rows = rows.stop - first
        _attend[(num_rows, triton.cdiv(num_heads, HEADS), splits)](
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
            NUM_INDICES=num_indices,
            SPLITS=splits,
            D=d,
            KEYS=KEYS,
            HEADS=HEADS,
            MXFP8_GROUP=MXFP8_GROUP,
            FP4_GROUP=FP4_GROUP,
            num_warps=8,
            num_stages=2,
        )
        if splits > 1:
            _add_parts[(num_rows, num_heads)](
                out[rows], partial, total, highest, num_heads, SPLITS=splits, D=d, num_warps=4
            )
    return out


@triton.jit
def _window_keys(pages, offset, valid, byte_stride, D: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr):
    """Keys ``[KEYS, D]``, bfloat16, of window records; zeros where ``valid`` is false."""
    record = pages + offset[:, None]
    code = tl.load(record + tl.arange(0, D)[None, :] * byte_stride, mask=valid[:, None], other=0)
    place = record + (D + tl.arange(0, D // GROUP))[None, :] * byte_stride
    factor = decode_ue8m0(tl.load(place, mask=valid[:, None], other=127))
    value = tl.reshape(decode_e4m3(code), (KEYS, D // GROUP, GROUP)) * factor[:, :, None]
    return tl.reshape(to_bfloat16(value), (KEYS, D))


@triton.jit
def _compressed_keys(
    pages, offset, valid, byte_stride, D: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr
):
    """Keys ``[KEYS, D]``, bfloat16, of compressed records; zeros where ``valid`` is false."""
    record = pages + offset[:, None]
    pair = tl.load(record + tl.arange(0, D // 2)[None, :] * byte_stride, mask=valid[:, None], other=0)
    place = record + (D // 2 + tl.arange(0, D // GROUP))[None, :] * byte_stride
    factor = decode_e4m3(tl.load(place, mask=valid[:, None], other=0)) * 64.0
    code = tl.interleave(e2m1_as_e4m3(pair & 15), e2m1_as_e4m3(pair >> 4))
    value = tl.reshape(decode_e4m3(code), (KEYS, D // GROUP, GROUP)) * factor[:, :, None]
    return tl.reshape(to_bfloat16(value), (KEYS, D))


@triton.jit
def _add_keys(query, keys, valid, scale, weighted, total, highest, HEADS: tl.constexpr, KEYS: tl.constexpr):
    """The running results with one more tile of keys."""
    scores = dot(query, tl.trans(keys), tl.zeros((HEADS, KEYS), tl.float32), "ieee") * scale
    scores = tl.where(valid[None, :], scores, -float("inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    shrink = tl.exp2(highest - higher)
    share = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(share, axis=1)
    weighted = dot(to_bfloat16(share), keys, weighted * shrink[:, None], "ieee")
    return weighted, total, higher


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
    NUM_INDICES: tl.constexpr,
    SPLITS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    MXFP8_GROUP: tl.constexpr,
    FP4_GROUP: tl.constexpr,
):
    """One part of the list of one row, for ``HEADS`` heads."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, D)
    is_head = head < num_heads
    owner = tl.load(request + row)
    start = tl.maximum(tl.load(window_start + row), 0).to(tl.int32)
    end = tl.load(window_end + row).to(tl.int32)
    place = q + row * q_row_stride + head[:, None] * q_head_stride + column[None, :] * q_stride
    query = tl.load(place, mask=is_head[:, None], other=0.0)

    # Shares are powers of two of what is above the highest score. A sink is a score without a key, and so no maximum is
    # ever minus infinity; its own share counts once.
    sink = tl.load(sinks + head, mask=is_head, other=0.0) * 1.4426950408889634
    highest = tl.maximum(sink, -1e30)
    total = tl.where(split == 0, tl.exp2(sink - highest), 0.0)
    weighted = tl.zeros((HEADS, D), tl.float32)

    window_tiles = tl.cdiv(tl.maximum(end + 1 - start, 0), KEYS)
    index_tiles: tl.constexpr = (NUM_INDICES + KEYS - 1) // KEYS
    first_tile = (window_tiles + index_tiles) * split // SPLITS
    last_tile = (window_tiles + index_tiles) * (split + 1) // SPLITS
    window_table += owner * window_table_row_stride
    for tile in range(first_tile, tl.minimum(last_tile, window_tiles)):
        entry = start + tile * KEYS + tl.arange(0, KEYS)
        valid = entry <= end
        offset = entry_offset(
            window_table,
            window_table_stride,
            entry,
            valid,
            window_page_size,
            window_page_stride,
            window_entry_stride,
        )
        keys = _window_keys(window_pages, offset, valid, window_byte_stride, D, KEYS, MXFP8_GROUP)
        weighted, total, highest = _add_keys(query, keys, valid, scale, weighted, total, highest, HEADS, KEYS)
    if NUM_INDICES > 0:
        compressed_table += owner * compressed_table_row_stride
        indices += row * index_row_stride
        for tile in range(tl.maximum(first_tile, window_tiles) - window_tiles, last_tile - window_tiles):
            number = tile * KEYS + tl.arange(0, KEYS)
            entry = tl.load(indices + number * index_stride, mask=number < NUM_INDICES, other=-1).to(tl.int32)
            valid = entry >= 0
            offset = entry_offset(
                compressed_table,
                compressed_table_stride,
                entry,
                valid,
                compressed_page_size,
                compressed_page_stride,
                compressed_entry_stride,
            )
            keys = _compressed_keys(
                compressed_pages, offset, valid, compressed_byte_stride, D, KEYS, FP4_GROUP
            )
            weighted, total, highest = _add_keys(
                query, keys, valid, scale, weighted, total, highest, HEADS, KEYS
            )

    if SPLITS == 1:
        place = out + (row * num_heads + head)[:, None] * D + column[None, :]
        tl.store(place, to_bfloat16(weighted / total[:, None]), mask=is_head[:, None])
    else:
        part = (row * SPLITS + split) * num_heads + head
        tl.store(partial + part[:, None] * D + column[None, :], weighted, mask=is_head[:, None])
        tl.store(totals + part, total, mask=is_head)
        tl.store(highests + part, highest, mask=is_head)


@triton.jit
def _add_parts(out, partial, totals, highests, num_heads, SPLITS: tl.constexpr, D: tl.constexpr):
    """The parts of one head of one row, added in their order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, D)
    first = row * SPLITS * num_heads + head
    highest = tl.load(highests + first)
    for split in tl.static_range(1, SPLITS):
        highest = tl.maximum(highest, tl.load(highests + first + split * num_heads))
    total = 0.0
    weighted = tl.zeros((D,), tl.float32)
    for split in tl.static_range(SPLITS):
        part = first + split * num_heads
        grow = tl.exp2(tl.load(highests + part) - highest)
        total += tl.load(totals + part) * grow
        weighted += tl.load(partial + part * D + column) * grow
    tl.store(out + (row * num_heads + head) * D + column, to_bfloat16(weighted / total))
