"""``features.schedule`` in the place of vLLM's manager of adaptive verification.

vLLM's needs full CUDA graphs and times them; this one takes the step as it is, with graphs or without. The runner asks
it how many drafts the step verifies before it lays the step out, and on the device it says how many of each request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deepinfer_plugins.core.settings import Settings
from deepinfer_plugins.features import cost_curve
from deepinfer_plugins.features.cost_curve import Clock, CostModel
from deepinfer_plugins.features.schedule import Plan, VerificationSchedule, split_on_device
from deepinfer_plugins.vllm_ext.v0_33 import api

# Of a request that drafted nothing in the step.
NO_CONFIDENCE = -1.0


class _Copy(NamedTuple):
    """Confidences on their way to the host."""

    step: int
    slots: npt.NDArray[np.intp]
    confidences: torch.Tensor
    arrived: Callable[[], bool]


class Budget(api.AdaptiveVerificationManager):
    """What the model runner calls ``adaptive_verification``.

    Args:
        req_states: The runner's record of every request.
        query_start_loc: The runner's buffer for the first row of each request, int32 ``[max_requests + 1]``.
        max_total_logits: Rows of logits that a step may have.
        schedule: Decides.
    """

    def __init__(  # pylint: disable=super-init-not-called
        self,
        req_states: api.RequestState,
        query_start_loc: torch.Tensor,
        max_total_logits: int,
        schedule: VerificationSchedule,
    ) -> None:
        self.req_states = req_states
        self.query_start_loc = query_start_loc
        self.num_bonus_tokens = 1
        self.schedule = schedule
        self._max_total_logits = max_total_logits
        # Read by the method of vLLM's that lays out the host's side of the batch.
        self._batch_budget: tuple[dict[str, int], dict[str, int], int] | None = None
        self._plan: Plan | None = None
        # Of the drafts that each slot has now. A draft which was never made ranks last.
        self._confidences = torch.zeros(
            (req_states.max_num_reqs, schedule.depth), dtype=torch.float32, device=req_states.device
        )
        self._copies: deque[_Copy] = deque()
        # Milliseconds on the host since they were last asked for.
        self._planning_ms = 0.0

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """None: :func:`provide_curve` times steps once graphs are captured, or reads a file."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Nothing to take from them."""

    def add_request(self, req_idx: int) -> None:
        self.schedule.forget(req_idx)
        self._confidences[req_idx].zero_()

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Rows of the step, with the budget chosen."""
        started = time.perf_counter()
        names = list(num_tokens_per_req)
        drafts = {name: len(draft_tokens.get(name, ())) for name in names}
        others = {name: num_tokens_per_req[name] - drafts[name] for name in names}
        slots = np.array([self.req_states.req_id_to_index[name] for name in names])
        computed = self.req_states.num_computed_tokens_np[slots] + np.array(list(others.values()))
        sampling = int(np.count_nonzero(computed >= self.req_states.prefill_len.np[slots]))
        rows = sum(others.values())
        self._receive()
        self._plan = self.schedule.plan(
            slots,
            list(drafts.values()),
            rows=rows,
            sampling=sampling,
            max_drafts=self._max_total_logits - len(names),
            on_device=True,
        )
        self._batch_budget = drafts, others, self._plan.budget
        self._planning_ms += 1e3 * (time.perf_counter() - started)
        return rows + self._plan.budget

    def reallocate_drafts(
        self, req_ids: list[str], idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int, None]:
        """Where each request's rows of logits and rows start, with its share of the budget.

        Returns:
            int32 ``[requests + 1]``; int32 ``[max_requests + 1]``; the budget; nothing on its way to the host.
        """
        assert self._batch_budget is not None
        (drafts, others, budget), self._batch_budget = self._batch_budget, None
        device = idx_mapping.device

        def send(values: dict[str, int]) -> torch.Tensor:
            ordered = torch.tensor([values[name] for name in req_ids], dtype=torch.int32)
            return ordered.to(device, non_blocking=True)

        verified = split_on_device(self._confidences[idx_mapping], send(drafts), budget)
        num_requests = len(req_ids)
        starts = self.query_start_loc
        starts[0] = 0
        torch.cumsum(verified + send(others), dim=0, out=starts[1 : num_requests + 1])
        starts[num_requests + 1 :] = sum(others.values()) + budget
        logits = torch.zeros(num_requests + 1, dtype=torch.int32, device=device)
        torch.cumsum(verified + self.num_bonus_tokens, dim=0, out=logits[1:])
        return logits, starts, budget, None

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: api.InputBatch) -> None:
        """Keep what the step drafted with, and start its copy to the host.

        Args:
            confidence_probs: fp32 ``[max_requests, depth]``, by request of the batch.
            input_batch: The batch; requests that drafted nothing have :data:`NO_CONFIDENCE`.
        """
        slots, confidences = input_batch.idx_mapping_np, confidence_probs[: input_batch.num_reqs].clone()
        self._confidences[input_batch.idx_mapping] = confidences.clamp(min=0)
        # The runner asks for no budget in a step without drafts, but every step is planned.
        plan, self._plan = self._plan, None
        if plan is None:
            plan = self.schedule.plan(slots, np.zeros_like(slots), on_device=True)
        if confidences.is_cuda:
            host = torch.empty(confidences.shape, dtype=confidences.dtype, pin_memory=True)
            host.copy_(confidences, non_blocking=True)
            event = torch.cuda.current_stream().record_event()
            self._copies.append(_Copy(plan.step, slots, host, event.query))
        else:
            self._copies.append(_Copy(plan.step, slots, confidences, lambda: True))

    def observe(self, rows: int, requests: int, forward_ms: float, rest_ms: float) -> None:
        """Take in how long a step took, its forward and all the rest, for the cost of those to come."""
        if self.schedule.cost is not None:
            self.schedule.cost.observe_forward(rows, forward_ms)
            self.schedule.cost.observe_sampler(requests, rest_ms)

    def take_planning_ms(self) -> float:
        """Milliseconds that the host has spent on budgets since this was last asked."""
        spent, self._planning_ms = self._planning_ms, 0.0
        return spent

    def _receive(self) -> None:
        """Record the confidences that have come."""
        while self._copies and self._copies[0].arrived():
            copy = self._copies.popleft()
            values = copy.confidences.numpy()
            drafted = values[:, 0] != NO_CONFIDENCE
            self.schedule.record(copy.slots[drafted], values[drafted], copy.step)


def make(req_states: api.RequestState, query_start_loc: torch.Tensor, max_total_logits: int) -> Budget:
    """The manager, without a cost curve: see :func:`provide_curve`."""
    settings = Settings.from_env()
    depth = req_states.num_speculative_steps
    schedule = VerificationSchedule(req_states.max_num_reqs, depth, None, settings.verify_budget)
    return Budget(req_states, query_start_loc, max_total_logits, schedule)


def provide_curve(runner: api.GPUModelRunner) -> None:
    """Find what steps cost, if the schedule needs to know.

    Args:
        runner: Ready to run steps.

    Raises:
        ValueError: If the file named by ``DEEPINFER_PLUGINS_COST_CURVE`` holds no curve.
    """
    budget, settings = runner.adaptive_verification, Settings.from_env()
    if not isinstance(budget, Budget) or settings.verify_budget != "auto":
        return
    most = min(runner.max_num_reqs * runner.decode_query_len, runner.max_num_tokens)
    captured = runner.cudagraph_manager.captured_token_counts()
    sizes = cost_curve.sizes_to_measure((1 << power for power in range(most.bit_length())), captured, most)
    key = {
        "device": torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else "cpu",
        "model": runner.model_config.model,
        "vllm": api.VERSION,
        "batch_invariant": bool(api.envs.VLLM_BATCH_INVARIANT),
        "requests": runner.max_num_reqs,
        "depth": runner.decode_query_len - 1,
        "sizes": sizes,
        "graphs": list(captured),
        "providers": cost_curve.providers(runner.model.model.ops),
    }
    clock = Clock(runner.device)

    def run(size: int) -> float:
        """Milliseconds of a step of ``size`` rows that belong to no one."""
        clock.wait()
        start = time.perf_counter()
        runner._dummy_run(size, context_len=api.envs.VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN)
        clock.wait()
        return 1e3 * (time.perf_counter() - start)

    budget.schedule.cost = CostModel(cost_curve.find(settings, key, run, sizes, padded=bool(captured)))
