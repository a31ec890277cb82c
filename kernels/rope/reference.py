"""The definition of ``rope``."""

import torch


def rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool) -> torch.Tensor:
    """Rotate the pairs ``(2i, 2i + 1)`` of the trailing dimensions by the angles of the row's position.

    Args:
        x: ``[n, num_heads, d]``, bfloat16.
        positions: ``[n]``, int64.
        table: ``[max_positions, rope_dim]``, float32: cosines of the ``rope_dim / 2`` angles, then their sines.
        inverse: Rotate back.

    Returns:
        ``[n, num_heads, d]``, bfloat16; the leading ``d - rope_dim`` values unchanged, the others computed in
        float64 and rounded once.
    """
    cos, sin = table[positions].double()[:, None].chunk(2, -1)
    if inverse:
        sin = -sin
    plain, rotary = x.split([x.shape[-1] - table.shape[-1], table.shape[-1]], -1)
    pairs = rotary.double()
    even, odd = pairs[..., 0::2], pairs[..., 1::2]
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([plain, rotated.bfloat16()], -1)
