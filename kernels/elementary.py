"""Exponential and logarithm of float64, spelt out in additions and multiplications.

A library's differ in the last bit from chip to chip, and on one chip from the middle of a vector to its tail. Every
step here is rounded as IEEE 754 says, so an element's bits depend on that element alone, wherever it is computed.
Both are within 4 units in the last place. No step may be contracted to a fused multiply-add.
"""

import math

import torch

LOG2_E = math.log2(math.e)
# ln 2 in two parts. The first has 33 bits, so that its product with an exponent is exact.
LN2_HIGH = 0x162E42FEE / 2**33
LN2_LOW = 1.9082149292705877e-10
# Below it a normal float64 has no exponential.
SMALLEST = -708.0
# Taylor's coefficients, highest power first: exp(r) to r^13, atanh(s) / s to s^20.
EXP_TERMS = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))
LOG_TERMS = tuple(1.0 / (2 * k + 1) for k in range(10, -1, -1))
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD


def exp(x: torch.Tensor) -> torch.Tensor:
    """``e^x``; 0 where ``x < -708``.

    Args:
        x: float64, at most 709.

    Returns:
        float64: ``2^n * p(r)`` with ``n = floor(x * log2(e) + 1/2)``, ``r = (x - n * LN2_HIGH) - n * LN2_LOW`` and
            ``p``
        by Horner's rule over ``EXP_TERMS``.
    """
    inside = x.clamp(min=SMALLEST)
    n = (inside * LOG2_E).add_(0.5).floor_()
    r = (inside - n * LN2_HIGH).sub_(n * LN2_LOW)
    p = r * EXP_TERMS[0]
    for term in EXP_TERMS[1:-1]:
        p.add_(term).mul_(r)
    p.add_(EXP_TERMS[-1])
    power = n.to(torch.int64).add_(1023).bitwise_left_shift_(52).view(torch.float64)
    return p.mul_(power).masked_fill_(x < SMALLEST, 0.0)


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm; -inf where ``x`` is 0.

    Args:
        x: float64: 0, or positive and normal.

    Returns:
        float64: ``k * LN2_HIGH + (2 * s * p(s * s) + k * LN2_LOW)`` with ``x = 2^k * m``, ``sqrt(1/2) <= m <
            sqrt(2)``,
        ``s = (m - 1) / (m + 1)`` and ``p`` by Horner's rule over ``LOG_TERMS``.
    """
    bits = x.contiguous().view(torch.int64)
    k = (bits - SQRT_HALF_BITS).bitwise_right_shift_(52)
    m = (bits - (k << 52)).view(torch.float64)
    s = (m - 1.0).div_(m + 1.0)
    z = s * s
    p = z * LOG_TERMS[0]
    for term in LOG_TERMS[1:-1]:
        p.add_(term).mul_(z)
    p.add_(LOG_TERMS[-1])
    exponent = k.to(torch.float64)
    low = p.mul_(s).mul_(2.0).add_(exponent * LN2_LOW)
    return (exponent * LN2_HIGH).add_(low).masked_fill_(x == 0.0, -math.inf)
