"""What our workers do beside vLLM's: the changes inside its model runner, before that is made."""

from __future__ import annotations

from typing import Any

from deepinfer_plugins.core import patch
from deepinfer_plugins.vllm_ext.v0_33 import patches


class WorkerMixin:
    """To be put before one of vLLM's workers."""

    model_runner: Any
    # Rows and requests of the step between its forward and its sampling, and when that began and ended.
    _timed: Any = None

    def init_device(self) -> None:
        patches.apply_in_worker()
        super().init_device()  # type: ignore[misc]
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
        budget, self._timed = self.model_runner.adaptive_verification, None
        if budget is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        start = budget.mark()
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if (step := self.model_runner.execute_model_state) is not None:
            self._timed = step.input_batch.num_tokens, step.input_batch.num_reqs, start, budget.mark()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._timed is not None:
            budget = self.model_runner.adaptive_verification
            budget.observe(*self._timed, budget.mark())
        return output

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Refuse while the weights are still there: vLLM's own method lets go of them before it asks the model."""
        raise NotImplementedError(
            "deepinfer_plugins reads the checkpoint by itself, once: it does not take weights while it runs yet; "
            "start vLLM anew with the other --model"
        )
