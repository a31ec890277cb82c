"""``hc_mix`` by blocks of rows, with one plane per mixing weight."""

import functools

import numpy as np
import torch

from deepinfer_plugins.kernels.row_blocks import WHOLE_VECTORS, decoded, matmul, pad_rows, sum_last


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
    flat = streams.flatten(1).double()
    mean = sum_last(flat * flat) / flat.shape[1]
    weight = decoded((fn,), fn.numel(), fn.double)
    products = matmul(flat, fn.double() if weight is None else weight)
    z = (products * (mean + norm_eps).rsqrt_().unsqueeze(1)).float()
    factors = scale.index_select(0, _factor_of_mix(num_streams, scale.device))
    mixes = (z.double() * factors).add_(base)
    planes = pad_rows(mixes, WHOLE_VECTORS).T.contiguous()
    planes[: 2 * num_streams].sigmoid_()
    planes[:num_streams] += hc_eps
    planes[num_streams : 2 * num_streams] *= 2
    comb = planes[2 * num_streams :].view(num_streams, num_streams, planes.shape[1])
    comb.sub_(comb.amax(1, keepdim=True)).exp_()
    if comb.is_cpu:
        # The same arithmetic, but a call costs a fraction of torch's.
        _sinkhorn_on_cpu(comb.numpy(), hc_eps, iters)
    else:
        _sinkhorn(comb, hc_eps, iters)
    result = planes.T[:n].float()
    pre, post, comb = result.split([num_streams, num_streams, num_streams**2], 1)
    return pre, post, comb.unflatten(1, (num_streams, num_streams))


@functools.cache
def _factor_of_mix(num_streams: int, device: torch.device) -> torch.Tensor:
    """Which of the three factors each mix is multiplied by."""
    sizes = torch.tensor([num_streams, num_streams, num_streams**2])
    return torch.arange(3).repeat_interleave(sizes).to(device)


def _sinkhorn(planes: torch.Tensor, eps: float, iters: int) -> None:
    """Make positive ``planes[row, column, n]`` doubly stochastic for each ``n``, in place, by elementwise steps only.

    Args:
        planes: ``[num_streams, num_streams, n]``, float64.
        eps: See the reference; where it is added, the sum begins with it.
        iters: See the reference.
    """

    def divide(dim: int, eps: float) -> None:
        first, *others = planes.unbind(dim)
        total = first + eps
        for part in others:
            total += part
        planes.div_(total.unsqueeze(dim))

    divide(1, 0)
    planes.add_(eps)
    divide(0, eps)
    for _ in range(iters - 1):
        divide(1, eps)
        divide(0, eps)


def _sinkhorn_on_cpu(planes: np.ndarray, eps: float, iters: int) -> None:
    """:func:`_sinkhorn` of an array; a sum along a dimension that is not the last is made of elementwise steps too."""
    by_row = np.empty_like(planes[:, :1])
    by_column = np.empty_like(planes[:1])

    def divide(axis: int, total: np.ndarray, eps: float) -> None:
        np.add.reduce(planes, axis=axis, out=total, keepdims=True, initial=eps)
        np.divide(planes, total, out=planes)

    divide(1, by_row, 0)
    np.add(planes, eps, out=planes)
    divide(0, by_column, eps)
    for _ in range(iters - 1):
        divide(1, by_row, eps)
        divide(0, by_column, eps)
