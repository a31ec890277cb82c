"""A step never waits for the device: its launches follow from shapes alone, so that a graph can hold it.

The model runs on the meta device, whose tensors have no values, with the Triton providers of a GPU, whose launches are
noted instead of made. What looks at a value, or sends one from the host, fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.kernels.catalogue import load_ops, not_capturable
from deepinfer_plugins.model.caches import cache_specs
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.model.presets import preset
from deepinfer_plugins.model.step import Caches, Paged, Step

META = torch.device("meta")
DEPTH = 5
Launches = list[tuple[str, Any]]


class NoTransfers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where a tensor with values meets those without."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor)]
        assert func not in (
            torch.ops.aten.nonzero.default,
            torch.ops.aten._local_scalar_dense.default,
        ), f"{func} waits for the device"
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.is_meta:
            sent = [x for x in given if not x.is_meta]
            assert not sent, f"{func} copies {[tuple(x.shape) for x in sent]} from the host"
        return result


def no_transfers() -> NoTransfers:
    return NoTransfers()  # type: ignore[no-untyped-call]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernels that were launched, and their grids; none of them runs."""
    jit = pytest.importorskip("triton.runtime.jit")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    noted: Launches = []

    def launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        assert not callable(grid), f"{self.fn.__name__} works out its grid by itself"
        noted.append((self.fn.__name__, tuple(grid)))

    def launch_interpreted(self: Any, *args: Any, **kwargs: Any) -> None:
        noted.append((self.fn.__name__, tuple(self.grid)))

    def make_tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        assert device != META, f"{args} is sent from the host"
        return tensor(*args, **kwargs, device=device)  # type: ignore[misc]

    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", make_tensor)
    monkeypatch.setattr(jit.JITFunction, "run", launch)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_interpreted)
    return noted


@pytest.fixture(scope="module")
def model() -> DeepseekV41:
    config = preset("release")
    size = config.engram_compressed_vocab_size
    with torch.device("cpu"):
        return DeepseekV41(
            config,
            load_ops(Want(Arch.SM90, batch_invariant=False)),
            device=META,
            max_positions=1000,
            vocabulary=CompressedVocabulary(np.arange(config.vocab_size, dtype=np.int64) % size, size),
            draft=True,
        )


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device=META)


def make_step(model: DeepseekV41, num_rows: int, num_requests: int) -> tuple[Step, Caches]:
    table = torch.empty((num_requests, 63), dtype=torch.int32, device=META)
    kinds: dict[str, dict[int, Paged]] = {field.name: {} for field in fields(Caches)}
    for spec in cache_specs(model.config, draft=True):
        pages = torch.empty((1000, 64, spec.record_bytes), dtype=torch.uint8, device=META)
        kinds[spec.kind][spec.layer] = Paged(pages, table)
    context = ints(num_requests, model.config.engram_max_ngram_size - 1)
    step = Step(ints(num_rows), ints(num_rows), ints(num_rows), context, window_floor=ints(num_rows))
    return step, Caches(**kinds)


@pytest.mark.parametrize("rows", [1, 1000])
def test_a_step_looks_at_no_value(model: DeepseekV41, launches: Launches, rows: int) -> None:
    step, caches = make_step(model, rows, 7)
    with torch.inference_mode(), no_transfers():
        hidden = model(step, caches)
        logits = model.logits(hidden)
    assert hidden.shape == (rows, model.config.hidden_size)
    assert logits.shape == (rows, model.config.vocab_size)
    assert {"_attend", "_select", "_grouped", "_store_window"} <= {name for name, _ in launches}


@pytest.mark.parametrize("requests", [1, 63])
def test_a_draft_looks_at_no_value(model: DeepseekV41, launches: Launches, requests: int) -> None:
    step, caches = make_step(model, requests, requests)
    with torch.inference_mode(), no_transfers():
        drafted = model.draft(step, caches, DEPTH, lambda logits, _: logits.argmax(-1))
        confidences = drafted.confidences(torch.empty(DEPTH, dtype=torch.float64, device=META))
    assert confidences.shape == (requests, DEPTH)
    assert launches


@pytest.mark.parametrize("rows", [1, 63])
def test_sampling_looks_at_no_value(launches: Launches, rows: int) -> None:
    ops = load_ops(Want(Arch.SM90, batch_invariant=False))
    logits = torch.empty((rows, 1000), device=META)
    float64s = torch.empty(rows, dtype=torch.float64, device=META)
    filters = (float64s, float64s, ints(rows), float64s)
    with torch.inference_mode(), no_transfers():
        ops.sample(logits, *filters, ints(rows), ints(rows), ints(rows))
        ops.filter_log_probs(logits, *filters)
        ops.accept_or_resample(logits, *filters, ints(rows), ints(rows), ints(rows), ints(rows), logits)
    assert len(launches) == 3


def test_all_chosen_providers_of_a_gpu_can_be_captured() -> None:
    assert not_capturable(Want(Arch.SM90, batch_invariant=False)) == []
    assert "experts (torch)" in not_capturable(Want(Arch.SM100))


def test_it_notices_a_look(launches: Launches) -> None:
    values = ints(3)
    looks: list[Callable[[], Any]] = [
        lambda: values[0].item(),
        values.tolist,
        values.nonzero,
        lambda: values[values > 0],
        lambda: torch.where(values > 0, values, torch.tensor([1, 2, 3]).to(META)),
        lambda: torch.repeat_interleave(values),
        lambda: torch.tensor([1, 2, 3], device=META),
    ]
    for look in looks:
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), no_transfers():
            look()
