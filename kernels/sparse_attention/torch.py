"""``sparse_attention`` with products of fixed shape: ``ROWS`` rows by ``KEYS`` keys.

The workspace is that of ``ROWS_AT_ONCE`` rows, whatever the batch is: their keys and scores in float64.
"""

import torch
import torch.nn.functional as F

from deepinfer_plugins.kernels.formats import decode_compressed, decode_window
from deepinfer_plugins.kernels.records import read_entries
from deepinfer_plugins.kernels.row_blocks import pad_rows, sum_last

ROWS = 4
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
    sinks = sinks.double()
    for first in range(0, n, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        owner, start, end = request[rows, None], window_start[rows, None], window_end[rows, None]
        width = max(int((end - start).max()) + 1, 0)
        entries = start + torch.arange(_whole_tiles(width), device=q.device)
        valid = (entries >= 0) & (entries <= end)
        keys = decode_window(read_entries(window_pages, window_table, owner, entries, valid), d)
        if compressed_pages is not None and compressed_table is not None and indices is not None:
            missing = _whole_tiles(indices.shape[1]) - indices.shape[1]
            chosen = F.pad(indices[rows].long(), (0, missing), value=-1)
            records = read_entries(compressed_pages, compressed_table, owner, chosen, chosen >= 0)
            keys = torch.cat([keys, decode_compressed(records, d)], 1)
            valid = torch.cat([valid, chosen >= 0], 1)
        out[rows] = _attend(q[rows].double(), keys, valid, sinks, scale)
    return out


def _whole_tiles(num_keys: int) -> int:
    return -(-num_keys // KEYS) * KEYS


def _attend(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of ``q [n, num_heads, d]`` to ``keys [n, num_keys, d]``, ``num_keys`` in whole tiles."""
    if not keys.shape[1]:
        return torch.zeros_like(q)
    tiles = pad_rows(keys, ROWS).split(KEYS, 1)
    scores = torch.cat([_matmul(q, tile.mT) for tile in tiles], -1) * scale
    scores = scores.masked_fill(~valid[:, None], -torch.inf)
    sinks = sinks[:, None]
    highest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    shares = (scores - highest).exp()
    total = (sinks - highest).exp()
    weighted = torch.zeros_like(q)
    for share, tile in zip(shares.split(KEYS, -1), tiles):
        total += sum_last(share)[..., None]
        weighted += _matmul(share, tile)
    return weighted / total


def _matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x @ y``, by blocks of ``ROWS``, of ``x [n, ...]`` and a ``y`` that has whole blocks of rows."""
    blocks = [torch.bmm(*block) for block in zip(pad_rows(x, ROWS).split(ROWS), y.split(ROWS))]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[: x.shape[0]]
