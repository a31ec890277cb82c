"""The definition of ``hc_mix``."""

import torch


def hc_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mixing weights that the streams ask for.

    With ``f`` the streams side by side, ``z = (fn f) * rsqrt(mean(f^2) + norm_eps)``, rounded to float32, holds the
    logits of ``pre`` (``num_streams``), ``post`` (``num_streams``) and ``comb`` (``num_streams^2``, row by row).
    ``comb`` is made doubly stochastic: softmax of the rows, plus ``hc_eps``; columns divided by their sum plus
    ``hc_eps``; then ``iters - 1`` times rows and columns divided likewise.

    Args:
        streams: ``[n, num_streams, d]``, bfloat16.
        fn: ``[num_streams * (2 + num_streams), num_streams * d]``, float32.
        base: ``[num_streams * (2 + num_streams)]``, float32.
        scale: ``[3]``, float32, of ``pre``, ``post`` and ``comb``.
        norm_eps: Added to the mean square.
        hc_eps: Added to ``pre`` and to every divisor of ``comb``.
        iters: Times the columns are divided.

    Returns:
        pre: ``[n, num_streams]``, float32, ``sigmoid + hc_eps``.
        post: ``[n, num_streams]``, float32, ``2 * sigmoid``.
        comb: ``[n, num_streams, num_streams]``, float32. Each is computed from ``z`` in float64, rounded once.
    """
    n, num_streams = streams.shape[:2]
    flat = streams.flatten(1).double()
    z = flat @ fn.double().T * (flat.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    parts = z.float().double().split([num_streams, num_streams, num_streams**2], -1)
    bases = base.double().split([num_streams, num_streams, num_streams**2])
    pre, post, comb = (part * factor + shift for part, factor, shift in zip(parts, scale.double(), bases))
    comb = comb.view(n, num_streams, num_streams).softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return (pre.sigmoid() + hc_eps).float(), (2 * post.sigmoid()).float(), comb.float()
