"""Steps and drafts replayed from graphs, on a CPU: a call in the place of each CUDA graph.

A replay calls what was captured again, with the tensors of its capture: it sees what lies in them by then, and fills
up with rows of padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.features import graphs
from deepinfer_plugins.features.sampling import SamplingParams
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.caches import cache_specs
from deepinfer_plugins.model.loading import open_model
from deepinfer_plugins.model.make_checkpoint import make_checkpoint
from deepinfer_plugins.model.network import DeepseekV41

REQUESTS, LENGTH, PAGE, DEPTH = 4, 64, 8, 3
SIZES = [1, 2, 4]
PARAMETERS = (
    SamplingParams(seed=1, temperature=0),
    SamplingParams(seed=2),
    SamplingParams(seed=3, temperature=0.7, top_k=40, top_p=0.9),
    SamplingParams(seed=4, verify="rejection"),
)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that were replayed. A replay spoils what the last one returned, as on a GPU, where both share memory."""
    noted: list[int] = []
    returned: list[torch.Tensor] = []

    def capture(self: Any, pool: Any = None) -> None:
        self._captured = {size: (None, self._function(size)) for size in self._sizes}

    def replay(self: Any, size: int) -> Any:
        assert size in self._captured
        noted.append(size)
        for part in returned:
            part.fill_(-1)
        result = self._function(size)
        returned[:] = result or ()
        return result

    monkeypatch.setattr(graphs.Graphs, "capture", capture)
    monkeypatch.setattr(graphs.Graphs, "replay", replay)
    return noted


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV41:
    folder: Path = tmp_path_factory.mktemp("graphs") / "checkpoint"
    make_checkpoint(folder, "tiny")
    return open_model(folder, load_ops(Want(Arch.CPU)), torch.device("cpu"), LENGTH + DEPTH)


@pytest.fixture
def runner(network: DeepseekV41, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of SGLang's runner as is asked for: requests in even rows of its table, with pages in any order."""
    monkeypatch.setenv("DEEPINFER_TEST_POISON_CACHES", "1")
    from deepinfer_plugins.sglang_ext import attention
    from deepinfer_plugins.sglang_ext.cache import CachePool
    from deepinfer_plugins.sglang_ext.sampling import Sampling

    monkeypatch.setattr(attention, "get_spec", lambda: SimpleNamespace(speculative_algorithm="DSPARK"))
    generator = torch.Generator().manual_seed(1)
    pages = 2 * REQUESTS * LENGTH // PAGE
    pool = CachePool(pages * PAGE, pages * PAGE, PAGE, "cpu", cache_specs(network.config, draft=True))
    mapping = torch.arange((pages + 1) * PAGE)
    mapping[PAGE:] = (
        (torch.randperm(pages, generator=generator) + 1)[:, None] * PAGE + torch.arange(PAGE)
    ).flatten()
    pool.register_mapping(mapping)
    table = torch.zeros(2 * REQUESTS, LENGTH, dtype=torch.int32)
    order = torch.randperm(pages, generator=generator)[: REQUESTS * LENGTH // PAGE] + 1
    table[::2] = (order[:, None] * PAGE + torch.arange(PAGE)).view(REQUESTS, LENGTH).int()
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        model_config=SimpleNamespace(vocab_size=network.config.vocab_size),
        device="cpu",
        model=SimpleNamespace(network=network, sampling=Sampling(network.ops, "rejection", False)),
    )
    runner.attn_backend = attention.StepBackend(runner, network.config.engram_max_ngram_size - 1)
    state = runner.model.sampling.prepare(runner)
    for place, params in enumerate(PARAMETERS):
        state.add(2 * place, params, [])
    return runner


def worker_of(runner: Any) -> Any:
    """A worker without what it would ask SGLang for."""
    from deepinfer_plugins.sglang_ext.worker import DraftingWorker

    worker = DraftingWorker.__new__(DraftingWorker)
    worker._runner, worker._network, worker._sampling = runner, runner.model.network, runner.model.sampling
    worker.depth, worker._graphs, worker._outcomes = DEPTH, None, deque()
    return worker


def inputs_of(count: int, first: int, rows: int, seed: int = 0) -> Any:
    """The next rows of the first requests."""
    from deepinfer_plugins.sglang_ext.attention import Inputs

    generator = torch.Generator().manual_seed(seed)
    request = torch.arange(count).repeat_interleave(rows)
    return Inputs(
        slots=2 * torch.arange(count),
        request=request,
        token_ids=torch.randint(3, 1000, (count * rows,), generator=generator),
        positions=first + torch.arange(rows).repeat(count),
        first=torch.full((count,), first),
        longest=first + rows,
    )


def contents(pool: Any) -> list[torch.Tensor]:
    """Every cache, without the page of padding, and the tokens."""
    pages = [
        kind[1:].clone() for part in (pool.full_kv_pool, pool.swa_kv_pool) for kind in part.pages.values()
    ]
    return [*pages, pool.token_ids[PAGE:].clone()]


def restore(pool: Any, saved: list[torch.Tensor]) -> None:
    pages = [kind for part in (pool.full_kv_pool, pool.swa_kv_pool) for kind in part.pages.values()]
    for kind, old in zip(pages, saved[:-1], strict=True):
        kind[1:] = old
    pool.token_ids[PAGE:] = saved[-1]


def assert_same(
    runner: Any, run: Callable[[], Any], capture: Callable[[], None], other: Callable[[], Any]
) -> None:
    """``run`` gives the same and writes the same after ``capture``, whatever ``other`` has left behind."""
    pool = runner.token_to_kv_pool
    saved = contents(pool)
    want = [part.clone() for part in run()]
    after = contents(pool)
    restore(pool, saved)
    capture()
    for part, old in zip(contents(pool), saved, strict=True):
        assert_same_bits(part, old, "what capturing wrote")
    for _ in range(2):
        other()
        restore(pool, saved)
        for got, expected in zip(run(), want, strict=True):
            assert_same_bits(got, expected, "result")
        for part, old in zip(contents(pool), after, strict=True):
            assert_same_bits(part, old, "caches")


@pytest.mark.parametrize("count", [1, 3])
def test_steps(runner: Any, replayed: list[int], count: int) -> None:
    backend = runner.attn_backend
    backend.run(inputs_of(REQUESTS, 0, 37))
    inputs = inputs_of(count, 37, 1 + DEPTH, seed=count)
    assert_same(
        runner,
        lambda: [backend.run(inputs)],
        lambda: backend.capture(SIZES, 1 + DEPTH),
        lambda: backend.run(inputs_of(REQUESTS, 30, 1 + DEPTH)),
    )
    assert replayed == [16, {1: 1, 3: 4}[count] * (1 + DEPTH)] * 2
    # Other rows than those of decoding: a part of a prompt, and one that is too long.
    backend.run(inputs_of(2, 41, 3))
    assert backend.num_rows == 2 * (1 + DEPTH)
    backend.run(inputs_of(4, 41, 5))
    assert replayed[4:] == [2 * (1 + DEPTH)] and backend.num_rows == 4 * 5


@pytest.mark.parametrize("count", [1, 3])
def test_drafts(runner: Any, replayed: list[int], count: int) -> None:
    runner.attn_backend.run(inputs_of(REQUESTS, 0, 37))
    worker, inputs = worker_of(runner), inputs_of(count, 37, 1, seed=count)
    state = runner.model.sampling.state

    def run() -> list[torch.Tensor]:
        drafts = worker._replay_draft(inputs.slots, inputs.token_ids, inputs.positions, 37 + DEPTH)
        return [*drafts, *(table[inputs.slots] for table in state.record or ())]

    def capture() -> None:
        runner.attn_backend.captured = tuple(SIZES)
        worker._capture()

    all_of_them = inputs_of(REQUESTS, 30, 1)

    def other() -> None:
        worker._replay_draft(
            all_of_them.slots, all_of_them.token_ids, all_of_them.positions, all_of_them.longest + DEPTH
        )

    assert_same(runner, run, capture, other)
    assert replayed == [4, {1: 1, 3: 4}[count]] * 2
    drafts = run()
    kept = [part.clone() for part in drafts]
    other()
    for part, old in zip(drafts, kept, strict=True):
        assert_same_bits(part, old, "a result after the next replay")


def test_features_without_a_graph(runner: Any, replayed: list[int]) -> None:
    worker, inputs = worker_of(runner), inputs_of(1, 0, 1)
    runner.attn_backend.captured = tuple(SIZES)
    worker._capture()
    runner.model.sampling.state.add(0, SamplingParams(seed=1, repetition_penalty=1.5), [])
    for slots, is_replayed in (([0], False), ([2, 0], False), ([2], True), ([0, 4], False)):
        replayed.clear()
        decoding = SimpleNamespace(is_extend=lambda: False)
        batch = SimpleNamespace(forward_mode=decoding, req_pool_indices_cpu=torch.tensor(slots))
        runner.model.sampling.admit(runner, batch)
        worker._replay_draft(inputs.slots, inputs.token_ids, inputs.positions, 1 + DEPTH)
        assert bool(replayed) == is_replayed, slots


@pytest.mark.parametrize(
    ("verify", "depth", "sizes", "takes"),
    [
        ("auto", 5, [1, 4], True),
        ("rejection", 5, [1, 4], True),
        ("coupling", 5, [1, 4], False),
        ("auto", 5, [], False),
        ("auto", None, [1, 4], False),
    ],
)
def test_caches_leave_room_for_what_drafts_are_sampled_from(
    network: DeepseekV41,
    monkeypatch: pytest.MonkeyPatch,
    verify: str,
    depth: int | None,
    sizes: list[int],
    takes: bool,
) -> None:
    from sglang.srt import runtime_context

    from deepinfer_plugins.sglang_ext import cache, runtime

    schedule = SimpleNamespace(swa_full_tokens_ratio=0.25, max_running_requests=REQUESTS)
    spec = SimpleNamespace(speculative_num_draft_tokens=None if depth is None else 1 + depth)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    monkeypatch.setattr(runtime, "get_schedule", lambda: schedule)
    monkeypatch.setattr(runtime, "get_spec", lambda: spec)
    monkeypatch.setattr(runtime, "_graph_sizes", lambda: sizes)
    monkeypatch.setattr(cache, "compute_swa_request_cap", lambda **_: PAGE)
    monkeypatch.setenv("DEEPINFER_PLUGINS_VERIFY", verify)
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "0")
    reserved = runtime._record_bytes(network.config)
    assert reserved == (4 * (REQUESTS + 1) * 5 * network.config.vocab_size if takes else 0)

    def tokens(available: int, reserved: int) -> int:
        kvc = SimpleNamespace(page_size=PAGE, sliding_window_size=PAGE, attn_dp_size=1, device="cuda")
        pools = cache.Sizes(kvc, cache_specs(network.config, draft=True), reserved)
        return pools.calculate_pool_sizes(available, PAGE).max_total_num_tokens

    assert tokens(10 << 20, reserved) == tokens((10 << 20) - reserved, 0) > 0
    assert (tokens(10 << 20, reserved) < tokens(10 << 20, 0)) == takes


def test_which_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_plugins.platforms import detect
    from deepinfer_plugins.platforms.chip import Defaults
    from deepinfer_plugins.platforms.sm90 import SM90
    from deepinfer_plugins.sglang_ext.hooks import _no_graphs

    monkeypatch.setattr(detect, "detect", lambda accelerator=None: detect.Found(SM90, "H200"))
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "0")
    for eager in (False, True):
        monkeypatch.setattr(SM90, "defaults", Defaults(eager=eager, cache_bytes=None))
        assert bool(_no_graphs("full", False)) == eager
        assert _no_graphs("full", True) == ""
        assert _no_graphs("disabled", True)
    with pytest.raises(ValueError, match="--cuda-graph-backend-decode breakable"):
        _no_graphs("breakable", True)
    monkeypatch.setenv("DEEPINFER_PLUGINS_EXPERTS", "torch")
    assert "experts (torch)" in _no_graphs("full", False)
    with pytest.raises(ValueError, match=r"experts \(torch\)"):
        _no_graphs("full", True)
