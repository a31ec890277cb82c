"""The definition of ``engram_hash``."""

import torch


def engram_hash(
    context: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Table rows of the n-grams that end at each token, for ``n`` from 2 to ``ngram``.

    The hash of an n-gram is the exclusive or of ``context[r] * multipliers[r]`` over its tokens; its row for a head
    is the hash modulo the head's prime, plus the head's offset.

    Args:
        context: ``[num_tokens, ngram]``, int64, not negative: compressed ids, nearest first; column 0 is the token.
        multipliers: ``[ngram]``, int64; no product may pass ``2**63 - 1``.
        primes: ``[ngram - 1, num_heads]``, int64; row ``n - 2`` for n-grams of ``n``.
        offsets: Same shape, int64.

    Returns:
        ``[num_tokens, (ngram - 1) * num_heads]``, int64, by ``n`` and then by head.
    """
    terms = (context * multipliers).unbind(1)
    hashes = [terms[0] ^ terms[1]]
    for term in terms[2:]:
        hashes.append(hashes[-1] ^ term)
    return (torch.stack(hashes, 1)[:, :, None] % primes + offsets).flatten(1)
