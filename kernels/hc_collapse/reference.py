"""The definition of ``hc_collapse``."""

import torch


def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Weigh the streams together: ``sum_s pre[s] * streams[s]``.

    Args:
        streams: ``[n, num_streams, d]``, bfloat16.
        pre: ``[n, num_streams]``, float32.

    Returns:
        ``[n, d]``, bfloat16. Summed in float64, rounded once.
    """
    weighted = (streams.double() * pre[:, :, None]).unbind(1)
    total = weighted[0]
    for term in weighted[1:]:
        total = total + term
    return total.bfloat16()
