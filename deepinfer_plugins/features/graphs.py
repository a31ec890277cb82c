"""CUDA graphs: a step captured once for some numbers of rows, and replayed for any number up to the largest.

A captured step is the same launches on the same memory every time, so the host no longer sets the pace. Whoever replays
it puts the step's tensors where the captured one found them, and fills up with rows of padding.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from deepinfer_plugins.features.sampling import SamplingState

T = TypeVar("T")


def sizes_up_to(most: int) -> list[int]:
    """Numbers of rows to capture for, ascending: powers of two, from 16 on also halfway between them, and ``most``.

    So fewer than half of the rows of a replay are padding, and capturing stays a matter of seconds.

    Args:
        most: The largest; 0 for none.
    """
    powers = {1 << power for power in range(most.bit_length())}
    halfway = {3 * power // 2 for power in powers if power >= 16}
    return sorted(size for size in powers | halfway | {most} if 0 < size <= most)


class Graphs(Generic[T]):
    """A function of a number of rows, captured for several.

    Args:
        function: Runs so many rows. It reads and writes tensors that stay where they are, never looks at what is in
            them on the host, and returns tensors.
        sizes: Numbers of rows to capture.
    """

    def __init__(self, function: Callable[[int], T], sizes: Sequence[int]) -> None:
        self._function = function
        self._sizes = sorted(sizes)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, T]] = {}

    def capture(self, pool: Any = None) -> Any:
        """Capture every size, the largest first: the others then fit into its memory.

        Args:
            pool: Memory of other graphs to share, none of which runs at the same time; None for its own.

        Returns:
            The memory that was taken.
        """
        for size in reversed(self._sizes):
            # What is compiled, loaded or allocated once must be there before.
            self._function(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # An engine's other threads may wait for the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = self._function(size)
            pool = graph.pool()
            self._captured[size] = graph, result
        return pool

    def size_for(self, count: int) -> int | None:
        """The captured size that ``count`` rows are replayed with; None if there is none so large."""
        place = bisect.bisect_left(self._sizes, count)
        if place == len(self._sizes) or self._sizes[place] not in self._captured:
            return None
        return self._sizes[place]

    def replay(self, size: int) -> T:
        """Run a captured size.

        Returns:
            What the function returned; the next replay of any size writes to the same memory.
        """
        graph, result = self._captured[size]
        graph.replay()
        return result


_FILTERS = frozenset({"min_p", "top_k", "top_p"})
_NOISE = frozenset({"noise"})
_REJECTION = frozenset({"rejection"})


class DraftGraphs(Generic[T]):
    """A function that samples drafts, captured for several numbers of requests and the usual ways of sampling.

    Which kernels run depends on what the requests use: a replay is of the least way that does it for all of them.
    Penalties, bias and the like have tables that may move, and no graph.

    Args:
        function: As of :class:`Graphs`; samples with ``state``.
        sizes: Numbers of requests to capture.
        state: Parameters of the requests.
        depth: Drafts of a request.
        rejection: Whether requests may be verified by rejection, which takes a table of their drafts' distributions.
    """

    def __init__(
        self,
        function: Callable[[int], T],
        sizes: Sequence[int],
        state: SamplingState,
        depth: int,
        rejection: bool,
    ) -> None:
        self._state = state
        self._depth = depth if rejection else 0
        ways = [frozenset[str](), _NOISE, _NOISE | _FILTERS]
        if rejection:
            ways += [_NOISE | _REJECTION, _NOISE | _FILTERS | _REJECTION]
        self._graphs = {way: Graphs(function, sizes) for way in ways}

    def capture(self, pool: Any = None) -> None:
        """Capture every size in every way; ``pool`` as of :meth:`Graphs.capture`."""
        if self._depth:
            self._state.reserve_record(self._depth)
        for way, graphs in self._graphs.items():
            with self._state.assuming(way):
                pool = graphs.capture(pool)

    def find(self, count: int) -> tuple[Graphs[T], int] | None:
        """The graphs that serve the state's requests, and their size for ``count`` of them; None if there are none."""
        used = self._state.features()
        for way, graphs in self._graphs.items():
            if used <= way:
                size = graphs.size_for(count)
                return None if size is None else (graphs, size)
        return None
