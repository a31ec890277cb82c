"""How many drafts were *verified*, beside what vLLM counts: drafted, accepted, and accepted by position.

They differ when verification is scheduled. The worker adds the number of each request to its output, the scheduler
puts them into the statistics of the step, and the front end exports them through vLLM's own endpoint:
``vllm:spec_decode_num_verified_tokens``, ``vllm:spec_decode_num_verified_tokens_per_pos`` and the histogram
``vllm:spec_decode_verified_tokens_per_step`` (the budget as it was used). Accepted over verified at a position is the
rate at which drafts there are accepted.

And where the time of steps goes, ``vllm:spec_decode_phase_seconds``, by ``features.cost_curve.PHASES``: the worker adds
it to the output of a later step, once the device is through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from deepinfer_plugins.features.cost_curve import PHASES
from deepinfer_plugins.vllm_ext.v0_33 import defaults

_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def verifying(original: Any) -> Any:
    """``AsyncOutput`` that also brings to the host how many drafts each request verified."""

    class Output(original):
        # The worker sets it where there is one.
        phase_ms: dict[str, float] | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            sampled, given = kwargs["num_sampled_tokens"], kwargs["sampler_output"]
            # One row more than drafts, of the requests that sampled.
            verified = (sampled + given.num_rejected - 1).clamp(min=0)
            super().__init__(*args, **kwargs)
            self._verified = verified
            if verified.is_cuda:
                # The copies of the tokens are awaited on the event recorded after these.
                with _on(kwargs["copy_stream"], kwargs["main_stream"]):
                    self._verified = verified.to("cpu", non_blocking=True)
                    verified.record_stream(kwargs["copy_stream"])
                    self.copy_event.record(kwargs["copy_stream"])

        def get_output(self) -> Any:
            output = super().get_output()
            output.num_verified_drafts = self._verified.tolist()
            output.phase_ms = self.phase_ms
            return output

    return Output


def _on(stream: Any, other: Any) -> Any:
    from vllm.v1.worker.gpu.async_utils import stream as switched

    return switched(stream, other)


def counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Scheduler.update_from_output`` that puts these numbers into the step's statistics.

    vLLM sends these to the front end by their declared fields. It fills ``num_draft_tokens_per_pos`` with what it
    scheduled, and reads it nowhere: there go verified drafts by position and, after them, microseconds by phase.
    """
    # By scheduler: times of steps that had no statistics of drafts, to be told with the next ones.
    untold: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        drafts = _counted_drafts(self, scheduler_output)
        outputs = original(self, scheduler_output, model_runner_output)
        spent = untold.setdefault(self, Counter())
        spent.update(getattr(model_runner_output, "phase_ms", None) or {})
        verified = getattr(model_runner_output, "num_verified_drafts", None)
        if verified is None:
            return outputs
        for output in outputs.values():
            stats = output.scheduler_stats and output.scheduler_stats.spec_decoding_stats
            if stats:
                by_position = [0] * stats.num_spec_tokens
                for request, count in zip(model_runner_output.req_ids, verified):
                    for position in range(min(count, drafts.get(request, 0))):
                        by_position[position] += 1
                stats.num_draft_tokens_per_pos = by_position + [round(1e3 * spent[phase]) for phase in PHASES]
                spent.clear()
        return outputs

    return update_from_output


def _counted_drafts(scheduler: Any, scheduler_output: Any) -> dict[str, int]:
    """By request, the drafts of a step that vLLM will count when it takes in the step's output.

    That is not those of a request that has ended since, nor those that a grammar made invalid.
    """
    invalid = scheduler_output.num_invalid_spec_tokens or {}
    return {
        name: len(drafts) - invalid.get(name, 0)
        for name, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
        if (request := scheduler.requests.get(name)) is not None and not request.is_finished()
    }


def exporting(original: Any) -> Any:
    """``SpecDecodingProm`` with metrics of what was verified."""
    from prometheus_client import Histogram

    class SpecDecodingProm(original):
        def __init__(
            self, speculative_config: Any, labelnames: list[str], per_engine_labelvalues: Any, **more: Any
        ) -> None:
            super().__init__(speculative_config, labelnames, per_engine_labelvalues, **more)
            self._verified: dict[int, tuple[Any, list[Any], Any, list[Any]]] = {}
            if speculative_config is None or not defaults.has_our_draft(speculative_config):
                return
            total = self._counter_cls(
                name="vllm:spec_decode_num_verified_tokens",
                documentation="Number of draft tokens that were verified.",
                labelnames=labelnames,
            )
            positions = self._counter_cls(
                name="vllm:spec_decode_num_verified_tokens_per_pos",
                documentation="Verified tokens per draft position.",
                labelnames=[*labelnames, "position"],
            )
            steps = Histogram(
                name="vllm:spec_decode_verified_tokens_per_step",
                documentation="Draft tokens that a step verified.",
                labelnames=labelnames,
                buckets=_BUCKETS,
            )
            phases = self._counter_cls(
                name="vllm:spec_decode_phase_seconds",
                documentation="Seconds of steps by phase.",
                labelnames=[*labelnames, "phase"],
            )
            for engine, values in per_engine_labelvalues.items():
                by_position = [
                    positions.labels(*values, str(position))
                    for position in range(speculative_config.num_speculative_tokens)
                ]
                seconds = [phases.labels(*values, phase) for phase in PHASES]
                self._verified[engine] = total.labels(*values), by_position, steps.labels(*values), seconds

        def observe(self, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
            super().observe(spec_decoding_stats, engine_idx)
            if engine_idx not in self._verified:
                return
            found, depth = spec_decoding_stats.num_draft_tokens_per_pos, spec_decoding_stats.num_spec_tokens
            total, by_position, steps, seconds = self._verified[engine_idx]
            total.inc(sum(found[:depth]))
            steps.observe(sum(found[:depth]))
            for counter, count in zip(by_position, found[:depth]):
                counter.inc(count)
            for counter, microseconds in zip(seconds, found[depth:]):
                counter.inc(microseconds / 1e6)

    return SpecDecodingProm
