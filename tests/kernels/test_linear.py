"""linear."""

import math

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels import row_blocks
from deepinfer_plugins.kernels.linear import cublas
from deepinfer_plugins.kernels.linear.torch import linear
from deepinfer_plugins.kernels.registry import NoProvider, choose

from .conformance import Case, Conformance, Draw


class TestLinear(Conformance):
    op = "linear"
    variants = ("bfloat16", "float32")
    wide = ("bfloat16, wide", "float32, wide")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        dtype, _, wide = variant.partition(", ")
        k = 264 if wide else 100
        args = {
            "x": draw.normal(num_rows, k),
            "weight": draw.normal(37, k),
            "out_dtype": getattr(torch, dtype),
        }
        return Case(args, rows=("x",))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_agrees_with_exact_sums(device: torch.device, dtype: torch.dtype) -> None:
    draw = Draw(device)
    x, weight = draw.normal(3, 200, scale=30), draw.normal(7, 200)
    want = [[math.fsum(a * b for a, b in zip(r, w)) for w in weight.tolist()] for r in x.tolist()]
    got = linear(x, weight, dtype).cpu()
    assert_same_bits(got, torch.tensor(want, dtype=torch.float64).to(dtype), "linear")


def test_a_large_weight_in_parts_changes_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = TestLinear().case(Draw(device), 9, "float32").args
    want = linear(**args)
    monkeypatch.setattr(row_blocks, "_WEIGHT_ELEMENTS", 1)
    assert_same_bits(linear(**args), want, "32 rows of the weight at a time")


@pytest.mark.parametrize("num_rows", [0, 1, 63])
def test_cublas_is_torch_and_agrees(num_rows: int) -> None:
    """What a CPU runs of it: a bfloat16 result; of float32, the types."""
    args = TestLinear().case(Draw(torch.device("cpu")), num_rows, "bfloat16").args
    torch.testing.assert_close(cublas.linear(**args), linear(**args), atol=2.0**-7, rtol=2.0**-7)
    x, weight = (args[name].to("meta") for name in ("x", "weight"))
    result = cublas.linear(x, weight, torch.float32)
    assert result.shape == (num_rows, len(weight)) and result.dtype == torch.float32


@pytest.mark.parametrize("arch", [Arch.SM90, Arch.SM100])
def test_cublas_serves_by_name_and_with_the_mode_off(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    off = Want(arch, batch_invariant=False)
    assert choose("linear", off).provider.name == "triton"
    monkeypatch.setenv("DEEPINFER_PLUGINS_LINEAR", "cublas")
    assert choose("linear", off).provider.name == "cublas"
    with pytest.raises(NoProvider, match="cublas: not batch-invariant"):
        choose("linear", Want(arch))
