"""Counters of speculation, in SGLang's own Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Metrics:
    """What SGLang's own numbers do not say: acceptance by position, what was verified, and where time goes.

    The mean length is ``1 + accepted / verifications``. Steps in which SGLang runs a request that has just ended count.
    """

    def __init__(self) -> None:
        # Here, because it chooses where to keep its numbers by a variable that SGLang sets as it starts.
        from prometheus_client import Counter

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"deepinfer:spec_{name}", what, labelnames=labels)

        self._steps = counter("steps", "Steps that drafted and verified.")
        self._verifications = counter("verifications", "Requests of those steps.")
        self._drafted = counter("drafted_tokens", "Tokens drafted.")
        self._verified = counter("verified_tokens", "Drafts verified, by position.", "position")
        self._accepted = counter("accepted_tokens", "Drafts accepted, by position.", "position")
        self._budget = counter("budget_tokens", "Drafts that the schedule gave to steps.")
        self._seconds = counter("phase_seconds", "Seconds of those steps, by phase.", "phase")

    def observe(
        self, depth: int, verified: Sequence[int], accepted: Sequence[int], phases_ms: Mapping[str, float]
    ) -> None:
        """Count a step.

        Args:
            depth: Tokens drafted of each request.
            verified: Of each request, drafts verified.
            accepted: Of each request, drafts accepted.
            phases_ms: Milliseconds by phase, of ``features.cost_curve.PHASES``.
        """
        self._steps.inc()
        self._verifications.inc(len(verified))
        self._drafted.inc(depth * len(verified))
        self._budget.inc(sum(verified))
        for position in range(depth):
            self._verified.labels(position).inc(sum(count > position for count in verified))
            self._accepted.labels(position).inc(sum(count > position for count in accepted))
        for phase, milliseconds in phases_ms.items():
            self._seconds.labels(phase).inc(milliseconds / 1000)
