"""``index_select`` in tiles of fixed shape: ``ROWS`` rows by ``KEYS`` entries.

The workspace is that of a bounded number of scores, or of ``ROWS`` rows if they have more, whatever the batch is.
"""

import torch
import torch.nn.functional as F

from deepinfer_plugins.kernels.formats import decode_index_key, decode_mxfp4, encode_mxfp4
from deepinfer_plugins.kernels.records import read_entries
from deepinfer_plugins.kernels.row_blocks import pad_rows

ROWS = 8
KEYS = 256

# Scores, and rows, that are sorted at once.
SCORES_AT_ONCE = 1 << 18
ROWS_AT_ONCE = 32

_NO_ENTRY = torch.iinfo(torch.int32).max


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
    """As the reference. Neighbours of one request share its decoded keys; with candidates, each row decodes its own."""
    if candidates is not None and publish_blocks:
        raise ValueError(
            f"publish_blocks is {publish_blocks} and candidates are given: a layer publishes or uses, not both"
        )
    n = q.shape[0]
    indices = torch.empty(n, topk, dtype=torch.int32, device=q.device)
    blocks = torch.empty(n, publish_blocks, dtype=torch.int32, device=q.device)
    queries = pad_rows(decode_mxfp4(*encode_mxfp4(q)), ROWS)
    weights = pad_rows(head_weights.double(), ROWS)[:, None]
    # The host looks at the device once. With candidates it need not: their number is known.
    owners, visible = torch.stack([request, lengths]).tolist() if candidates is None else ([], [])
    longest = max(visible, default=0) if candidates is None else candidates.shape[1] * block_size
    at_once = min(SCORES_AT_ONCE // max(longest, 1), ROWS_AT_ONCE) // ROWS * ROWS or ROWS
    for first in range(0, n, at_once):
        rows = slice(first, min(first + at_once, n))
        length, owner = lengths[rows, None], request[rows, None]
        if candidates is None:
            entries = torch.arange(max(visible[rows]), device=q.device)[None]
            wanted = valid = entries < length
            if len(set(owners[rows])) == 1:
                owner, wanted = owner[:1], torch.ones_like(entries, dtype=torch.bool)
        else:
            starts = candidates[rows, :, None].long() * block_size
            entries = (starts + torch.arange(block_size, device=q.device)).flatten(1)
            wanted = valid = (entries >= 0) & (entries < length)
        padded = slice(first, first + at_once)
        scores = _scores(queries[padded], weights[padded], pages, table, owner, entries, wanted)[
            : len(length)
        ]
        indices[rows] = _best(scores, valid, entries, topk)
        if publish_blocks:
            blocks[rows] = _best_blocks(scores, valid, length, publish_blocks, block_size)
    return indices, blocks


def _scores(
    queries: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    owner: torch.Tensor,
    entries: torch.Tensor,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """Scores of entries.

    Args:
        queries: ``[n, num_heads, d]``, float64, ``n`` a multiple of ``ROWS``.
        weights: ``[n, 1, num_heads]``, float64.
        pages: See the reference.
        table: See the reference.
        owner: ``[m, 1]``, int64, ``m`` 1 if all rows share the keys and else at most ``n``.
        entries: ``[1 or m, num_entries]``, int64.
        wanted: ``[m, num_entries]``, bool; the others are not read.

    Returns:
        ``[n, num_entries]``, bfloat16.
    """
    num_rows, _, d = queries.shape
    scores = torch.empty(num_rows, entries.shape[1], dtype=torch.bfloat16, device=queries.device)
    entries = entries.expand_as(wanted)
    blocks = list(zip(queries.split(ROWS), weights.split(ROWS)))
    for tile, tile_wanted, result in zip(*(part.split(KEYS, 1) for part in (entries, wanted, scores))):
        keys = decode_index_key(read_entries(pages, table, owner, tile, tile_wanted), d)
        count, width = tile.shape
        missing_rows = 0 if count == 1 else num_rows - count
        if missing_rows or width < KEYS:
            keys = F.pad(keys, (0, 0, 0, KEYS - width, 0, missing_rows))
        keys_of_blocks = [keys.mT.expand(ROWS, -1, -1)] * len(blocks) if count == 1 else keys.mT.split(ROWS)
        for (query, weight), key, part in zip(blocks, keys_of_blocks, result.split(ROWS)):
            # Adding zero turns -0 into 0: some sorts tell them apart.
            part.copy_(torch.bmm(weight, torch.bmm(query, key).relu_())[:, 0, :width] + 0.0)
    return scores


def _best(scores: torch.Tensor, valid: torch.Tensor, names: torch.Tensor, count: int) -> torch.Tensor:
    """Names, ascending, of the ``count`` valid columns of each row that score best; -1 where there are too few."""
    names = names.expand_as(scores)
    scores = scores.masked_fill(~valid, -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    found = names.gather(1, order).masked_fill(~valid.gather(1, order), _NO_ENTRY).sort(-1).values
    found = found.masked_fill(found == _NO_ENTRY, -1)
    return F.pad(found, (0, count - found.shape[1]), value=-1).int()


def _best_blocks(
    scores: torch.Tensor, valid: torch.Tensor, length: torch.Tensor, count: int, block_size: int
) -> torch.Tensor:
    """Blocks, ascending, of the ``count`` of each row that hold the best valid entries; the newest always."""
    padding = (0, -scores.shape[1] % block_size)
    padded = F.pad(scores.masked_fill(~valid, -torch.inf), padding, value=-torch.inf)
    best = padded.view(len(padded), padded.shape[1] // block_size, block_size).amax(-1)
    names = torch.arange(best.shape[1], device=scores.device)[None]
    best = best.masked_fill((names == (length - 1) // block_size) & (length > 0), torch.inf)
    return _best(best, names * block_size < length, names, count)
