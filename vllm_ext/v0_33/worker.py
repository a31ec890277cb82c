"""What our workers do beside vLLM's: change its model runner before that is made, and time the steps."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from deepinfer_plugins.core import patch
from deepinfer_plugins.vllm_ext.v0_33 import patches

if TYPE_CHECKING:
    from deepinfer_plugins.features.cost_curve import Clock, Mark


class _Step(NamedTuple):
    """A step on its way through the device.

    Args:
        rows: Of its forward, padding included.
        requests: Of its batch.
        start: Of the forward.
        forward: Its end.
        drafting: Start and end.
        end: Of sampling and drafting.
    """

    rows: int
    requests: int
    start: Mark
    forward: Mark
    drafting: tuple[Mark, Mark]
    end: Mark


class WorkerMixin:
    """To be put before one of vLLM's workers."""

    model_runner: Any
    _clock: Clock
    # Rows and requests of the step between its forward and its sampling, and when that began and ended.
    _begun: tuple[int, int, Mark, Mark] | None = None
    _under_way: deque[_Step]

    def init_device(self) -> None:
        patches.apply_in_worker()
        super().init_device()  # type: ignore[misc]
        # torch is not to be imported where only the name of this class is wanted.
        from deepinfer_plugins.features.cost_curve import Clock

        self._clock, self._under_way = Clock(self.model_runner.device), deque()
        if lost := patch.overwritten():
            raise RuntimeError(
                f"another package replaced what deepinfer_plugins changed in vLLM: {', '.join(lost)}; "
                "leave it out with VLLM_PLUGINS"
            )

    def compile_or_warm_up_model(self) -> Any:
        done = super().compile_or_warm_up_model()  # type: ignore[misc]
        # Its imports are the runner's.
        from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41 import budget

        budget.provide_curve(self.model_runner)
        return done

    def execute_model(self, scheduler_output: Any) -> Any:
        self._begun = None
        if self.model_runner.speculator is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        start = self._clock.mark()
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if (step := self.model_runner.execute_model_state) is not None:
            batch = step.input_batch
            self._begun = batch.num_tokens_after_padding, batch.num_reqs, start, self._clock.mark()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._begun is not None:
            drafting = self.model_runner.speculator.drafting
            self._under_way.append(_Step(*self._begun, drafting, self._clock.mark()))
            # ``metrics`` takes it from there.
            output.phase_ms = self._phases()
        return output

    def _phases(self) -> dict[str, float]:
        """Milliseconds by phase of the steps that the device is through with, each told once."""
        clock, budget, spent = self._clock, self.model_runner.adaptive_verification, Counter[str]()
        while self._under_way and clock.passed(self._under_way[0].end):
            step = self._under_way.popleft()
            forward = clock.milliseconds(step.start, step.forward)
            rest, draft = clock.milliseconds(step.forward, step.end), clock.milliseconds(*step.drafting)
            spent.update({"forward": forward, "draft": draft, "sample": rest - draft})
            if budget is not None:
                budget.observe(step.rows, step.requests, forward, rest)
        if budget is not None:
            spent["schedule"] += budget.take_planning_ms()
        return dict(spent)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Refuse while the weights are still there: vLLM's own method lets go of them before it asks the model."""
        raise NotImplementedError(
            "deepinfer_plugins reads the checkpoint by itself, once: it does not take weights while it runs yet; "
            "start vLLM anew with the other --model"
        )
