"""Noise that is a function of seed, position and vocabulary entry: Philox4x32-10, uniforms and Gumbel variates.

Philox4x32-10 is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). For the entry ``v``
of the vocabulary at the absolute position ``p`` of a request with seed ``s``, in the stream ``t``:

    key     = (s mod 2^32, s div 2^32)                      s as an unsigned 64-bit number
    counter = (v div 2, t, p mod 2^32, p div 2^32)
    words   = Philox4x32-10(counter, key)
    high, low = words[2 * (v mod 2)], words[2 * (v mod 2) + 1]
    uniform = (high * 2^20 + low div 2^12 + 1/2) / 2^52     in (0, 1), exact in float64
    gumbel  = -log(-log(uniform))                           with the log of ``elementary.py``

Streams keep apart what must be independent: ``TARGET`` for the token that the model itself samples, ``DRAFT`` for a
draft that is to be verified by rejection, ``COIN`` for whether such a draft is accepted (its entry is 0).
"""

import torch

from deepinfer_plugins.kernels import elementary

TARGET, DRAFT, COIN = 0, 1, 2

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10.

    Args:
        counter: Four words, int64 tensors of numbers below 2^32 that broadcast together.
        key: Two words, likewise.

    Returns:
        Four words, int64 tensors of numbers below 2^32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # 64 bits of a product of two words are right whatever sign they are read with.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = ((second >> 32) & _WORD) ^ c1 ^ k0, ((first >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = second & _WORD, first & _WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & _WORD, (k1 + KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, position: torch.Tensor, stream: torch.Tensor, entries: int) -> torch.Tensor:
    """Uniforms of the first ``entries`` entries of each row.

    Args:
        seed: ``[n]``, int64; the bits of an unsigned number.
        position: ``[n]``, int64.
        stream: ``[n]``, int64.
        entries: Any number.

    Returns:
        ``[n, entries]``, float64.
    """
    n, blocks = seed.shape[0], (entries + 1) // 2
    s, p = seed[:, None], position[:, None]
    block = torch.arange(blocks, device=seed.device)[None]
    counter = (block, stream[:, None], p & _WORD, (p >> 32) & _WORD)
    words = philox(counter, (s & _WORD, (s >> 32) & _WORD))
    pairs = torch.stack([(words[i] << 20) + (words[i + 1] >> 12) for i in (0, 2)], dim=2)
    return pairs.reshape(n, 2 * blocks)[:, :entries].to(torch.float64).add_(0.5).mul_(2.0**-52)


def gumbel(seed: torch.Tensor, position: torch.Tensor, stream: torch.Tensor, entries: int) -> torch.Tensor:
    """Gumbel variates of the first ``entries`` entries of each row; arguments and shape as :func:`uniform`."""
    return elementary.log(elementary.log(uniform(seed, position, stream, entries)).neg_()).neg_()
