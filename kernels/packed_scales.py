"""Scales of MXFP8 rows and weights as DeepGEMM reads them on an SM100; not run on hardware.

It wants four UE8M0 bytes to an int32, the least significant first, and the numbers of a column side by side: rows have
stride 1, and columns begin at multiples of 16 bytes, for the tensor memory accelerator.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

# Values of a row that the four scales of an int32 cover.
PACKED_VALUES = 128
# int32 numbers in 16 bytes.
_ALIGNED = 4


class _Packed(NamedTuple):
    version: int
    scales: torch.Tensor


# By the tensor that owns the memory, and then by the part of it.
_packed: MutableMapping[torch.Tensor, dict[tuple[int, torch.Size, int], _Packed]] = WeakTensorKeyDictionary()


def pack(scales: torch.Tensor) -> torch.Tensor:
    """Pack scales: one copy of them, a 32nd of the bytes that they scale.

    Args:
        scales: ``[n, num_groups, k / 32]``, uint8, UE8M0; ``k`` a multiple of 128.

    Returns:
        ``[n, num_groups, k / 128]``, int32.
    """
    n, num_groups, _ = scales.shape
    words = scales.contiguous().view(torch.int32)
    columns = words.new_empty((num_groups, words.shape[2], -(-n // _ALIGNED) * _ALIGNED))
    columns[..., :n] = words.permute(1, 2, 0)
    return columns.permute(2, 0, 1)[:n]


def pack_weight(weight_scales: torch.Tensor, num_rows: int, num_groups: int) -> torch.Tensor:
    """Pack a weight's scales, one for each row, once for as long as they live and are not written.

    Args:
        weight_scales: ``[ceil(m / 32), k / 32]``, uint8, UE8M0; ``k`` a multiple of 128.
        num_rows: Rows ``m`` of the weight.
        num_groups: Groups of rows; divides ``m``.

    Returns:
        ``[num_groups, m / num_groups, k / 128]``, int32.
    """

    def packed() -> torch.Tensor:
        by_row = weight_scales.repeat_interleave(32, dim=0)[:num_rows]
        return pack(by_row.view(num_groups, num_rows // num_groups, -1).transpose(0, 1)).transpose(0, 1)

    if weight_scales.is_inference():
        # Nobody could tell when it is written.
        return packed()
    owner = weight_scales if weight_scales._base is None else weight_scales._base
    parts = _packed.setdefault(owner, {})
    part = (weight_scales.data_ptr(), weight_scales.shape, num_groups)
    kept = parts.get(part)
    if kept is None or kept.version != weight_scales._version:
        kept = parts[part] = _Packed(weight_scales._version, packed())
    return kept.scales
