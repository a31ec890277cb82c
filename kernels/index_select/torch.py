"""``index_select`` in tiles of fixed shape: ``ROWS`` rows by ``KEYS`` entries.

The workspace is that of ``ROWS`` rows, whatever the batch is: their scores in bfloat16, and the sorting of them.
"""

import torch
import torch.nn.functional as F

from deepinfer_plugins.kernels.formats import decode_index_key, decode_mxfp4, encode_mxfp4
from deepinfer_plugins.kernels.records import read_entries
from deepinfer_plugins.kernels.row_blocks import pad_rows

ROWS = 8
KEYS = 256

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
    """As the reference. Rows of a request share its decoded keys; with candidates, each row decodes its own."""
    if candidates is not None and publish_blocks:
        raise ValueError(
            f"publish_blocks is {publish_blocks} and candidates are given: a layer publishes or uses, not both"
        )
    n = q.shape[0]
    indices = torch.empty(n, topk, dtype=torch.int32, device=q.device)
    blocks = torch.empty(n, publish_blocks, dtype=torch.int32, device=q.device)
    queries = decode_mxfp4(*encode_mxfp4(q))
    weights = head_weights.double()
    for rows in _row_blocks(request, same_request=candidates is None):
        length = pad_rows(lengths[rows], ROWS)[:, None]
        if candidates is None:
            entries = torch.arange(int(length.max()), device=q.device)[None]
            wanted = torch.ones_like(entries, dtype=torch.bool)
            owner = request[rows[:1], None]
        else:
            chosen = pad_rows(candidates[rows], ROWS, -1).long()[:, :, None]
            entries = (chosen * block_size + torch.arange(block_size, device=q.device)).flatten(1)
            wanted = (entries >= 0) & (entries < length)
            owner = pad_rows(request[rows], ROWS)[:, None]
        scores = _scores(
            pad_rows(queries[rows], ROWS), pad_rows(weights[rows], ROWS), pages, table, owner, entries, wanted
        )
        valid = wanted & (entries < length)
        indices[rows] = _best(scores, valid, entries, topk)[: len(rows)]
        if publish_blocks:
            blocks[rows] = _best_blocks(scores, valid, length, publish_blocks, block_size)[: len(rows)]
    return indices, blocks


def _row_blocks(request: torch.Tensor, same_request: bool) -> list[torch.Tensor]:
    """Indices of rows, at most ``ROWS`` at a time; of one request at a time if asked so."""
    if same_request:
        groups = [(request == one).nonzero().squeeze(1) for one in request.unique()]
    else:
        groups = [torch.arange(len(request), device=request.device)]
    return [rows for group in groups for rows in group.split(ROWS) if len(rows)]


def _scores(
    queries: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    owner: torch.Tensor,
    entries: torch.Tensor,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """Scores ``[ROWS, num_entries]``, bfloat16, of ``entries [1 or ROWS, num_entries]``; 0 where not wanted."""
    num_rows, num_heads, d = queries.shape
    scores = torch.empty(num_rows, entries.shape[1], dtype=torch.bfloat16, device=queries.device)
    for tile, tile_wanted, result in zip(*(part.split(KEYS, 1) for part in (entries, wanted, scores))):
        keys = decode_index_key(read_entries(pages, table, owner, tile, tile_wanted), d)
        keys = F.pad(keys, (0, 0, 0, KEYS - tile.shape[1]))
        if len(keys) == 1:
            products = (queries.flatten(0, 1) @ keys[0].T).view(num_rows, num_heads, KEYS)
        else:
            products = queries @ keys.mT
        # Adding zero turns -0 into 0: some sorts tell them apart.
        weighted = (weights[:, None] @ products.relu_()).squeeze(1) + 0.0
        result.copy_(weighted[:, : tile.shape[1]])
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
