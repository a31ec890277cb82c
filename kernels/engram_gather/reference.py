"""The definition of ``engram_gather``."""

import torch

from deepinfer_plugins.kernels.formats import UNIT_SCALE


def engram_gather(
    table: torch.Tensor, table_scales: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fetch table rows and lay those of a token side by side.

    Args:
        table: ``[num_rows, d]``, e4m3.
        table_scales: ``[num_rows, d / 32]``, uint8, UE8M0.
        index: ``[n, c]``, int64; -1 fetches zeros with unit scales.

    Returns:
        values: ``[n, c * d]``, e4m3.
        scales: ``[n, c * d / 32]``, uint8.
    """
    missing = (index < 0)[..., None]
    rows = index.clamp(min=0)
    values = table.view(torch.uint8)[rows].masked_fill(missing, 0)
    scales = table_scales[rows].masked_fill(missing, UNIT_SCALE)
    return values.flatten(1).view(table.dtype), scales.flatten(1)
