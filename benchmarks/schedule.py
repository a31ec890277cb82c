"""What the schedule costs the host in a step: 512 requests with 5 drafts each, one core.

Every step plans, records the confidences of the drafts made, and observes the step's times, as an engine would. A step
is split on the host, or on the device, when the host only chooses the budget. Other processes on
the machine show in the median and not in the best; the process's own CPU time is what a core of its own would take.

Usage: OMP_NUM_THREADS=1 python benchmarks/schedule.py [--requests 512] [--depth 5] [--out results.json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_plugins.features.cost_curve import CostCurve, CostModel
from deepinfer_plugins.features.schedule import VerificationSchedule


def measure(num_requests: int, depth: int, on_device: bool, steps: int) -> dict[str, Any]:
    """Microseconds of a step, by part."""
    rng = np.random.default_rng(0)
    largest = num_requests * (depth + 1)
    sizes = tuple(range(8, largest + 8, 8))
    # Bent, so that the best budget lies between nothing and everything.
    cost = CostModel(CostCurve(sizes, tuple((10.0**2 + (0.02 * size) ** 2) ** 0.5 for size in sizes)))
    schedule = VerificationSchedule(num_requests, depth, cost)
    slots, available = rng.permutation(num_requests), np.full(num_requests, depth)
    confidences = [rng.beta(3.0, 1.0, (num_requests, depth)).astype(np.float32) for _ in range(50)]
    spans: dict[str, list[float]] = {"plan": [], "record": [], "observe": [], "step": []}
    budgets = []
    cpu = 0.0
    for step in range(steps):
        cpu -= time.process_time()
        times = [time.perf_counter()]
        plan = schedule.plan(slots, available, on_device=on_device)
        times.append(time.perf_counter())
        schedule.record(slots, confidences[step % 50])
        times.append(time.perf_counter())
        size = sizes[-(-(num_requests + plan.budget) // 8) - 1]
        cost.observe_forward(size, plan.milliseconds)
        cost.observe_sampler(num_requests, 1.0)
        times.append(time.perf_counter())
        cpu += time.process_time()
        for name, span in zip(spans, (*np.diff(times), times[-1] - times[0])):
            spans[name].append(1e6 * span)
        budgets.append(plan.budget)
    found: dict[str, Any] = {
        name: {"best": min(values), "median": float(np.median(values))} for name, values in spans.items()
    }
    return {**found, "cpu_time_of_a_step": 1e6 * cpu / steps, "mean_budget": float(np.mean(budgets))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "what": "microseconds of the schedule on the host, a step",
        "requests": arguments.requests,
        "depth": arguments.depth,
        "chip": platform.processor() or platform.machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("numpy",)},
        "commit": arguments.commit,
        "load_average_before": os.getloadavg()[0],
    }
    for name, on_device in (("split on the host", False), ("split on the device", True)):
        result[name] = measure(arguments.requests, arguments.depth, on_device, arguments.steps)
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
