"""How many drafts were *verified*, beside what vLLM counts: drafted, accepted, and accepted by position.

They differ when verification is scheduled. The worker adds the number of each request to its output, the scheduler
puts them into the statistics of the step, and the front end exports them through vLLM's own endpoint:
``vllm:spec_decode_num_verified_tokens``, ``vllm:spec_decode_num_verified_tokens_per_pos`` and the histogram
``vllm:spec_decode_verified_tokens_per_step`` (the budget as it was used). Accepted over verified at a position is the
rate at which drafts there are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer_plugins.vllm_ext.v0_33 import defaults

_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def verifying(original: Any) -> Any:
    """``AsyncOutput`` that also brings to the host how many drafts each request verified."""

    class Output(original):
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
            return output

    return Output


def _on(stream: Any, other: Any) -> Any:
    from vllm.v1.worker.gpu.async_utils import stream as switched

    return switched(stream, other)


def counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Scheduler.update_from_output`` that puts these numbers into the step's statistics, by position."""

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = original(self, scheduler_output, model_runner_output)
        verified = getattr(model_runner_output, "num_verified_drafts", None)
        if verified is None:
            return outputs
        drafted = scheduler_output.scheduled_spec_decode_tokens
        for output in outputs.values():
            stats = output.scheduler_stats and output.scheduler_stats.spec_decoding_stats
            if stats:
                # vLLM fills the field with what it scheduled, and reads it nowhere.
                by_position = [0] * stats.num_spec_tokens
                for request, count in zip(model_runner_output.req_ids, verified):
                    for position in range(min(count, len(drafted.get(request, ())))):
                        by_position[position] += 1
                stats.num_draft_tokens_per_pos = by_position
        return outputs

    return update_from_output


def exporting(original: Any) -> Any:
    """``SpecDecodingProm`` with metrics of what was verified."""
    from prometheus_client import Histogram

    class SpecDecodingProm(original):
        def __init__(
            self, speculative_config: Any, labelnames: list[str], per_engine_labelvalues: Any, **more: Any
        ) -> None:
            super().__init__(speculative_config, labelnames, per_engine_labelvalues, **more)
            self._verified: dict[int, tuple[Any, list[Any], Any]] = {}
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
            for engine, values in per_engine_labelvalues.items():
                by_position = [
                    positions.labels(*values, str(position))
                    for position in range(speculative_config.num_speculative_tokens)
                ]
                self._verified[engine] = total.labels(*values), by_position, steps.labels(*values)

        def observe(self, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
            super().observe(spec_decoding_stats, engine_idx)
            if engine_idx not in self._verified:
                return
            counts = spec_decoding_stats.num_draft_tokens_per_pos
            total, by_position, steps = self._verified[engine_idx]
            total.inc(sum(counts))
            steps.observe(sum(counts))
            for counter, count in zip(by_position, counts):
                counter.inc(count)

    return SpecDecodingProm
