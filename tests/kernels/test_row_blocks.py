"""The sums that the torch providers are built of."""

import math

import pytest
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels import row_blocks

from .conformance import Draw


@pytest.mark.parametrize("n", [0, 1, 16, 17])
def test_matmul_is_a_product(device: torch.device, n: int) -> None:
    draw = Draw(device)
    x, weight = draw.normal(n, 33, dtype=torch.float64), draw.normal(5, 33, dtype=torch.float64)
    got = row_blocks.matmul(x, weight)
    assert got.shape == (n, 5)
    for row in range(n):
        for column in range(5):
            want = math.fsum(a * b for a, b in zip(x[row].tolist(), weight[column].tolist()))
            assert got[row, column].item() == pytest.approx(want, abs=1e-13)


def test_a_large_weight_is_decoded_in_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(device)
    x, weight = draw.normal(3, 64, dtype=torch.float64), draw.normal(100, 64, dtype=torch.float64)
    whole = row_blocks.linear(x, 100, lambda part: weight[part], torch.float32)
    asked: list[tuple[int, int]] = []

    def rows_of_weight(part: slice) -> torch.Tensor:
        asked.append((part.start, part.stop))
        return weight[part]

    monkeypatch.setattr(row_blocks, "_WEIGHT_ELEMENTS", 64 * 45)
    parts = row_blocks.linear(x, 100, rows_of_weight, torch.float32)
    assert asked == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert_same_bits(parts, whole, "in parts")


@pytest.mark.parametrize("width", [1, 2, 3, 5, 128, 1000])
def test_sum_last_is_a_sum(device: torch.device, width: int) -> None:
    x = Draw(device).normal(3, 2, width, dtype=torch.float64)
    got = row_blocks.sum_last(x)
    assert got.shape == (3, 2)
    for row, total in zip(x.flatten(0, 1).tolist(), got.flatten().tolist()):
        assert total == pytest.approx(math.fsum(row), abs=1e-12)


def test_pad_rows_fills_with_the_value(device: torch.device) -> None:
    rows = torch.arange(5, device=device)
    assert row_blocks.pad_rows(rows, 4, -1).tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert row_blocks.pad_rows(rows, 5) is rows


@pytest.mark.parametrize("width", [1, 2, 3, 5, 128, 1000])
def test_numpy_and_torch_fold_alike(width: int) -> None:
    x = Draw(torch.device("cpu")).normal(3, width, dtype=torch.float64)
    folded = row_blocks._fold(x.clone())
    assert_same_bits(row_blocks.sum_last(x), folded, "by numpy")


def test_a_small_weight_is_decoded_once_until_it_is_written() -> None:
    with torch.inference_mode(False):
        weight, scales = torch.arange(6.0).view(3, 2), torch.tensor([1.0])
        calls: list[int] = []

        def decode() -> torch.Tensor:
            calls.append(1)
            return weight.double() * scales

        def again(stored: tuple[torch.Tensor, ...]) -> torch.Tensor:
            values = row_blocks.decoded(stored, 6, decode)
            assert values is not None
            assert_same_bits(values, weight.double() * scales, f"after {len(calls)} calls")
            return values

        first = again((weight, scales))
        assert again((weight[:], scales)) is first and len(calls) == 1
        weight[1, 1] = 7
        again((weight, scales))
        scales.fill_(3)
        again((weight, scales))
        assert again((weight, scales.clone())) is not first and len(calls) == 4


def test_what_may_change_unseen_or_is_large_is_not_kept() -> None:
    weight = torch.ones(3)
    assert weight.is_inference()
    assert row_blocks.decoded((weight,), 3, weight.double) is None
    with torch.inference_mode(False):
        weight = torch.ones(3)
        assert row_blocks.decoded((weight,), row_blocks._KEPT_ELEMENTS + 1, weight.double) is None
        kept = row_blocks.decoded((weight,), 3, weight.double)
        assert kept is not None
        owned = len(row_blocks._decoded)
        del weight
        assert len(row_blocks._decoded) == owned - 1
