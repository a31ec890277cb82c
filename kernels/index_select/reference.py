"""The definition of ``index_select``."""

import torch

from deepinfer_plugins.kernels.formats import decode_index_key, decode_mxfp4, encode_mxfp4
from deepinfer_plugins.kernels.records import read_entries


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
    """Choose the entries that score best: ``sum_h head_weights[h] * relu(q[h] . key)``, rounded to bfloat16.

    Args:
        q: ``[n, num_heads, d]``, bfloat16; quantised to MXFP4 here, as the keys were.
        head_weights: ``[n, num_heads]``, bfloat16.
        pages: ``[num_pages, page_size, index_key_bytes(d)]``, uint8, any strides.
        table: ``[num_requests, max_pages]``, int32 or int64.
        request: ``[n]``, int64, row of ``table``.
        lengths: ``[n]``, int64; the row may choose entries ``0 .. lengths - 1``.
        topk: Entries to choose.
        candidates: ``[n, c]``, int32, ascending block ids, -1 at the end; only their entries compete. None for all.
        publish_blocks: Blocks to choose for others to use as candidates; 0 for none.
        block_size: Entries of a block.

    Returns:
        indices: ``[n, topk]``, int32, ascending, -1 at the end. Ties: the lower entry wins.
        blocks: ``[n, publish_blocks]``, int32, ascending, -1 at the end. The newest block that has a valid entry,
            then those of the highest score (the best of the block's valid entries). Ties: the lower block wins.

    Raises:
        ValueError: If asked both to use candidates and to publish some.
    """
    if candidates is not None and publish_blocks:
        raise ValueError(
            f"publish_blocks is {publish_blocks} and candidates are given: a layer publishes or uses, not both"
        )
    n, _, d = q.shape
    indices = torch.full((n, topk), -1, dtype=torch.int32, device=q.device)
    blocks = torch.full((n, publish_blocks), -1, dtype=torch.int32, device=q.device)
    queries = decode_mxfp4(*encode_mxfp4(q))
    for row, length in enumerate(lengths.tolist()):
        entries = torch.arange(length, device=q.device)
        if candidates is not None:
            entries = entries[torch.isin(entries // block_size, candidates[row])]
        records = read_entries(
            pages, table, request[row], entries, torch.ones_like(entries, dtype=torch.bool)
        )
        heads = (decode_index_key(records, d) @ queries[row].T).relu()
        # Adding zero turns -0 into 0: some sorts tell them apart.
        scores = (heads @ head_weights[row].double() + 0.0).bfloat16()
        best = entries[scores.sort(descending=True, stable=True).indices[:topk]].sort().values
        indices[row, : len(best)] = best.int()
        if publish_blocks and length:
            per_block = torch.stack([part.max() for part in scores.split(block_size)])
            per_block[-1] = torch.inf
            best = per_block.sort(descending=True, stable=True).indices[:publish_blocks].sort().values
            blocks[row, : len(best)] = best.int()
    return indices, blocks
