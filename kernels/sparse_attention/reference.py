"""The definition of ``sparse_attention``."""

import torch

from deepinfer_plugins.kernels.formats import decode_compressed, decode_window
from deepinfer_plugins.kernels.records import read_entries


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
    """Attend to a window of keys and to chosen compressed keys, which are their own values, in one softmax.

    ``out[h] = sum_i p[h, i] k[i]`` with ``p[h, i]`` proportional to ``exp(scale * q[h] . k[i])``; the sink
    takes the share that belongs to ``exp(sinks[h])`` and gives nothing.

    Args:
        q: ``[n, num_heads, d]``, bfloat16.
        window_pages: ``[num_pages, page_size, window_bytes(d)]``, uint8, any strides.
        window_table: ``[num_requests, max_pages]``, int32 or int64.
        compressed_pages: ``[num_pages, page_size, compressed_bytes(d)]``, uint8, any strides; None for no
            such keys.
        compressed_table: ``[num_requests, max_pages]``, int32 or int64; None with ``compressed_pages``.
        indices: ``[n, k]``, int32, entries of the compressed cache; negative ones are ignored. None likewise.
        request: ``[n]``, int64, row of both tables.
        window_start: ``[n]``, int64, first entry of the window; entries before 0 are ignored.
        window_end: ``[n]``, int64, its last entry. No order between rows is implied: an end may lie past the
            row.
        sinks: ``[num_heads]``, float32.
        scale: Of the scores.

    Returns:
        ``[n, num_heads, d]``, bfloat16. Computed in float64, rounded once. Zeros where there is no key.
    """
    out = torch.empty_like(q)
    d = q.shape[-1]
    for row in range(q.shape[0]):
        entries = torch.arange(int(window_start[row].clamp(min=0)), int(window_end[row]) + 1, device=q.device)
        all_valid = torch.ones_like(entries, dtype=torch.bool)
        keys = decode_window(read_entries(window_pages, window_table, request[row], entries, all_valid), d)
        if compressed_pages is not None and compressed_table is not None and indices is not None:
            chosen = indices[row][indices[row] >= 0].long()
            all_valid = torch.ones_like(chosen, dtype=torch.bool)
            records = read_entries(compressed_pages, compressed_table, request[row], chosen, all_valid)
            keys = torch.cat([keys, decode_compressed(records, d)])
        scores = torch.cat([q[row].double() @ keys.T * scale, sinks[:, None].double()], -1)
        out[row] = scores.softmax(-1)[:, :-1] @ keys
    return out
