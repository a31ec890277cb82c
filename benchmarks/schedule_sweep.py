"""Expected tokens per second under load: scheduled verification beside none and all, on several cost curves.

1 to 512 requests, five drafts each, as they come in a step after another. The confidences are made up: a request is
easy or hard for a while, and on the whole 72 % of first drafts are accepted, and about 68 % of the later ones whose
predecessors were, as vLLM reports of DSpark (above 70 % of first drafts survive, below 10 % of seventh ones). They are
calibrated: a confidence is the probability of acceptance. So the expected number of tokens of a step is known
exactly, and nothing is sampled. The schedule sees what an engine shows it: for its budget the confidences from step
N-2, for the split those from N-1.

The time of a step is its cost curve's, for all three; the draft's own time is in none of them. "None" verifies no
draft, "all" verifies every one. Where five drafts each are more than the largest step of a curve holds, as many are
drafted as fit. The exit status is 1 if the schedule is more than 1 % below the better of both
anywhere, or nowhere more than 3 % above it.

Usage: python benchmarks/schedule_sweep.py [--curve NAME=FILE...] [--out results.json] [--plot results.svg]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_plugins.features.cost_curve import CostCurve, CostModel
from deepinfer_plugins.features.schedule import VerificationSchedule, rates_of

DEPTH = 5
REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LARGEST = REQUESTS[-1] * (1 + DEPTH)
WARM_STEPS = 5
# Logit of a draft's confidence, before what makes requests and drafts differ: what gives the survival rates above.
LOGIT = np.array([1.37, 0.75, 0.45, 0.2, 0.0])


def published() -> dict[str, CostCurve]:
    """Curves with the shape of published ones, at the sizes that engines capture."""
    sizes = [*range(8, 257, 8), *range(272, 513, 16), *range(544, 1025, 32), *range(1088, LARGEST + 1, 64)]
    # sgl-project/sglang pull request 35413, Qwen3-14B: 8.71 ms for 8 rows, 8.77 for 16, 42.34 for 1024. Between them,
    # and beyond: a step reads all weights or is bound by arithmetic, whichever takes longer.
    dense = [(8.7**4 + (42.33 / 1024 * b) ** 4) ** 0.25 for b in sizes]
    # The number of experts that b rows wake, E * (1 - (1 - k / E) ** b) (MoESD, arXiv 2505.19645), with the release's
    # 384 experts, 6 to a token: 288 GB of MXFP4 on eight H200 at 4.8 TB/s, 4 ms for everything else, and 35 GFLOP a row
    # at 40 % of 990 TFLOPS. Arithmetic comes in tiles of 128 rows.
    awake = [1.0 - (1.0 - 6 / 384) ** b for b in sizes]
    experts = [
        4.0 + 7.5 * share + 0.011 * b + 0.06 * math.ceil(b / 128)
        for share, b in zip(awake, sizes, strict=True)
    ]
    return {
        "dense": CostCurve(
            tuple(sizes), tuple(dense), facts={"source": "shape of sglang pull request 35413"}
        ),
        "experts": CostCurve(
            tuple(sizes), tuple(experts), facts={"source": "MoESD's experts, H200 data sheet"}
        ),
    }


class Load:
    """Confidences of requests, step by step; each is easy or hard for about ten steps."""

    def __init__(self, num_requests: int, seed: int) -> None:
        self._rng = np.random.default_rng((seed, num_requests))
        self._ease = self._rng.normal(0.0, 1.2, (num_requests, 1))

    def step(self) -> NDArray[np.float64]:
        """``[n, depth]``."""
        self._ease = 0.9 * self._ease + math.sqrt(1 - 0.9**2) * self._rng.normal(0.0, 1.2, self._ease.shape)
        logits = LOGIT + self._ease + self._rng.normal(0.0, 1.0, (len(self._ease), DEPTH))
        return 1.0 / (1.0 + np.exp(-logits))


def tokens_per_s(
    curve: CostCurve, num_requests: int, depth: int, budget: str, steps: int, seed: int
) -> dict[str, float]:
    """Expected rate of one policy, and the drafts it verifies per request."""
    load, cost = Load(num_requests, seed), CostModel(curve)
    schedule = VerificationSchedule(num_requests, depth, cost, budget)
    slots = np.arange(num_requests)
    available = np.zeros(num_requests, dtype=np.int64)
    confidences = np.zeros((num_requests, depth))
    tokens, ms, verified = 0.0, 0.0, 0
    for step in range(WARM_STEPS + steps):
        plan = schedule.plan(slots, available)
        assert plan.drafts is not None
        if step >= WARM_STEPS:
            taken = np.arange(depth)[:, None] < plan.drafts
            tokens += num_requests + float(rates_of(confidences)[taken].sum(dtype=np.float64))
            ms += float(cost.step_ms(num_requests, plan.budget, num_requests)[plan.budget])
            verified += plan.budget
        confidences = load.step()[:, :depth]
        schedule.record(slots, confidences)
        available = np.full(num_requests, depth)
    return {"tokens_per_s": 1000.0 * tokens / ms, "drafts": verified / steps / num_requests}


def sweep(
    curve: CostCurve, steps: int = 200, requests: Sequence[int] = REQUESTS, seed: int = 20261130
) -> list[dict[str, Any]]:
    """All policies at each number of requests of which the curve has room for a draft each."""
    rows = []
    for n in requests:
        depth = min(DEPTH, curve.largest // n - 1)
        if depth < 1:
            continue
        # Few requests are few samples of what requests are like.
        longer = steps * max(1, 64 // n)
        found = {kind: tokens_per_s(curve, n, depth, kind, longer, seed) for kind in ("none", "all", "auto")}
        best = max(found["none"]["tokens_per_s"], found["all"]["tokens_per_s"])
        rows.append(
            {"requests": n, "depth": depth, **found, "over_best": found["auto"]["tokens_per_s"] / best}
        )
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    """For each curve: rates over that without speculation, and below, what is verified."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "schedule"  # the same file for the same numbers
    names = list(result["curves"])
    figure = Figure(figsize=(4.4 * len(names), 6.4), layout="constrained")
    for column, name in enumerate(names):
        rows = result["curves"][name]["sweep"]
        load = [row["requests"] for row in rows]
        rate, drafts = (
            figure.add_subplot(2, len(names), column + 1),
            figure.add_subplot(2, len(names), len(names) + column + 1),
        )
        for kind, label in (("none", "no draft"), ("all", "every draft"), ("auto", "scheduled")):
            rate.plot(
                load,
                [row[kind]["tokens_per_s"] / row["none"]["tokens_per_s"] for row in rows],
                label=label,
                marker="o" if kind == "auto" else None,
                markersize=4,
            )
        drafts.plot(load, [row["auto"]["drafts"] for row in rows], color="C2", marker="o", markersize=4)
        rate.set(title=name, ylabel="tokens/s, over no draft")
        drafts.set(xlabel="requests", ylabel="drafts verified of each request", ylim=(0, DEPTH))
        for axes in (rate, drafts):
            axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
        rate.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curve", metavar="NAME=FILE", action="append", default=[])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    curves = {}
    for item in arguments.curve:
        name, _, file = item.partition("=")
        curves[name] = CostCurve.load(file)
    curves |= published()

    result: dict[str, Any] = {"depth": DEPTH, "steps": arguments.steps, "commit": arguments.commit}
    result["curves"] = {}
    ok = True
    for name, curve in curves.items():
        rows = sweep(curve, arguments.steps)
        result["curves"][name] = {**curve.facts, "sweep": rows}
        least, most = (choose(row["over_best"] for row in rows) for choose in (min, max))
        ok &= least >= 0.99 and most >= 1.03
        print(f"{name}: {least:.3f} to {most:.3f} of the better of none and all")
        for row in rows:
            rates = "  ".join(f"{kind} {row[kind]['tokens_per_s']:9.0f}" for kind in ("none", "all", "auto"))
            print(
                f"  {row['requests']:4} requests  {rates}  {row['over_best']:.3f}  "
                f"{row['auto']['drafts']:.2f} drafts"
            )
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        draw(result, arguments.plot)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
