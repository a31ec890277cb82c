"""Steps replayed from graphs, on a CPU: vLLM's own captures and dispatch, with a call in the place of each CUDA graph.

A replay calls what was captured again, with the tensors of its capture: it sees what lies in them by then, and fills
up with rows of padding. So what a graph would have kept of another batch shows as another token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .conftest import Engine, Reference, Start
from .test_speculation import generate, requests

# So few that many steps are padded, and prompts' steps have more rows than the largest.
SIZES = [1, 2, 8, 24, 56]


class Call:
    """What stands for a CUDA graph."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.replay = function
        self.replays = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was replayed: of the ``model`` or the ``draft``, and its size."""
    from vllm.v1.worker.gpu import cudagraph_utils

    from deepinfer_plugins.features import graphs

    noted: list[tuple[str, int]] = []

    def capture_model(self: Any, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
        modes = cudagraph_utils.CUDAGraphMode
        for desc in self._capture_descs[modes.FULL]:
            forward = create_forward_fn(desc, warmup=False)
            forward(modes.NONE)

            def replay(forward: Any = forward, size: int = desc.num_tokens) -> None:
                noted.append(("model", size))
                forward(modes.NONE)

            self.graphs[desc] = Call(replay)
        self._graphs_captured = True

    def capture_draft(self: Any, pool: Any = None) -> None:
        for size in self._sizes:
            self._captured[size] = Call(lambda: None), self._function(size)

    def replay_draft(self: Any, size: int) -> Any:
        assert size in self._captured
        noted.append(("draft", size))
        return self._function(size)

    monkeypatch.setattr(cudagraph_utils.CudaGraphManager, "capture", capture_model)
    monkeypatch.setattr(graphs.Graphs, "capture", capture_draft)
    monkeypatch.setattr(graphs.Graphs, "replay", replay_draft)
    return noted


def capture(engine: Engine) -> None:
    """What a worker on a GPU does before it serves."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    core = engine.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    config = runner.vllm_config.compilation_config
    config.cudagraph_mode = CUDAGraphMode.FULL
    config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = SIZES, SIZES[-1]
    for groups in runner.attn_groups:
        for group in groups:
            builder = group.get_metadata_builder(0)
            assert builder.get_cudagraph_support(runner.vllm_config, group.kv_cache_spec).name == "ALWAYS"
    runner.cudagraph_manager = ModelCudaGraphManager(
        runner.vllm_config, runner.device, CUDAGraphMode.FULL, runner.decode_query_len
    )
    runner.cudagraph_manager.capture(
        runner.model,
        runner.model_state,
        runner.input_buffers,
        None,
        runner.block_tables,
        runner.attn_groups,
        runner.kv_cache_config,
    )
    if runner.speculator is not None:
        runner.speculator.init_cudagraph_manager(CUDAGraphMode.FULL)
        runner.speculator.capture()


@pytest.fixture
def no_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None)
    yield


DRAFTS = {"method": "dspark", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("verify", "speculation", "sizes"),
    [
        ("rejection", DRAFTS, {8, 24}),
        ("coupling", DRAFTS | {"enable_adaptive_verification": True}, {8, 24}),
    ],
    ids=["rejection", "scheduled"],
)
def test_replayed_steps(
    start: Start,
    tiny: Reference,
    prompts: list[list[int]],
    calls: list[tuple[str, int]],
    no_pool: None,
    monkeypatch: pytest.MonkeyPatch,
    verify: str,
    speculation: dict[str, Any],
    sizes: set[int],
) -> None:
    monkeypatch.setenv("DEEPINFER_PLUGINS_VERIFY", verify)
    asked = requests(prompts)[::5]
    with start(tiny, max_num_seqs=8, max_num_batched_tokens=96, speculative_config=speculation) as engine:
        want = generate(engine, asked)
        assert not calls
        capture(engine)
        core = engine.llm.llm_engine.engine_core.engine_core
        manager, rows = core.model_executor.driver_worker.worker.model_runner.adaptive_verification, []
        if manager is not None:
            monkeypatch.setattr(manager, "observe", lambda *step: rows.append(step[0]))
        assert generate(engine, asked) == want
    # What a step cost is told of the rows that it ran, padding included.
    assert bool(rows) == (manager is not None)
    assert {size for size in rows if size <= SIZES[-1]} <= {*SIZES}
    assert {size for kind, size in calls if kind == "model"} >= sizes
    assert any(kind == "draft" for kind, _ in calls)


def test_which_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CUDAGraphMode

    from deepinfer_plugins.platforms import detect
    from deepinfer_plugins.platforms.chip import Defaults
    from deepinfer_plugins.platforms.sm90 import SM90
    from deepinfer_plugins.vllm_ext.v0_33 import defaults

    monkeypatch.setattr(detect, "detect", lambda accelerator=None: detect.Found(SM90, "H200"))
    none, full, decode = CUDAGraphMode.NONE, CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY
    pieces = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE
    for eager in (False, True):
        monkeypatch.setattr(SM90, "defaults", Defaults(eager=eager, cache_bytes=None))
        assert [defaults._graph_mode(mode) for mode in pieces] == [none if eager else full] * 2
        assert [defaults._graph_mode(mode) for mode in (none, full, decode)] == [none, full, decode]
    monkeypatch.setattr(SM90, "defaults", Defaults(eager=False, cache_bytes=None))
    monkeypatch.setenv("DEEPINFER_PLUGINS_EXPERTS", "torch")
    assert defaults._graph_mode(pieces[0]) == none
    for mode in (full, decode):
        with pytest.raises(ValueError, match=r"experts \(torch\).*--enforce-eager"):
            defaults._graph_mode(mode)
