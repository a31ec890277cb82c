"""``hc_mix`` by blocks of rows, with one plane per mixing weight."""

from typing import Any

import numpy as np
import torch

from deepinfer_plugins.kernels.row_blocks import WHOLE_VECTORS, matmul, pad_rows, sum_last


def hc_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference; the order of a row's sums depends on the number of streams and their width alone."""
    n, num_streams = streams.shape[:2]
    flat = pad_rows(streams.flatten(1), WHOLE_VECTORS).double()
    mean = sum_last(flat * flat) / flat.shape[1]
    z = (matmul(flat, fn.double()) * (mean + norm_eps).rsqrt()[:, None]).float()
    factors = torch.cat([scale[:2, None].expand(-1, num_streams).flatten(), scale[2:].expand(num_streams**2)])
    planes = (z.double() * factors + base).T.contiguous()
    halves = 1 / (1 + (-planes[: 2 * num_streams]).exp())
    pre, post = halves.split(num_streams)
    comb = planes[2 * num_streams :].view(num_streams, num_streams, planes.shape[1])
    comb = (comb - comb.amax(1, keepdim=True)).exp()
    if comb.is_cpu:
        # The same arithmetic, but a call costs a fifth of torch's.
        _sinkhorn(comb.numpy(), hc_eps, iters, np)
    else:
        _sinkhorn(comb, hc_eps, iters, torch)
    return (pre + hc_eps).T[:n].float(), (2 * post).T[:n].float(), comb.movedim(-1, 0)[:n].float()


def _sinkhorn(planes: Any, eps: float, iters: int, lib: Any) -> None:
    """Make positive ``planes[row, column, n]`` doubly stochastic for each ``n``, in place, by elementwise steps only.

    Args:
        planes: ``[num_streams, num_streams, n]``, float64, of ``lib``.
        eps: See the reference.
        iters: See the reference.
        lib: numpy or torch.
    """
    columns = [planes[:, i] for i in range(len(planes))]
    rows = [planes[i] for i in range(len(planes))]
    total = lib.zeros_like(rows[0])
    by_row, by_column = total[:, None], total[None]

    def divide(parts: list[Any], divisor: Any, eps: float) -> None:
        lib.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            lib.add(total, part, out=total)
        lib.add(total, eps, out=total)
        lib.divide(planes, divisor, out=planes)

    divide(columns, by_row, 0)
    lib.add(planes, eps, out=planes)
    divide(rows, by_column, eps)
    for _ in range(iters - 1):
        divide(columns, by_row, eps)
        divide(rows, by_column, eps)
