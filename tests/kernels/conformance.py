"""The four tests that every provider of every operator must pass, and what they need."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.registry import NoProvider, choose
from deepinfer_plugins.kernels.spec import Bitwise, Provider, Within
from deepinfer_plugins.kernels.vendors import UnsupportedShape

# Spans two blocks of rows of the torch providers and fills neither the second block nor any tile.
BATCH = 23


def arch_of(device: torch.device) -> Arch:
    """The chip behind a torch device."""
    if device.type == "cpu":
        return Arch.CPU
    major = torch.cuda.get_device_capability(device)[0]
    return {9: Arch.SM90, 10: Arch.SM100}[major]


def reference(op: str) -> Callable[..., Any]:
    """The operator's definition."""
    function: Callable[..., Any] = getattr(
        importlib.import_module(f"deepinfer_plugins.kernels.{op}.reference"), op
    )
    return function


class Draw:
    """Seeded random tensors, drawn on the CPU so that every device gets the same."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator) * scale
        return drawn.to(dtype).to(self.device)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype).to(self.device)

    def order(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self._generator).to(self.device)

    def e4m3(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape, dtype=torch.float32, scale=8).to(torch.float8_e4m3fn)

    def scales(self, *shape: int) -> torch.Tensor:
        return self.ints(118, 132, *shape, dtype=torch.uint8)

    def pages(self, num_pages: int, page_size: int, record_bytes: int) -> torch.Tensor:
        """Pages full of NaN, interleaved with another cache: no stride is what a lone cache would have."""
        both = torch.full(
            (num_pages, page_size + 1, record_bytes + 5), 0xFF, dtype=torch.uint8, device=self.device
        )
        return both[:, 1:, 3:-2]


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one call.

    Args:
        args: By name.
        rows: Names of those whose first dimension is the rows.
        written: For an operator that returns nothing: names of those it writes, and ``read`` to see, from the
            arguments, what it wrote for each row.
    """

    args: dict[str, Any]
    rows: tuple[str, ...]
    written: tuple[str, ...] = ()
    read: Callable[[dict[str, Any]], tuple[torch.Tensor, ...]] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.args[self.rows[0]])

    def call(
        self, function: Callable[..., Any], rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Results of ``function``, on all rows or on some of them, in the order given."""
        args = dict(self.args)
        for name in self.rows:
            if rows is not None and args[name] is not None:
                args[name] = args[name][rows]
        for name in self.written:
            args[name] = args[name].clone()
        result = function(**args)
        if self.read:
            assert result is None
            return self.read(args)
        return result if isinstance(result, tuple) else (result,)


def check_agreement(provider: Provider, case: Case) -> None:
    """Fail unless the provider is as near to the definition as it claims."""
    results = zip(case.call(provider.load()), case.call(reference(provider.op)), strict=True)
    for place, (got, want) in enumerate(results):
        label = f"{provider.op} by {provider.name}, result {place}"
        match provider.agrees:
            case Bitwise():
                assert_same_bits(got, want, label)
            case Within(atol, rtol):
                assert got.dtype == want.dtype, label
                torch.testing.assert_close(got.double(), want.double(), atol=atol, rtol=rtol, msg=label)


def check_rows(function: Callable[..., Any], case: Case) -> None:
    """Fail unless a row's bits are the same alone, in small batches, and wherever it stands in a batch."""
    device = case.args[case.rows[0]].device
    together = case.call(function)
    order = torch.arange(case.num_rows, device=device)
    orders = [
        *order.split(1),
        *order.split(2),
        *order.split(7),
        *(order.roll(by) for by in range(1, len(order))),
    ]
    for rows in orders:
        for place, (got, want) in enumerate(zip(case.call(function, rows), together, strict=True)):
            assert_same_bits(got, want[rows], f"result {place}, rows {rows.tolist()} of {case.num_rows}")


class Conformance:
    """Base of an operator's tests; a subclass says what its arguments look like.

    ``conftest.py`` gives ``provider`` every provider of ``op``, ``num_rows`` each of ``sizes``, and ``variant`` each
    of ``variants`` and of ``wide``: sizes that a vendor's function takes, too slow for Triton's interpreter.
    """

    op: ClassVar[str]
    sizes: ClassVar[tuple[int, ...]] = (0, 1, 63)
    variants: ClassVar[tuple[str, ...]] = ("",)
    wide: ClassVar[tuple[str, ...]] = ()

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        raise NotImplementedError

    def test_signature_is_the_definitions(self, provider: Provider) -> None:
        asked = inspect.signature(reference(self.op), eval_str=True)
        assert inspect.signature(provider.load(), eval_str=True) == asked

    def test_agrees_as_claimed(
        self, provider: Provider, variant: str, num_rows: int, device: torch.device
    ) -> None:
        _skip_if_refused(provider, Want(arch_of(device), batch_invariant=False))
        with skipping_unsupported_shapes():
            check_agreement(provider, self.case(Draw(device), num_rows, variant))

    def test_row_does_not_depend_on_the_batch(
        self, provider: Provider, variant: str, device: torch.device
    ) -> None:
        _skip_if_refused(provider, Want(arch_of(device), batch_invariant=True))
        with skipping_unsupported_shapes():
            check_rows(provider.load(), self.case(Draw(device), BATCH, variant))

    def test_refusal_says_why(self, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
        for arch in set(Arch) - provider.archs:
            assert arch.value in provider.refusal(Want(arch, batch_invariant=False))
        lacking = dataclasses.replace(provider, archs=frozenset(Arch), needs=("no_such_module",))
        assert "no_such_module" in lacking.refusal(Want(Arch.CPU, batch_invariant=False))
        variant = dataclasses.replace(provider, archs=frozenset(Arch), batch_invariant=False)
        assert variant.refusal(Want(Arch.CPU, batch_invariant=True)) == "not batch-invariant"
        monkeypatch.setenv(f"DEEPINFER_PLUGINS_{self.op.upper()}", "no_such_provider")
        with pytest.raises(NoProvider, match=f"no_such_provider.*{self.op} .*{provider.name}"):
            choose(self.op, Want(Arch.CPU))


@contextlib.contextmanager
def skipping_unsupported_shapes() -> Iterator[None]:
    """Skip what a vendor's function takes no such sizes of."""
    try:
        yield
    except UnsupportedShape as error:
        pytest.skip(str(error))


def _skip_if_refused(provider: Provider, want: Want) -> None:
    if why := provider.refusal(want):
        pytest.skip(f"{provider.name}: {why}")
