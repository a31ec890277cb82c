"""``formats.py`` in Triton: numbers to bytes and back, by steps that are exact or rounded as IEEE 754 says.

So a kernel's bytes are the definition's, on a chip and in Triton's interpreter. The interpreter multiplies bfloat16
by its bits and truncates where a chip rounds to nearest even; ``dot`` and ``to_bfloat16`` spell out what is meant.
"""

# mypy: ignore-errors

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def to_bfloat16(x):
    """``x``, float32 or float64, to the nearest bfloat16 by way of float32, ties to even."""
    single = x.to(tl.float32)
    if INTERPRETED:
        bits = single.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return single.to(tl.bfloat16)


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr = None):
    """``total + a @ b``, float32, of bfloat16 or float32 operands; the precision is of the latter.

    numpy's order of summing depends on where a row stands, so in the interpreter the sum is in float64, rounded once.
    """
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32).to(tl.float64), b.to(tl.float32).to(tl.float64))
        return (total.to(tl.float64) + product).to(tl.float32)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def magnitude_bits(x):
    """Bits of ``|x|``, float32, as int32: in the order of the magnitudes, infinity and then NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def decode_e4m3(codes):
    """Float32 values of e4m3 bytes."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def encode_e4m3(x):
    """Bytes, as int32, of the e4m3 numbers nearest to ``x``, float32, ties to even; NaN where it rounds past 448."""
    bits = magnitude_bits(x)
    # One step of e4m3: 2^-3 of the number's power of two, at least 2^-9.
    step_bits = tl.maximum(bits >> 23, 121) - 3 << 23
    per_step = ((254 << 23) - step_bits).to(tl.float32, bitcast=True)
    # Below 2^23 a sum with it is a whole number.
    steps = (bits.to(tl.float32, bitcast=True) * per_step + 8388608.0) - 8388608.0
    rounded = magnitude_bits(steps * step_bits.to(tl.float32, bitcast=True))
    # A subnormal number is its count of steps; a normal one has its bias, 7, in place of 127.
    code = tl.where(rounded >= 121 << 23, (rounded >> 20) - (120 << 3), steps.to(tl.int32))
    code = tl.where(bits >= 0x7F800000, 0x7F, tl.minimum(code, 0x7F))
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def decode_ue8m0(codes):
    """Float32 powers of two of UE8M0 bytes: ``2^(code - 127)``; 255 is NaN."""
    wide = codes.to(tl.int32)
    # The least has no exponent of float32's own.
    bits = tl.where(wide == 0, 0x400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_ue8m0(codes):
    """``2^(127 - code)``, float32, of codes up to 253 as int32; NaN for 255."""
    return tl.where(codes == 255, 0x7FC00000, (254 - codes) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_of_e4m3(amax_bits):
    """UE8M0 byte, as int32, of a group to be rounded to e4m3: the ceiling of ``log2(amax / 448)``; 255 if not finite.

    Args:
        amax_bits: Greatest ``magnitude_bits`` of the group.
    """
    # 1e-4 at least. 448 is 1.75 * 2^8: what is left of a mantissa beyond 1.75 carries into the exponent.
    code = (tl.maximum(amax_bits, 0x38D1B717) + 0x1FFFFF >> 23) - 8
    return tl.where(amax_bits >= 0x7F800000, 255, code)


@triton.jit
def scale_of_e2m1(amax_bits):
    """UE8M0 byte, as int32, of a group to be rounded to e2m1: the ceiling of ``log2(amax / 6)``; 255 if not finite."""
    # 6 * 2^-126 at least. 6 is 1.5 * 2^2.
    code = (tl.maximum(amax_bits, 0x01C00000) + 0x3FFFFF >> 23) - 2
    return tl.where(amax_bits >= 0x7F800000, 255, code)


@triton.jit
def encode_e2m1(x):
    """Codes, as int32, of the e2m1 numbers nearest to ``x``, float32, ties to even, saturating at 6."""
    a = tl.abs(x)
    up = (
        (a > 0.25).to(tl.int32)
        + (a >= 0.75).to(tl.int32)
        + (a > 1.25).to(tl.int32)
        + (a >= 1.75).to(tl.int32)
    )
    up += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    # A NaN saturates as well.
    up = tl.where(a == a, up, 7)
    return up | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_as_e4m3(codes):
    """Bytes of e4m3 numbers that are ``2^-6`` of the e2m1 numbers of ``codes``, integers below 16.

    e2m1 has two bits of exponent with bias 1, e4m3 four with bias 7; subnormal numbers stay subnormal.
    """
    return (((codes & 8) << 4) | ((codes & 7) << 2)).to(tl.uint8)


@triton.jit
def e2m1_pairs_as_e4m3(pairs):
    """:func:`e2m1_as_e4m3` of the low and of the high nibbles of bytes."""
    if INTERPRETED:
        return e2m1_as_e4m3(pairs & 15), e2m1_as_e4m3(pairs >> 4)
    else:
        # Four bytes at a time; the last table is (a & b) | c.
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 low, sign;
                shl.b32 low, $2, 2;
                shl.b32 sign, $2, 4;
                and.b32 low, low, 0x1C1C1C1C;
                lop3.b32 $0, sign, 0x80808080, low, 0xEA;
                shr.u32 low, $2, 2;
                and.b32 low, low, 0x1C1C1C1C;
                lop3.b32 $1, $2, 0x80808080, low, 0xEA;
            }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def decode_e2m1_pairs(pairs, factors):
    """Float16 values of the low and of the high nibbles of bytes, each times a factor.

    Args:
        pairs: Bytes of two e2m1 numbers.
        factors: Float16, of a shape that broadcasts to that of ``pairs``: 64 times what the numbers are to be
            multiplied by.
    """
    if INTERPRETED:
        low, high = e2m1_pairs_as_e4m3(pairs)
        wide = factors.to(tl.float32)
        return (decode_e4m3(low) * wide).to(tl.float16), (decode_e4m3(high) * wide).to(tl.float16)
    else:
        # As above; e4m3 numbers are converted and multiplied in pairs.
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 low, sign;
                .reg .b16 first, second;
                shl.b32 low, $4, 2;
                shl.b32 sign, $4, 4;
                and.b32 low, low, 0x1C1C1C1C;
                lop3.b32 low, sign, 0x80808080, low, 0xEA;
                mov.b32 {first, second}, low;
                cvt.rn.f16x2.e4m3x2 low, first;
                cvt.rn.f16x2.e4m3x2 sign, second;
                mul.f16x2 $0, low, $5;
                mul.f16x2 $1, sign, $6;
                shr.u32 low, $4, 2;
                and.b32 low, low, 0x1C1C1C1C;
                lop3.b32 low, $4, 0x80808080, low, 0xEA;
                mov.b32 {first, second}, low;
                cvt.rn.f16x2.e4m3x2 low, first;
                cvt.rn.f16x2.e4m3x2 sign, second;
                mul.f16x2 $2, low, $5;
                mul.f16x2 $3, sign, $6;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [pairs, factors],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def round_to_e2m1(x):
    """``x``, float32, to the nearest e2m1 number, as float32; otherwise as :func:`encode_e2m1`."""
    return decode_e4m3(e2m1_as_e4m3(encode_e2m1(x))) * 64.0


@triton.jit
def twice_bfloat16(x):
    """Words that hold a bfloat16 number two times."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def twice_ue8m0(codes):
    """Words that hold the power of two of a UE8M0 byte two times, in bfloat16."""
    wide = codes.to(tl.int32)
    bits = tl.where(wide == 0, 0x40, tl.where(wide == 255, 0x7FC0, wide << 7))
    return bits | (bits << 16)


@triton.jit
def decode_e2m1_words(words, factors):
    """Bfloat16 numbers of the eight e2m1 codes of a word, from the lowest on, each times ``2^-126`` times a factor.

    A code's bits in their places of a bfloat16 are the number times 2^-126: the bias of e2m1 is 1, bfloat16's 127.

    Args:
        words: int32.
        factors: As of :func:`twice_bfloat16`, the shape of ``words``.
    """
    if INTERPRETED:
        factor = (factors << 16).to(tl.float32, bitcast=True)
        numbers = ()
        for i in tl.static_range(8):
            code = words >> (4 * i)
            number = ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True)
            numbers = numbers + (to_bfloat16(number * factor),)
        return numbers
    else:
        # A byte's codes at the top of two halves, then their signs and what is 6 below: the last table is (a & b) | c.
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 low, v, t;
                shl.b32 low, $8, 4;
                prmt.b32 v, low, $8, 0x4000;
                shr.u32 t, v, 6;
                and.b32 t, t, 0x01C001C0;
                lop3.b32 t, v, 0x80008000, t, 0xEA;
                mul.rn.bf16x2 t, t, $9;
                mov.b32 {$0, $1}, t;
                prmt.b32 v, low, $8, 0x5010;
                shr.u32 t, v, 6;
                and.b32 t, t, 0x01C001C0;
                lop3.b32 t, v, 0x80008000, t, 0xEA;
                mul.rn.bf16x2 t, t, $9;
                mov.b32 {$2, $3}, t;
                prmt.b32 v, low, $8, 0x6020;
                shr.u32 t, v, 6;
                and.b32 t, t, 0x01C001C0;
                lop3.b32 t, v, 0x80008000, t, 0xEA;
                mul.rn.bf16x2 t, t, $9;
                mov.b32 {$4, $5}, t;
                prmt.b32 v, low, $8, 0x7030;
                shr.u32 t, v, 6;
                and.b32 t, t, 0x01C001C0;
                lop3.b32 t, v, 0x80008000, t, 0xEA;
                mul.rn.bf16x2 t, t, $9;
                mov.b32 {$6, $7}, t;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, factors],
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=1,
        )


@triton.jit
def decode_e4m3_words(words, factors):
    """Bfloat16 numbers of the four e4m3 bytes of a word, from the lowest on, each times a factor; NaN codes are 480.

    Args:
        words: int32.
        factors: As of :func:`twice_ue8m0`, the shape of ``words``.
    """
    if INTERPRETED:
        factor = (factors << 16).to(tl.float32, bitcast=True)
        numbers = ()
        for i in tl.static_range(4):
            numbers = numbers + (to_bfloat16(decode_e4m3((words >> (8 * i) & 0xFF).to(tl.uint8)) * factor),)
        return numbers
    else:
        # As above. The biases are 7 and 127: 2^120, and then the factor.
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 v, t, bias;
                mov.b32 bias, 0x7B807B80;
                prmt.b32 v, $4, 0, 0x1404;
                shr.u32 t, v, 4;
                and.b32 t, t, 0x07F007F0;
                lop3.b32 t, v, 0x80008000, t, 0xEA;
                mul.rn.bf16x2 t, t, bias;
                mul.rn.bf16x2 t, t, $5;
                mov.b32 {$0, $1}, t;
                prmt.b32 v, $4, 0, 0x3424;
                shr.u32 t, v, 4;
                and.b32 t, t, 0x07F007F0;
                lop3.b32 t, v, 0x80008000, t, 0xEA;
                mul.rn.bf16x2 t, t, bias;
                mul.rn.bf16x2 t, t, $5;
                mov.b32 {$2, $3}, t;
            }""",
            "=h,=h,=h,=h,r,r",
            [words, factors],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
