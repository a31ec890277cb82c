"""The definition of ``hc_merge``."""

import torch


def hc_merge(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Spread a sublayer's output over the streams and mix them: ``post[t] * x + sum_s comb[s, t] * streams[s]``.

    Args:
        x: ``[n, d]``, bfloat16, the sublayer's output.
        streams: ``[n, num_streams, d]``, bfloat16, from before the sublayer.
        post: ``[n, num_streams]``, float32.
        comb: ``[n, num_streams, num_streams]``, float32; the first index is the source.

    Returns:
        ``[n, num_streams, d]``, bfloat16. Summed in float64, rounded once.
    """
    comb = comb.double()
    merged = post.double()[:, :, None] * x[:, None]
    for source in range(streams.shape[1]):
        merged.addcmul_(comb[:, source, :, None], streams[:, source, None].double())
    return merged.bfloat16()
