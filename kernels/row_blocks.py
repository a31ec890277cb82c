"""Sums that don't depend on the batch: the building blocks of the ``torch`` providers.

A BLAS library picks its kernel, and with it the order of a sum, by the shape of the whole product; a
reduction does the same. So a row's result could change with the number of rows beside it. Here every product
has the same number of rows, and every long sum is made of additions whose order the code spells out.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

# Rows of every product. Few, for a decode step of one row computes as many; a long prompt pays with a longer loop.
ROWS = 8

# Rows that fill whole vectors of any CPU whatever the width is. torch's vectorised exponentials and the scalar ones,
# which get what is left past the last whole vector, differ in the last bit.
WHOLE_VECTORS = 16

# Elements of a weight decoded to float64 at a time (32 MiB).
_WEIGHT_ELEMENTS = 1 << 22

# Greatest weight that stays decoded (2 MiB): all of a test model's, and of the release's few and small ones.
_KEPT_ELEMENTS = 1 << 18


class _Decoded(NamedTuple):
    versions: tuple[int, ...]
    values: torch.Tensor


# By the tensor that owns the memory, and then by the part of it.
_decoded: MutableMapping[torch.Tensor, dict[tuple[int, torch.Size], _Decoded]] = WeakTensorKeyDictionary()


def pad_rows(x: torch.Tensor, multiple: int, value: float = 0) -> torch.Tensor:
    """``x [n, ...]`` with rows of ``value`` added until ``n`` is a multiple of ``multiple``."""
    missing = -x.shape[0] % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=value) if missing else x


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` by blocks of ``ROWS`` rows.

    Args:
        x: ``[n, k]``, float64.
        weight: ``[m, k]``, float64.

    Returns:
        ``[n, m]``, float64. The bits of a row depend on that row and ``weight`` alone.
    """
    n = x.shape[0]
    if n == ROWS:
        return F.linear(x, weight)
    padded = pad_rows(x, ROWS)
    if len(padded) == ROWS:
        return F.linear(padded, weight)[:n]
    out = x.new_empty((len(padded), weight.shape[0]))
    for rows, block in zip(padded.split(ROWS), out.split(ROWS)):
        torch.mm(rows, weight.T, out=block)
    return out[:n]


def linear(
    x: torch.Tensor,
    num_out: int,
    weight: Callable[[slice], torch.Tensor],
    out_dtype: torch.dtype,
    stored: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """``x @ weight.T``, rounded once, decoding a bounded part of the weight at a time.

    Args:
        x: ``[n, k]``, float64.
        num_out: Rows ``m`` of the weight.
        weight: Gives the rows of a slice of the weight, ``[rows, k]``, float64. Slices start at multiples of 32.
        out_dtype: Dtype of the result.
        stored: What ``weight`` decodes, if its result may be kept; see :func:`decoded`.

    Returns:
        ``[n, m]``.
    """
    width = x.shape[1]
    whole = decoded(stored, num_out * width, lambda: weight(slice(0, num_out)))
    if whole is not None:
        return matmul(x, whole).to(out_dtype)
    at_once = max(32, _WEIGHT_ELEMENTS // max(width, 1) // 32 * 32)
    if num_out <= at_once:
        return matmul(x, weight(slice(0, num_out))).to(out_dtype)
    out = torch.empty(x.shape[0], num_out, dtype=out_dtype, device=x.device)
    for start in range(0, num_out, at_once):
        part = slice(start, min(start + at_once, num_out))
        out[:, part] = matmul(x, weight(part))
    return out


def decoded(
    stored: tuple[torch.Tensor, ...], num_elements: int, decode: Callable[[], torch.Tensor]
) -> torch.Tensor | None:
    """A small weight in float64, decoded once for as long as it lives and is not written.

    Args:
        stored: The weight and, where it has them, its scales.
        num_elements: Of the decoded weight.
        decode: Decodes it.

    Returns:
        What ``decode`` gives, not to be written. None if the weight is too large to keep decoded, or if nobody could
        tell when it is written (an inference tensor).
    """
    if not stored or num_elements > _KEPT_ELEMENTS or any(tensor.is_inference() for tensor in stored):
        return None
    weight = stored[0]
    owner = weight if weight._base is None else weight._base
    parts = _decoded.get(owner)
    if parts is None:
        parts = _decoded[owner] = {}
    # Where the scales lie as well: they may be replaced without being written.
    versions = tuple(number for tensor in stored for number in (tensor._version, tensor.data_ptr()))
    part = (weight.data_ptr(), weight.shape)
    kept = parts.get(part)
    if kept is None or kept.versions != versions:
        kept = parts[part] = _Decoded(versions, decode())
    return kept.values


def sum_last(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by adding its second half to its first until one value is left.

    Args:
        x: ``[..., d]``, float64.

    Returns:
        ``[...]``. Every step is elementwise, so the order of summing depends on ``d`` alone.
    """
    # The same arithmetic, but a call of numpy's costs a fraction of torch's.
    return torch.from_numpy(_fold(x.numpy())) if x.is_cpu else _fold(x)


def _fold(x: Any) -> Any:
    """``sum_last`` of a tensor or of a numpy array."""
    while (width := x.shape[-1]) > 1:
        half = width // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if width % 2:
            folded[..., :1] += x[..., 2 * half :]
        x = folded
    return x[..., 0]
