"""``index_select`` without a look from the host: scores of a row's places, then the best of them.

A place is an entry, or an entry of a candidate block. Its score becomes a key of 16 bits whose order is that of the
scores, with 0 for what may not be chosen. A program that selects finds the greatest ``t`` that at least ``topk`` keys
reach, two bits at a time, and keeps what lies above and as many of those that equal ``t``, from the first on, as are
lacking. Numbers of keys are whole, so nothing depends on how places are spread over programs.

Both sides of a product are e2m1 numbers times powers of two. Relative to the greatest power of their vector they are
exact in float16 while it is within ``2^23`` of the others, and a head's sum is exact in float32 while those of both
vectors lie within ``2^9`` together. Heads are added in float64. Workspace: keys, at most ``KEYS_AT_ONCE`` or
those of one row.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.cache_layout import INDEX_GROUP
from deepinfer_plugins.kernels.triton_formats import (
    decode_e2m1_pairs,
    decode_ue8m0,
    dot,
    magnitude_bits,
    reciprocal_ue8m0,
    round_to_e2m1,
    scale_of_e2m1,
    to_bfloat16,
)
from deepinfer_plugins.kernels.triton_records import alignment, entry_records

# Places that are scored, and keys that are looked at, in one step.
PLACES = 128
KEYS = 8192
# Keys that are kept at a time: 128 MiB.
KEYS_AT_ONCE = 1 << 26
# Programs that score, if there are as many tiles.
PROGRAMS = 1056


def index_select(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    request: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    candidates: torch.Tensor | None,
    publish_blocks: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference.

    Raises:
        ValueError: If asked both to use candidates and to publish some, or if ``d`` is not a power of two from 32 on.
    """
    if candidates is not None and publish_blocks:
        raise ValueError(
            f"publish_blocks is {publish_blocks} and candidates are given: a layer publishes or uses, not both"
        )
    n, num_heads, d = q.shape
    if d < INDEX_GROUP or d & (d - 1):
        raise ValueError(f"the width of a key is {d}; the triton provider computes powers of two from 32 on")
    indices = torch.empty(n, topk, dtype=torch.int32, device=q.device)
    blocks = torch.empty(n, publish_blocks, dtype=torch.int32, device=q.device)
    q, head_weights, request, lengths = (part.contiguous() for part in (q, head_weights, request, lengths))
    if candidates is None:
        num_places = table.shape[1] * pages.shape[1]
    else:
        candidates = candidates.contiguous()
        num_places = candidates.shape[1] * block_size
    at_once = min(n, max(KEYS_AT_ONCE // max(num_places, 1), 1))
    keys = torch.empty(at_once, num_places, dtype=torch.int16, device=q.device)
    num_blocks = triton.cdiv(num_places, block_size)
    block_keys = torch.empty(at_once if publish_blocks else 0, num_blocks, dtype=torch.int16, device=q.device)
    num_tiles = triton.cdiv(num_places, PLACES)
    for first in range(0, n, at_once or 1):
        rows = slice(first, min(first + at_once, n))
        num_rows = rows.stop - first
        chosen_from = None if candidates is None else candidates[rows]
        if num_tiles:
            _score[(num_rows, min(num_tiles, triton.cdiv(PROGRAMS, num_rows)))](
                keys,
                q[rows],
                head_weights[rows],
                pages,
                table,
                request[rows],
                lengths[rows],
                chosen_from,
                num_places,
                block_size,
                *pages.stride(),
                *table.stride(),
                PAGE_SIZE=pages.shape[1],
                NUM_HEADS=num_heads,
                HEADS=max(triton.next_power_of_2(num_heads), 16),
                D=d,
                GROUP=INDEX_GROUP,
                PLACES=PLACES,
                ALIGN=alignment(pages),
                num_warps=4,
                num_stages=3,
            )
        _select[(num_rows,)](
            indices[rows],
            keys,
            lengths[rows],
            chosen_from,
            num_places,
            block_size,
            topk,
            1,
            KEYS=KEYS,
            num_warps=16,
        )
        if publish_blocks:
            if num_blocks:
                _score_blocks[(num_rows, min(triton.cdiv(num_blocks, PLACES), 16))](
                    block_keys,
                    keys,
                    lengths[rows],
                    num_places,
                    num_blocks,
                    block_size,
                    BLOCKS=PLACES,
                    ENTRIES=triton.next_power_of_2(block_size),
                    num_warps=4,
                )
            _select[(num_rows,)](
                blocks[rows],
                block_keys,
                lengths[rows],
                None,
                num_blocks,
                1,
                publish_blocks,
                block_size,
                KEYS=KEYS,
                num_warps=16,
            )
    return indices, blocks


@triton.jit
def _entries(candidates, place, valid, block_size):
    """Entries, int32, of places, and which of them there are."""
    if candidates is None:
        return place, valid
    else:
        block = tl.load(candidates + place // block_size, mask=valid, other=-1).to(tl.int32)
        return block * block_size + place % block_size, valid & (block >= 0)


@triton.jit
def _factors(scales):
    """Powers of two, float32, of the UE8M0 scales ``[n, num_groups]`` over the greatest of a row; and that scale."""
    highest = tl.max(scales, axis=1)
    factors = tl.maximum(scales - highest[:, None], -126) + 127 << 23
    return factors.to(tl.float32, bitcast=True), highest


@triton.jit(do_not_specialize=["num_places"])
def _score(
    keys,
    q,
    head_weights,
    pages,
    table,
    request,
    lengths,
    candidates,
    num_places,
    block_size,
    page_stride,
    entry_stride,
    byte_stride,
    table_row_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Keys of some tiles of places of one row."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    table += tl.load(request + row) * table_row_stride
    keys += row * num_places
    if candidates is None:
        last = tl.minimum(length, num_places)
    else:
        last = num_places
        candidates += row * (num_places // block_size)

    # The query in e2m1, as the keys are; its even and its odd columns, as nibbles lie in bytes.
    head = tl.arange(0, HEADS)
    is_head = head < NUM_HEADS
    group = tl.arange(0, D // GROUP)
    column = group[:, None] * GROUP + 2 * tl.arange(0, GROUP // 2)[None, :]
    queries = q + (row * NUM_HEADS + head)[:, None, None] * D + column[None, :, :]
    even = tl.load(queries, mask=is_head[:, None, None], other=0.0).to(tl.float32)
    odd = tl.load(queries + 1, mask=is_head[:, None, None], other=0.0).to(tl.float32)
    amax_bits = tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd)), axis=2)
    query_scale = scale_of_e2m1(amax_bits)
    query_factor, query_highest = _factors(query_scale)
    reciprocal, query_factor = reciprocal_ue8m0(query_scale)[:, :, None], query_factor[:, :, None]
    even = (round_to_e2m1(even * reciprocal) * query_factor).to(tl.float16)
    odd = (round_to_e2m1(odd * reciprocal) * query_factor).to(tl.float16)
    even, odd = tl.trans(tl.reshape(even, (HEADS, D // 2))), tl.trans(tl.reshape(odd, (HEADS, D // 2)))
    weight = tl.load(head_weights + row * NUM_HEADS + head, mask=is_head, other=0.0).to(tl.float64)
    weight = weight * decode_ue8m0(query_highest).to(tl.float64)

    for start in range(tl.program_id(1) * PLACES, last, tl.num_programs(1) * PLACES):
        place = start + tl.arange(0, PLACES)
        entry, valid = _entries(candidates, place, place < last, block_size)
        valid = valid & (entry < length)
        record = entry_records(
            pages, table, table_stride, entry, valid, PAGE_SIZE, page_stride, entry_stride, ALIGN
        )
        # What is read where there is no entry is not used.
        pairs = tl.load(record + tl.arange(0, D // 2)[None, :] * byte_stride)
        scale = tl.load(record + (D // 2 + group)[None, :] * byte_stride)
        factor, highest = _factors(scale.to(tl.int32))
        factor = (factor * 64.0).to(tl.float16)[:, :, None]
        low, high = decode_e2m1_pairs(tl.reshape(pairs, (PLACES, D // GROUP, GROUP // 2)), factor)
        low, high = tl.reshape(low, (PLACES, D // 2)), tl.reshape(high, (PLACES, D // 2))
        products = dot(low, even, tl.zeros((PLACES, HEADS), tl.float32), "ieee")
        products = dot(high, odd, products, "ieee")
        score = tl.sum(tl.maximum(products, 0.0).to(tl.float64) * weight[None, :], axis=1)
        score = score * decode_ue8m0(highest).to(tl.float64)
        bits = to_bfloat16(score).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        # -0 equals 0. A negative number has its bits inverted, another one a bit above all of those.
        bits = tl.where(bits == 0x8000, 0, bits)
        order = tl.where(bits >= 0x8000, bits ^ 0xFFFF, bits | 0x8000)
        tl.store(keys + place, tl.where(valid, order, 0).to(tl.int16), mask=place < last)


@triton.jit(do_not_specialize=["num_places", "num_blocks"])
def _score_blocks(
    block_keys,
    keys,
    lengths,
    num_places,
    num_blocks,
    block_size,
    BLOCKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Keys of blocks: the greatest of their entries'; above all others for the newest one."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    last = tl.minimum(tl.cdiv(length, block_size), num_blocks)
    for start in range(tl.program_id(1) * BLOCKS, last, tl.num_programs(1) * BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        number = tl.arange(0, ENTRIES)[None, :]
        entry = block[:, None] * block_size + number
        valid = (number < block_size) & (entry < length)
        key = tl.load(keys + row * num_places + entry, mask=valid, other=0).to(tl.int32) & 0xFFFF
        best = tl.where(block == last - 1, 0xFFFF, tl.max(key, axis=1))
        tl.store(block_keys + row * num_blocks + block, best.to(tl.int16), mask=block < last)


@triton.jit(do_not_specialize=["num_places"])
def _select(
    chosen,
    keys,
    lengths,
    candidates,
    num_places,
    block_size,
    count,
    unit,
    KEYS: tl.constexpr,
):
    """Names, ascending, of the ``count`` greatest keys of a row, lower places first; then -1.

    Args:
        chosen: ``[n, count]``, int32.
        keys: ``[n, num_places]``, 16 bits.
        lengths: ``[n]``, int64.
        candidates: See the reference; names are entries of them, or places where it is None.
        num_places: Keys of a row.
        block_size: Entries of a candidate block.
        count: Names to choose.
        unit: Entries of a place; without candidates, a row of length ``l`` has ``ceil(l / unit)`` places.
        KEYS: Keys to look at in one step.
    """
    row = tl.program_id(0).to(tl.int64)
    keys += row * num_places
    chosen += row * count
    if candidates is None:
        last = tl.minimum(tl.cdiv(tl.load(lengths + row).to(tl.int32), unit), num_places)
    else:
        last = num_places
        candidates += row * (num_places // block_size)

    # The greatest threshold that as many keys as wanted reach; 0 if there are not as many.
    threshold = 0
    step = 1 << 14
    while step > 0:
        above_1 = tl.zeros((KEYS,), tl.int32)
        above_2 = tl.zeros((KEYS,), tl.int32)
        above_3 = tl.zeros((KEYS,), tl.int32)
        for start in range(0, last, KEYS):
            place = start + tl.arange(0, KEYS)
            key = tl.load(keys + place, mask=place < last, other=0).to(tl.int32) & 0xFFFF
            above_1 += (key >= threshold + step).to(tl.int32)
            above_2 += (key >= threshold + 2 * step).to(tl.int32)
            above_3 += (key >= threshold + 3 * step).to(tl.int32)
        threshold += step * (tl.sum(above_1, axis=0) >= count).to(tl.int32)
        threshold += step * (tl.sum(above_2, axis=0) >= count).to(tl.int32)
        threshold += step * (tl.sum(above_3, axis=0) >= count).to(tl.int32)
        step = step // 4
    above = tl.zeros((KEYS,), tl.int32)
    for start in range(0, last, KEYS):
        place = start + tl.arange(0, KEYS)
        key = tl.load(keys + place, mask=place < last, other=0).to(tl.int32) & 0xFFFF
        above += (key > threshold).to(tl.int32)
    lacking = count - tl.sum(above, axis=0)
    # What may not be chosen equals a threshold of 0.
    lacking = tl.where(threshold == 0, 0, lacking)

    num_above = 0
    num_equal = 0
    for start in range(0, last, KEYS):
        place = start + tl.arange(0, KEYS)
        key = tl.load(keys + place, mask=place < last, other=0).to(tl.int32) & 0xFFFF
        is_above, is_equal = (key > threshold).to(tl.int32), (key == threshold).to(tl.int32)
        # Both in one word: a step has fewer than 2^15 keys.
        so_far = tl.cumsum((is_above << 16) | is_equal, axis=0)
        above_before = num_above + (so_far >> 16) - is_above
        equal_before = num_equal + (so_far & 0xFFFF) - is_equal
        keep = (is_above > 0) | ((is_equal > 0) & (equal_before < lacking))
        name, _ = _entries(candidates, place, keep, block_size)
        tl.store(chosen + above_before + tl.minimum(equal_before, lacking), name, mask=keep)
        num_above += tl.sum(is_above, axis=0)
        num_equal += tl.sum(is_equal, axis=0)
    for start in range(0, count, KEYS):
        place = start + tl.arange(0, KEYS)
        is_free = (place >= num_above + tl.minimum(num_equal, lacking)) & (place < count)
        tl.store(chosen + place, tl.full((KEYS,), -1, tl.int32), mask=is_free)
