"""Sizes of graphs, and which of them serve which requests; that replays are right: tests of the engines' rooms."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_plugins.features.graphs import DraftGraphs, Graphs, sizes_up_to
from deepinfer_plugins.features.sampling import SamplingParams, SamplingState


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (0, []),
        (1, [1]),
        (3, [1, 2, 3]),
        (16, [1, 2, 4, 8, 16]),
        (63, [1, 2, 4, 8, 16, 24, 32, 48, 63]),
        (1000, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000]),
    ],
)
def test_sizes(most: int, sizes: list[int]) -> None:
    assert sizes_up_to(most) == sizes


def test_the_least_graph_that_serves_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[tuple[int, frozenset[str]]] = []
    state = SamplingState(4, 10, "cpu")

    def capture(self: Any, pool: Any = None) -> Any:
        captured.append((pool, state.features()))
        self._captured = dict.fromkeys(self._sizes)
        return len(captured)

    monkeypatch.setattr(Graphs, "capture", capture)
    graphs = DraftGraphs(lambda count: None, [1, 4], state, depth=2, rejection=True)
    assert graphs.find(1) is None
    graphs.capture()
    # Each shares the memory of those before it.
    assert [pool for pool, _ in captured] == [None, 1, 2, 3, 4]
    ways = [features for _, features in captured]
    assert state.features() == frozenset() and state.record is None

    def way(count: int) -> tuple[frozenset[str], int] | None:
        found = graphs.find(count)
        return None if found is None else (ways[list(graphs._graphs.values()).index(found[0])], found[1])

    assert way(1) == (frozenset(), 1)
    assert way(3) == (frozenset(), 4)
    assert way(5) is None
    state.add(0, SamplingParams(seed=1), [])
    assert way(2) == (frozenset({"noise"}), 4)
    state.add(1, SamplingParams(seed=1, top_k=3), [])
    assert way(2) == (frozenset({"noise", "min_p", "top_k", "top_p"}), 4)
    state.add(0, SamplingParams(seed=1, verify="rejection"), [])
    assert way(2) == (frozenset({"noise", "min_p", "top_k", "top_p", "rejection"}), 4)
    state.remove(1)
    assert way(2) == (frozenset({"noise", "rejection"}), 4)
    state.add(2, SamplingParams(seed=1, presence_penalty=1.0), [])
    assert way(2) is None
