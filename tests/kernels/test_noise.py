"""The noise against published vectors, other implementations and its distribution; exp and log against torch's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepinfer_plugins.kernels import elementary, noise

# Random123's known answers for philox4x32-10 (kat_vectors): counter, key, words.
KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 once more, on Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


def uniform(seed: int, position: int, stream: int, entry: int) -> float:
    """The documented layout, on Python's integers."""
    counter = (entry // 2, stream, position % 2**32, position // 2**32)
    words = philox(counter, (seed % 2**32, seed % 2**64 // 2**32))
    high, low = words[2 * (entry % 2) :][:2]
    return (high * 2**20 + low // 2**12 + 0.5) / 2**52


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_gives_the_known_answers(counter, key, words, device: torch.device) -> None:
    def columns(values):
        return tuple(torch.tensor([v], device=device) for v in values)

    got = noise.philox(columns(counter), columns(key))
    assert tuple(int(word) for word in got) == words
    assert philox(counter, key) == words


def test_uniforms_follow_the_documented_layout(device: torch.device) -> None:
    rows = [(0, 0, 0), (1, 5, 1), (-1, 2**32 + 3, 2), (2**63 - 1, 7, 0), (-(2**63), 2**40, 1), (2**32, 0, 0)]
    seed, position, stream = (torch.tensor(column, device=device) for column in zip(*rows))
    got = noise.uniform(seed, position, stream, 7)
    assert got.tolist() == [[uniform(*row, entry) for entry in range(7)] for row in rows]


def test_every_part_of_the_counter_matters(device: torch.device) -> None:
    base = (0x123456789ABCDEF, 2**33 + 5, 1)
    rows = [base]
    for bit in (0, 31, 32, 63):
        rows.append(((base[0] ^ 1 << bit) - (1 << 64 if bit == 63 else 0), *base[1:]))
    rows += [(base[0], base[1] ^ 1 << bit, base[2]) for bit in (0, 31, 32, 40)]
    rows += [(*base[:2], stream) for stream in (0, 2)]
    seed, position, stream = (torch.tensor(column, device=device) for column in zip(*rows))
    uniforms = noise.uniform(seed, position, stream, 1000)
    assert len(set(uniforms.flatten().tolist())) == uniforms.numel()
    correlation = torch.corrcoef(uniforms).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(1000)


def test_uniforms_are_inside_the_unit_interval_and_exact() -> None:
    words = torch.tensor([0, 2**52 - 1], dtype=torch.int64)
    ends = words.to(torch.float64).add_(0.5).mul_(2.0**-52)
    assert ends.tolist() == [2.0**-53, 1 - 2.0**-53]
    gumbel = -elementary.log(-elementary.log(ends))
    assert gumbel.tolist() == pytest.approx([-math.log(53 * math.log(2)), 53 * math.log(2)])


def test_gumbel_has_its_distribution(device: torch.device) -> None:
    rows = torch.arange(64, device=device)
    drawn = noise.gumbel(rows // 8, rows % 8, rows * 0, 2001).cpu().numpy().ravel()
    # Kolmogorov and Smirnov: the largest distance is below 1.95 / sqrt(n) in 99.9 % of cases.
    expected = np.exp(-np.exp(-np.sort(drawn)))
    steps = np.arange(1, drawn.size + 1) / drawn.size
    assert np.abs(expected - steps).max() < 1.95 / math.sqrt(drawn.size)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 700.0])
def test_exp_is_near_the_library(scale: float, device: torch.device) -> None:
    x = -torch.rand(9999, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device) * scale
    torch.testing.assert_close(elementary.exp(x), x.exp(), rtol=4 * 2.0**-52, atol=0)
    torch.testing.assert_close(elementary.exp(-x), (-x).exp(), rtol=4 * 2.0**-52, atol=0)


def test_log_is_near_the_library(device: torch.device) -> None:
    draw = torch.rand(9999, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    for x in (draw, draw * 1e-300, 1 - draw * 1e-12, draw * 40, 0.7 + draw * 0.02):
        torch.testing.assert_close(elementary.log(x), x.log(), rtol=4 * 2.0**-52, atol=0)


def test_exp_and_log_at_their_ends(device: torch.device) -> None:
    x = torch.tensor([0.0, -708.0, -709.0, -1e300, -math.inf], dtype=torch.float64, device=device)
    assert elementary.exp(x).tolist() == [1.0, pytest.approx(math.exp(-708)), 0.0, 0.0, 0.0]
    y = torch.tensor([0.0, 1.0, 2.0**-1022], dtype=torch.float64, device=device)
    assert elementary.log(y).tolist() == [-math.inf, 0.0, pytest.approx(-1022 * math.log(2))]


def test_an_element_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    x = torch.rand(37, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(device)
    for function, values in ((elementary.exp, -30 * x), (elementary.log, x)):
        alone = torch.cat([function(v) for v in values.split(1)])
        assert torch.equal(function(values), alone)
