"""Rows of padding: they write to no cache and change no bit of a row that is none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.loading import open_model
from deepinfer_plugins.model.make_checkpoint import make_checkpoint
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.model.step import NO_POSITION, Caches, Step

from .paged import PagedEngine, Request

# Around the window (16) and a page; the last request has one token.
LENGTHS = (17, 40, 1)
PAGES = {"window": 16, "compressed": 5, "index_key": 7, "compressor": 3, "draft": 6}
DEPTH = 3
PADDINGS = (1, 7, 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV41:
    folder = tmp_path_factory.mktemp("padding") / "checkpoint"
    make_checkpoint(folder, "tiny")
    return open_model(folder, load_ops(Want(Arch.CPU)), torch.device("cpu"), max_positions=256)


@pytest.fixture
def engine(model: DeepseekV41) -> PagedEngine:
    return PagedEngine(model, PAGES, draft=True)


@pytest.fixture
def requests(engine: PagedEngine) -> list[Request]:
    """All but the last token of each are computed."""
    rng = random.Random(7)
    vocab = engine.model.config.vocab_size
    requests = [engine.add([rng.randrange(3, vocab) for _ in range(length)]) for length in LENGTHS]
    engine.run([(request, length - 1) for request, length in zip(requests, LENGTHS) if length > 1])
    return requests


def padded(step: Step, count: int) -> Step:
    """The step with rows of padding, whose tokens and requests are anyone's."""
    rng = torch.Generator().manual_seed(count)

    def longer(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
        return torch.cat([x, torch.randint(low, high, (count,), generator=rng)])

    return replace(
        step,
        token_ids=longer(step.token_ids, 0, 1000),
        positions=longer(step.positions, NO_POSITION, NO_POSITION + 1),
        request=longer(step.request, 0, len(step.context_ids)),
        window_floor=None if step.window_floor is None else longer(step.window_floor, 0, 20),
    )


def memory(caches: Caches) -> Iterator[torch.Tensor]:
    """Every cache's pages."""
    for kind in Caches.__dataclass_fields__:
        yield from (cache.pages for cache in getattr(caches, kind).values())


def assert_padding_is_nothing(
    run: Callable[[Step], tuple[torch.Tensor, ...]], step: Step, caches: Caches
) -> None:
    """Results per row of ``run`` and every byte of the caches are the same with and without padding."""
    before = [pages.clone() for pages in memory(caches)]
    want = run(step)
    after = [pages.clone() for pages in memory(caches)]
    assert any(not torch.equal(one, other) for one, other in zip(before, after)), "nothing was written"
    for count in PADDINGS:
        for pages, old in zip(memory(caches), before):
            pages.copy_(old)
        got = run(padded(step, count))
        for one, other in zip(got, want, strict=True):
            assert len(one) == len(other) + count
            assert_same_bits(one[: len(other)], other, f"{count} rows of padding")
        for pages, old in zip(memory(caches), after):
            assert_same_bits(pages, old, f"caches after {count} rows of padding")


@pytest.mark.parametrize("drafts", [0, DEPTH], ids=["decode", "verify"])
def test_padding_of_a_step(engine: PagedEngine, requests: list[Request], drafts: int) -> None:
    vocab = engine.model.config.vocab_size
    rng = random.Random(drafts)
    plan = [(request, 1, [rng.randrange(vocab) for _ in range(drafts)]) for request in requests]
    step, caches = engine.make_step(plan)
    assert_padding_is_nothing(lambda step: (engine.model(step, caches),), step, caches)


def test_padding_of_a_draft(engine: PagedEngine, requests: list[Request]) -> None:
    engine.run([(request, 1) for request in requests])
    for request in requests:
        request.tokens.append(5)
    # As if the block were computed: its pages are allocated.
    _, caches = engine.make_step([(request, 1, [5] * DEPTH) for request in requests])
    step = Step(
        token_ids=torch.tensor([request.tokens[-1] for request in requests]),
        positions=torch.tensor([request.computed for request in requests]),
        request=torch.arange(len(requests)),
        context_ids=torch.empty(len(requests), 0, dtype=torch.int64),
        window_floor=torch.tensor([3, 30, 0]),
    )

    def run(step: Step) -> tuple[torch.Tensor, ...]:
        drafted = engine.model.draft(step, caches, DEPTH, lambda logits, _: logits.argmax(-1))
        return drafted.tokens, drafted.logits, drafted.confidence_logits

    assert_padding_is_nothing(run, step, caches)


def test_a_step_of_padding_alone(engine: PagedEngine, requests: list[Request]) -> None:
    step, caches = engine.make_step([(request, 1, ()) for request in requests])
    before = [pages.clone() for pages in memory(caches)]
    only = replace(step, positions=torch.full_like(step.positions, NO_POSITION))
    assert engine.model(only, caches).isfinite().all()
    for pages, old in zip(memory(caches), before):
        assert_same_bits(pages, old, "caches")
