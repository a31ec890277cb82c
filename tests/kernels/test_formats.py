"""Number formats, against their definitions written another way."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels import cache_layout, formats

from .conformance import Draw

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
groups = st.lists(floats, min_size=32, max_size=32)


def nearest_even(numbers: list[float], grid: list[float]) -> list[float]:
    """Nearest value of the grid, its last for all beyond; of two equally near the one whose place is even."""
    magnitudes = np.minimum(np.abs(np.array(numbers, np.float64)), grid[-1])
    distances = np.abs(magnitudes[:, None] - np.array(grid))
    near = distances == distances.min(1, keepdims=True)
    even = near & (np.arange(len(grid)) % 2 == 0)
    places = np.where(even.any(1), even.argmax(1), near.argmax(1))
    return [math.copysign(grid[place], number) for place, number in zip(places, numbers)]


def e4m3_value(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


E4M3 = [e4m3_value(byte) for byte in range(127)]


def least_power_of_two(quotient: float) -> float:
    mantissa, exponent = math.frexp(quotient)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def float32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def test_decodes_every_byte(device: torch.device) -> None:
    every = torch.arange(256, device=device).to(torch.uint8)
    powers = torch.tensor([2.0 ** (byte - 127) for byte in range(255)], dtype=torch.float64)
    assert_same_bits(formats.decode_ue8m0(every[:255]), powers, "ue8m0")
    assert formats.decode_ue8m0(every[255:]).isnan().all()
    values = torch.tensor([e4m3_value(byte) for byte in range(256)], dtype=torch.float64)
    for count in (1, 100):  # Many are looked up, few are converted.
        decoded = formats.decode_e4m3(every.expand(count, -1)).cpu()
        assert torch.equal(decoded.nan_to_num(1e9), values.nan_to_num(1e9).expand(count, -1))
    signed = [*E2M1, *(-value for value in E2M1)]
    pairs = torch.tensor(
        [[signed[byte % 16], signed[byte // 16]] for byte in range(256)], dtype=torch.float64
    )
    assert_same_bits(formats.decode_e2m1(every[:, None]), pairs, "e2m1")


@settings(deadline=None)
@given(
    st.lists(
        floats | st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.0]), min_size=2, max_size=2
    )
)
def test_e2m1_rounds_to_nearest_even(pair: list[float]) -> None:
    packed = formats.encode_e2m1(torch.tensor(pair, dtype=torch.float32))
    want = torch.tensor(nearest_even(pair, E2M1), dtype=torch.float64)
    assert packed.shape == (1,)
    assert_same_bits(formats.decode_e2m1(packed), want, f"e2m1 of {pair}")


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_e2m1_changes_only_at_the_ties(device: torch.device, tie: float) -> None:
    middle = torch.tensor(tie, dtype=torch.float32, device=device)
    around = torch.stack([middle.nextafter(middle * 0), middle, middle.nextafter(middle * 2), -middle])
    want = torch.tensor(nearest_even(around.tolist(), E2M1), dtype=torch.float64)
    assert_same_bits(formats.decode_e2m1(formats.encode_e2m1(around)), want, str(tie))


@settings(max_examples=100, deadline=None)
@given(groups)
def test_mxfp8_follows_its_definition(group: list[float]) -> None:
    values, scales = formats.encode_mxfp8(torch.tensor([group]))
    amax = max(max(map(abs, group)), float32(1e-4))
    scale = least_power_of_two(float32(amax / 448))
    assert scales.tolist() == [[round(math.log2(scale)) + 127]]
    want = torch.tensor([nearest_even([x / scale for x in group], E4M3)], dtype=torch.float64)
    assert_same_bits(formats.decode_e4m3(values), want, "e4m3")
    assert_same_bits(formats.decode_mxfp8(values, scales), want * scale, "decoded")


@settings(max_examples=100, deadline=None)
@given(groups)
def test_mxfp4_follows_its_definition(group: list[float]) -> None:
    packed, scales = formats.encode_mxfp4(torch.tensor([group]))
    amax = max(max(map(abs, group)), 6 * 2.0**-126)
    scale = least_power_of_two(float32(amax / 6))
    want = torch.tensor([nearest_even([x / scale for x in group], E2M1)], dtype=torch.float64)
    assert scales.tolist() == [[round(math.log2(scale)) + 127]]
    assert_same_bits(formats.decode_mxfp4(packed, scales), want * scale, "decoded")


@settings(max_examples=100, deadline=None)
@given(st.lists(floats, min_size=16, max_size=16))
def test_fp4_follows_its_definition(group: list[float]) -> None:
    packed, scales = formats.encode_fp4(torch.tensor([group]))
    amax = np.float32(max(max(map(abs, group)), 6 * 2.0**-9))
    with np.errstate(over="ignore"):
        (scale,) = nearest_even([float(min(amax * np.float32(1 / 6), np.float32(448)))], E4M3)
        quotients = np.array(group, np.float32) * (np.float32(1) / np.float32(scale))
    want = torch.tensor([nearest_even(quotients.tolist(), E2M1)], dtype=torch.float64) * scale
    assert formats.decode_e4m3(scales).tolist() == [[scale]]
    assert_same_bits(formats.decode_fp4(packed, scales), want, "decoded")


@pytest.mark.parametrize("exponent", [-126, -20, 0, 1, 100])
def test_an_exact_power_of_two_is_not_rounded_up(device: torch.device, exponent: int) -> None:
    group = torch.full((1, 32), 6 * 2.0**exponent, dtype=torch.float32, device=device)
    assert formats.encode_mxfp4(group)[1].tolist() == [[exponent + 127]]
    above = group.nextafter(group * 2)
    assert formats.encode_mxfp4(above)[1].tolist() == [[exponent + 128]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_does_not_vanish(device: torch.device, bad: float) -> None:
    group = torch.ones(1, 32, device=device)
    group[0, 3] = bad
    assert formats.decode_mxfp8(*formats.encode_mxfp8(group)).isnan().any()
    assert formats.decode_mxfp4(*formats.encode_mxfp4(group)).isnan().any()


@pytest.mark.parametrize("decode", [formats.decode_e4m3, formats.decode_ue8m0])
def test_an_unwritten_byte_is_nan(device: torch.device, decode: object) -> None:
    assert callable(decode)
    assert decode(torch.full((3,), 0xFF, dtype=torch.uint8, device=device)).isnan().all()


def test_records_have_the_bytes_of_the_layout(device: torch.device) -> None:
    x = Draw(device).normal(3, 5, 64)
    window, compressed, index_key = (
        encode(x) for encode in (formats.encode_window, formats.encode_compressed, formats.encode_index_key)
    )
    assert window.shape == (3, 5, cache_layout.window_bytes(64))
    assert compressed.shape == (3, 5, cache_layout.compressed_bytes(64))
    assert index_key.shape == (3, 5, cache_layout.index_key_bytes(64))
    for decode, record, step in [
        (formats.decode_window, window, 1 / 16),
        (formats.decode_compressed, compressed, 1 / 4),
        (formats.decode_index_key, index_key, 1 / 2),
    ]:
        error = (decode(record, 64) - x.double()).abs().amax() / x.double().abs().amax()
        assert 0 < error < step


def test_a_weight_may_end_inside_a_block(device: torch.device) -> None:
    draw = Draw(device)
    weight, scales = draw.e4m3(40, 64), draw.scales(2, 2)
    got = formats.decode_mxfp8_weight(weight, scales).cpu()
    for row, column in [(0, 0), (31, 31), (32, 32), (39, 63)]:
        scale = 2.0 ** (int(scales[row // 32, column // 32]) - 127)
        assert got[row, column] == float(weight[row, column].float()) * scale


def test_a_group_that_does_not_fit_is_an_error(device: torch.device) -> None:
    with pytest.raises(ValueError, match="groups of 32, but it is 40"):
        formats.encode_mxfp8(torch.zeros(1, 40, device=device))
