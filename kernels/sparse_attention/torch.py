"""``sparse_attention`` with products of fixed shape: ``ROWS`` rows by ``KEYS`` keys.

The workspace is that of ``ROWS_AT_ONCE`` rows, whatever the batch is: their keys and scores in float64.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from deepinfer_plugins.kernels.formats import decode_compressed, decode_window
from deepinfer_plugins.kernels.records import read_entries
from deepinfer_plugins.kernels.row_blocks import pad_rows, sum_last

ROWS = 8
KEYS = 64
ROWS_AT_ONCE = 32


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
    """As the reference. A row's sums run over its window and then over its indices, tile by tile; a tile in which it
    has no key adds exact zeros, so how many tiles its neighbours need has no influence."""
    n, _, d = q.shape
    out = torch.empty_like(q)
    sinks = sinks.double()[:, None]
    if compressed_pages is None or compressed_table is None:
        indices = None
    elif indices is not None:
        indices = F.pad(indices.long(), (0, _whole_tiles(indices.shape[1]) - indices.shape[1]), value=-1)
    # The host looks at the device once.
    bounds = [request, window_start, window_end]
    owners, starts, ends, *last_chosen = torch.stack(
        bounds if indices is None or not indices.shape[1] else [*bounds, indices.amax(1)]
    ).tolist()
    for first in range(0, n, ROWS_AT_ONCE):
        rows = slice(first, min(first + ROWS_AT_ONCE, n))
        owner, start, end = request[rows, None], window_start[rows, None], window_end[rows, None]
        shared = len(set(owners[rows])) == 1
        width = max(end - start for start, end in zip(starts[rows], ends[rows])) + 1
        entries = start + torch.arange(_whole_tiles(max(width, 0)), device=q.device)
        valid = (entries >= 0) & (entries <= end)
        span = (max(min(starts[rows]), 0), max(ends[rows]) + 1) if shared else None
        keys = [_read(window_pages, window_table, owner, entries, valid, span, decode_window, d)]
        if compressed_pages is not None and compressed_table is not None and indices is not None:
            chosen = indices[rows]
            valid_chosen = chosen >= 0
            span = (0, max(last_chosen[0][rows]) + 1) if shared and last_chosen else None
            keys.append(
                _read(
                    compressed_pages,
                    compressed_table,
                    owner,
                    chosen,
                    valid_chosen,
                    span,
                    decode_compressed,
                    d,
                )
            )
            valid = torch.cat([valid, valid_chosen], 1)
        out[rows] = _attend(q[rows].double(), keys, valid, sinks, scale)
    return out


def _whole_tiles(num_keys: int) -> int:
    return -(-num_keys // KEYS) * KEYS


def _read(
    pages: torch.Tensor,
    table: torch.Tensor,
    owner: torch.Tensor,
    entries: torch.Tensor,
    valid: torch.Tensor,
    span: tuple[int, int] | None,
    decode: Callable[[torch.Tensor, int], torch.Tensor],
    d: int,
) -> torch.Tensor:
    """Keys ``[n, num_entries, d]``, float64; zeros where ``valid`` is false.

    Args:
        pages: Of the cache.
        table: Of the cache.
        owner: ``[n, 1]``, int64.
        entries: ``[n, num_entries]``, int64.
        valid: Same shape, bool.
        span: First of all valid entries, and one past their last, if all rows are of one request. Each entry is then
            decoded once for all rows, unless the rows have fewer than the span.
        decode: Gives keys of records.
        d: Width of a key.
    """
    if span is None or span[1] - span[0] >= entries.numel():
        return decode(read_entries(pages, table, owner, entries, valid), d)
    first, last = span
    count = max(last - first, 0)
    # The key after the last is zero.
    place = torch.where(valid, entries - first, count).flatten()
    used = torch.zeros(count + 1, dtype=torch.bool, device=entries.device).index_fill_(0, place, True)
    every = torch.arange(first, first + count, device=entries.device)
    keys = decode(read_entries(pages, table, owner[0], every, used[:count]), d)
    return F.pad(keys, (0, 0, 0, 1)).index_select(0, place).view(*entries.shape, d)


def _attend(
    q: torch.Tensor, keys: list[torch.Tensor], valid: torch.Tensor, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of ``q [n, num_heads, d]`` to all of ``keys [n, num_keys, d]``, each ``num_keys`` in whole tiles."""
    if not valid.shape[1]:
        return torch.zeros_like(q)
    n = len(q)
    padded = _whole_blocks(q)
    tiles = [tile for part in keys if part.shape[1] for tile in _whole_blocks(part).split(KEYS, 1)]
    scores = torch.cat([_matmul(padded, tile.mT)[:n] for tile in tiles], -1).mul_(scale)
    scores.masked_fill_(~valid[:, None], -torch.inf)
    highest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    shares = scores.sub_(highest).exp_()
    total = (sinks - highest).exp_()
    totals = sum_last(shares.unflatten(-1, (len(tiles), KEYS)))
    weighted = torch.zeros_like(q)
    for place, (share, tile) in enumerate(zip(shares.split(KEYS, -1), tiles)):
        total += totals[..., place : place + 1]
        weighted += _matmul(_whole_blocks(share), tile)[:n]
    return weighted.div_(total)


def _whole_blocks(x: torch.Tensor) -> torch.Tensor:
    """``x [n, ...]`` in whole blocks of ``ROWS``; what is added is not to be used."""
    return x.expand(ROWS, -1, -1) if len(x) == 1 else pad_rows(x, ROWS)


def _matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x @ y``, by blocks of ``ROWS``."""
    if len(x) == ROWS:
        return torch.bmm(x, y)
    return torch.cat([torch.bmm(*block) for block in zip(x.split(ROWS), y.split(ROWS))])
