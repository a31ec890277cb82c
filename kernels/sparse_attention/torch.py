"""``sparse_attention`` in tiles of fixed shape: ``ROWS`` rows by ``KEYS`` keys.

The workspace is that of ``ROWS`` rows, whatever the batch is: their keys and scores in float64.
"""

import torch
import torch.nn.functional as F

from deepinfer_plugins.kernels.formats import decode_compressed, decode_window
from deepinfer_plugins.kernels.records import read_entries
from deepinfer_plugins.kernels.row_blocks import pad_rows

ROWS = 4
KEYS = 64


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
    # Rows added to fill the last block have an empty window and no index.
    q, request, window_start = (pad_rows(part, ROWS) for part in (q, request, window_start))
    window_end = pad_rows(window_end, ROWS, -1)
    for first in range(0, n, ROWS):
        rows = slice(first, first + ROWS)
        owner, start, end = request[rows, None], window_start[rows, None], window_end[rows, None]
        width = max(int((end - start).max()) + 1, 0)
        entries = start + torch.arange(_whole_tiles(width), device=q.device)
        valid = (entries >= 0) & (entries <= end)
        keys = [decode_window(read_entries(window_pages, window_table, owner, entries, valid), d)]
        if compressed_pages is not None and compressed_table is not None and indices is not None:
            chosen = pad_rows(indices[rows], ROWS, -1).long()
            chosen = F.pad(chosen, (0, _whole_tiles(chosen.shape[1]) - chosen.shape[1]), value=-1)
            records = read_entries(compressed_pages, compressed_table, owner, chosen, chosen >= 0)
            keys.append(decode_compressed(records, d))
            valid = torch.cat([valid, chosen >= 0], 1)
        tiles = [tile for part in keys if part.shape[1] for tile in part.split(KEYS, 1)]
        out[rows] = _attend(q[rows].double(), tiles, valid, sinks.double(), scale)[: n - first]
    return out


def _whole_tiles(num_keys: int) -> int:
    return -(-num_keys // KEYS) * KEYS


def _attend(
    q: torch.Tensor, tiles: list[torch.Tensor], valid: torch.Tensor, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of ``q [ROWS, num_heads, d]`` to ``tiles`` of ``[ROWS, KEYS, d]`` keys."""
    weighted = torch.zeros_like(q)
    if not tiles:
        return weighted
    scores = torch.cat([q @ tile.mT for tile in tiles], -1) * scale
    scores = scores.masked_fill(~valid[:, None], -torch.inf)
    sinks = sinks[:, None]
    highest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    total = (sinks - highest).exp()
    for share, tile in zip((scores - highest).exp().split(KEYS, -1), tiles):
        total = total + share.sum(-1, keepdim=True)
        weighted += share @ tile
    return weighted / total
