"""What the tests of all operators share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepinfer_plugins.kernels import catalogue  # noqa: F401 (registers every provider)
from deepinfer_plugins.kernels.registry import providers

from .conformance import Conformance

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", [torch.device(name) for name in DEVICES], ids=str)
    tests = metafunc.cls
    if tests is None or not issubclass(tests, Conformance):
        return
    if "provider" in metafunc.fixturenames:
        metafunc.parametrize("provider", providers(tests.op), ids=lambda provider: provider.name)
    if "num_rows" in metafunc.fixturenames:
        metafunc.parametrize("num_rows", tests.sizes)
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", (*tests.variants, *tests.wide))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote yet holds NaN, or the greatest integer."""

    def poison(allocate: Any) -> Any:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = allocate(*args, **kwargs)
            if tensor.dtype.itemsize == 1:
                tensor.view(torch.uint8).fill_(0xFF)
            elif tensor.dtype.is_floating_point:
                tensor.fill_(torch.nan)
            else:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return poisoned

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
