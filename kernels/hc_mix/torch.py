"""``hc_mix`` by blocks of rows, with one plane per mixing weight."""

import torch

from deepinfer_plugins.kernels.row_blocks import ROWS, matmul, pad_rows, sum_last


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
    # Whole blocks also below: torch's vectorised and scalar exponentials differ in the last bit, and rows past the
    # last whole vector get the scalar one.
    flat = pad_rows(streams.flatten(1), ROWS).double()
    mean = sum_last(flat * flat) / flat.shape[1]
    z = (matmul(flat, fn.double()) * (mean + norm_eps).rsqrt()[:, None]).float()
    sizes = torch.tensor([num_streams, num_streams, num_streams**2], device=scale.device)
    logits = z.double() * scale.double().repeat_interleave(sizes) + base
    planes = logits.T.contiguous()
    halves = 1 / (1 + (-planes[: 2 * num_streams]).exp())
    pre, post = halves.split(num_streams)
    comb = planes[2 * num_streams :].view(num_streams, num_streams, planes.shape[1])
    _sinkhorn(comb, hc_eps, iters)
    return (
        (pre + hc_eps).T[:n].float().contiguous(),
        (2 * post).T[:n].float().contiguous(),
        comb.movedim(-1, 0)[:n].float().contiguous(),
    )


def _sinkhorn(planes: torch.Tensor, eps: float, iters: int) -> None:
    """Make ``planes[row, column, n]`` doubly stochastic for each ``n``, in place, by elementwise steps only."""
    planes -= planes.amax(1, keepdim=True)
    planes.exp_()
    columns, rows = planes.unbind(1), planes.unbind(0)
    total = torch.empty_like(columns[0])
    by_row, by_column = total[:, None], total[None]

    def add_up(parts: tuple[torch.Tensor, ...]) -> None:
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total.add_(part)

    add_up(columns)
    planes.div_(by_row).add_(eps)
    for iteration in range(iters):
        if iteration:
            add_up(columns)
            total.add_(eps)
            planes.div_(by_row)
        add_up(rows)
        total.add_(eps)
        planes.div_(by_column)
