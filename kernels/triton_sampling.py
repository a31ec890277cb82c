"""What the Triton providers that sample share: ``elementary.py``, ``noise.py`` and ``filtering.py`` in Triton.

A program computes ``ROWS`` whole rows, block after block of the vocabulary, however many rows there are. Every step
that rounds is the definition's own; sums are of whole numbers, so their order is free; and kernels are compiled
without contraction to fused multiply-adds (``LAUNCH``). So all results have the definition's bits.

Thresholds are found without sorting: ``t``, two bits at a time, as the least number such that the weights of entries
above it stay below a limit. Entries equal to it are kept by id for as long as the weight before them stays below.
"""

# mypy: ignore-errors

from __future__ import annotations

import math
import os
from typing import Any

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels import elementary, filtering

# The interpreter pays per operation, not per element, and small blocks give small tests several.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROWS = 16 if _INTERPRETED else 1
BLOCK = 32 if _INTERPRETED else 2048
LAUNCH: dict[str, Any] = {"ROWS": ROWS, "BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": False}

ONE = tl.constexpr(float(filtering.ONE))
PER_ONE = tl.constexpr(1.0 / filtering.ONE)
LOG2_E = tl.constexpr(elementary.LOG2_E)
LN2_HIGH = tl.constexpr(elementary.LN2_HIGH)
LN2_LOW = tl.constexpr(elementary.LN2_LOW)
SMALLEST = tl.constexpr(elementary.SMALLEST)
SQRT_HALF_BITS = tl.constexpr(elementary.SQRT_HALF_BITS)
EXP_TERMS = tl.constexpr(elementary.EXP_TERMS)
LOG_TERMS = tl.constexpr(elementary.LOG_TERMS)
NUM_EXP_TERMS = tl.constexpr(len(elementary.EXP_TERMS))
NUM_LOG_TERMS = tl.constexpr(len(elementary.LOG_TERMS))
INFINITY = tl.constexpr(math.inf)
LEAST = tl.constexpr(torch.finfo(torch.float64).min)


def parameters(
    temperature: torch.Tensor | None,
    min_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """The four, contiguous: all filters or none, so that there are few kernels to compile. A row skips what is off."""
    if temperature is None or (min_p is None and top_k is None and top_p is None):
        filters = (None, None, None)
    else:
        filters = (
            torch.zeros_like(temperature) if min_p is None else min_p.contiguous(),
            torch.zeros_like(temperature, dtype=torch.int64) if top_k is None else top_k.contiguous(),
            torch.ones_like(temperature) if top_p is None else top_p.contiguous(),
        )
    return (temperature if temperature is None else temperature.contiguous(), *filters)


def grid(num_rows: int) -> tuple[int]:
    """Programs for ``num_rows`` rows."""
    return (triton.cdiv(num_rows, ROWS),)


@triton.jit
def exp64(x):
    """``elementary.exp``."""
    inside = tl.maximum(x, SMALLEST)
    n = tl.floor(inside * LOG2_E + 0.5)
    r = (inside - n * LN2_HIGH) - n * LN2_LOW
    p = r * EXP_TERMS[0]
    for i in tl.static_range(1, NUM_EXP_TERMS - 1):
        p = (p + EXP_TERMS[i]) * r
    p = p + EXP_TERMS[NUM_EXP_TERMS - 1]
    power = ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x < SMALLEST, 0.0, p * power)


@triton.jit
def log64(x):
    """``elementary.log``."""
    bits = x.to(tl.int64, bitcast=True)
    k = (bits - SQRT_HALF_BITS) >> 52
    m = (bits - (k << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = z * LOG_TERMS[0]
    for i in tl.static_range(1, NUM_LOG_TERMS - 1):
        p = (p + LOG_TERMS[i]) * z
    p = p + LOG_TERMS[NUM_LOG_TERMS - 1]
    exponent = k.to(tl.float64)
    low = p * s * 2.0 + exponent * LN2_LOW
    return tl.where(x == 0.0, -INFINITY, exponent * LN2_HIGH + low)


@triton.jit
def to_uniform(high, low):
    """A uniform from two words."""
    whole = (high.to(tl.int64) << 20) + (low.to(tl.int64) >> 12)
    return (whole.to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def words(seed, position, stream, block):
    """``noise.philox`` at ``block`` of the counter."""
    p_low = (position & 0xFFFFFFFF).to(tl.uint32)
    p_high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, block.to(tl.uint32), stream.to(tl.uint32), p_low, p_high)


@triton.jit
def gumbel(seed, position, stream, start, BLOCK: tl.constexpr):
    """``noise.gumbel`` of the entries from ``start`` on, an even number."""
    block = start // 2 + tl.arange(0, BLOCK // 2)[None, :]
    w0, w1, w2, w3 = words(seed[:, None], position[:, None], stream[:, None], block)
    uniform = tl.interleave(to_uniform(w0, w1), to_uniform(w2, w3))
    return -log64(-log64(uniform))


@triton.jit
def load_block(logits, start, present, num_entries, BLOCK: tl.constexpr):
    """Logits of a block and their ids; -inf past the end."""
    ids = start + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + ids, mask=present & (ids < num_entries), other=-INFINITY)
    return x, ids


@triton.jit
def find_best(logits, present, num_entries, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest logit of each row and its first id; id 0 where all are barred."""
    top = tl.full((ROWS,), -INFINITY, tl.float32)
    best = tl.zeros((ROWS,), tl.int32)
    for start in range(0, num_entries, BLOCK):
        x, _ = load_block(logits, start, present, num_entries, BLOCK)
        highest = tl.max(x, axis=1)
        where = start + tl.argmax(x, axis=1)
        best = tl.where(highest > top, where.to(tl.int32), best)
        top = tl.maximum(highest, top)
    return top, best


@triton.jit
def shift(x, ids, temperature, top, best):
    """``filtering.shift``."""
    hot = tl.where(temperature == 0, 1.0, temperature)
    scaled = x.to(tl.float64) / hot[:, None]
    highest = tl.maximum(top.to(tl.float64) / hot, LEAST)
    return tl.where(ids == best[:, None], 0.0, scaled - highest[:, None])


@triton.jit
def rising(x):
    """Whole numbers from 0 on that rise with ``x``; equal for 0 and -0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def to_mass(shifted):
    """Whole numbers of 2^-40 of the most probable entry's probability."""
    return tl.floor(exp64(shifted) * ONE + 0.5).to(tl.int64)


@triton.jit
def is_kept(x, ids, shifted, best, min_p, k_value, k_id, p_value, p_id, present):
    """Whether an entry passes the filters that have been prepared."""
    keep = x > -INFINITY
    if min_p is not None:
        keep = keep & (exp64(shifted) >= min_p[:, None])
    u = rising(x)
    keep = keep & ((u > k_value[:, None]) | ((u == k_value[:, None]) & (ids <= k_id[:, None])))
    keep = keep & ((u > p_value[:, None]) | ((u == p_value[:, None]) & (ids <= p_id[:, None])))
    return present & (keep | (ids == best[:, None]))


@triton.jit
def weigh(x, ids, temperature, top, best, min_p, k_value, k_id, present, num_entries, COUNT: tl.constexpr):
    """What an entry weighs in the search: 1, or its mass if min-p and top-k keep it."""
    if COUNT:
        weight = (ids < num_entries).to(tl.int64)
    else:
        shifted = shift(x, ids, temperature, top, best)
        all_ids = tl.full(best.shape, 2147483647, tl.int32)
        none = tl.full(best.shape, -1, tl.int64)
        keep = is_kept(x, ids, shifted, best, min_p, k_value, k_id, none, all_ids, present)
        weight = tl.where(keep & (x > -INFINITY), to_mass(shifted), 0)
    return weight


@triton.jit
def find_threshold(
    logits,
    temperature,
    top,
    best,
    min_p,
    k_value,
    k_id,
    limit,
    present,
    num_entries,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last entry before which less than ``limit`` weighs, in the order of falling logit and rising id.

    Returns its number by ``rising`` and its id. ``limit`` is at least 1.
    """
    value = tl.full((ROWS,), 4294967295, tl.int64)
    step = tl.full((ROWS,), 1073741824, tl.int64)
    for _ in range(16):
        one = tl.zeros((ROWS, BLOCK), tl.int64)
        two = tl.zeros((ROWS, BLOCK), tl.int64)
        three = tl.zeros((ROWS, BLOCK), tl.int64)
        for start in range(0, num_entries, BLOCK):
            x, ids = load_block(logits, start, present, num_entries, BLOCK)
            weight = weigh(x, ids, temperature, top, best, min_p, k_value, k_id, present, num_entries, COUNT)
            higher = rising(x) - value[:, None]
            one += tl.where(higher > -step[:, None], weight, 0)
            two += tl.where(higher > -2 * step[:, None], weight, 0)
            three += tl.where(higher > -3 * step[:, None], weight, 0)
        # As many steps down as stay below the limit: fewer weigh no more.
        value -= step * (tl.sum(one, axis=1) < limit).to(tl.int64)
        value -= step * (tl.sum(two, axis=1) < limit).to(tl.int64)
        value -= step * (tl.sum(three, axis=1) < limit).to(tl.int64)
        step = step >> 2
    before = tl.zeros((ROWS,), tl.int64)
    for start in range(0, num_entries, BLOCK):
        x, ids = load_block(logits, start, present, num_entries, BLOCK)
        weight = weigh(x, ids, temperature, top, best, min_p, k_value, k_id, present, num_entries, COUNT)
        before += tl.sum(tl.where(rising(x) > value[:, None], weight, 0), axis=1)
    last = tl.full((ROWS,), -1, tl.int32)
    for start in range(0, num_entries, BLOCK):
        x, ids = load_block(logits, start, present, num_entries, BLOCK)
        weight = weigh(x, ids, temperature, top, best, min_p, k_value, k_id, present, num_entries, COUNT)
        equal = rising(x) == value[:, None]
        tied = tl.where(equal, weight, 0)
        earlier = before[:, None] + tl.cumsum(tied, axis=1) - tied
        inside = equal & (earlier < limit[:, None])
        last = tl.maximum(last, tl.max(tl.where(inside, ids, -1), axis=1))
        before += tl.sum(tied, axis=1)
    return value, last


@triton.jit
def prepare(
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    present,
    num_entries,
    NEED_MASS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Best entry and thresholds of each row, and the mass of what stays if it is needed (else 0)."""
    top, best = find_best(logits, present, num_entries, ROWS, BLOCK)
    k_value = tl.full((ROWS,), -1, tl.int64)
    k_id = tl.full((ROWS,), 2147483647, tl.int32)
    p_value, p_id = k_value, k_id
    mass = tl.zeros((ROWS,), tl.int64)
    if top_k is not None:
        if tl.max(top_k, axis=0) > 0:
            limit = tl.where(top_k == 0, num_entries, top_k)
            k_value, k_id = find_threshold(
                logits,
                temperature,
                top,
                best,
                None,
                k_value,
                k_id,
                limit,
                present,
                num_entries,
                True,
                ROWS,
                BLOCK,
            )
    if top_p is not None:
        if tl.min(top_p, axis=0) < 1:
            total = tl.zeros((ROWS,), tl.int64)
            for start in range(0, num_entries, BLOCK):
                x, ids = load_block(logits, start, present, num_entries, BLOCK)
                weight = weigh(
                    x, ids, temperature, top, best, min_p, k_value, k_id, present, num_entries, False
                )
                total += tl.sum(weight, axis=1)
            limit = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
            value, last = find_threshold(
                logits,
                temperature,
                top,
                best,
                min_p,
                k_value,
                k_id,
                limit,
                present,
                num_entries,
                False,
                ROWS,
                BLOCK,
            )
            p_value = tl.where(top_p >= 1, p_value, value)
            p_id = tl.where(top_p >= 1, p_id, last)
    # A greedy row keeps its best entry alone.
    greedy = temperature == 0
    p_value = tl.where(greedy, 4294967296, p_value)
    if NEED_MASS:
        mass = tl.zeros((ROWS,), tl.int64)
        for start in range(0, num_entries, BLOCK):
            x, ids = load_block(logits, start, present, num_entries, BLOCK)
            shifted = shift(x, ids, temperature, top, best)
            keep = is_kept(x, ids, shifted, best, min_p, k_value, k_id, p_value, p_id, present)
            mass += tl.sum(tl.where(keep, to_mass(shifted), 0), axis=1)
    return top, best, k_value, k_id, p_value, p_id, mass
