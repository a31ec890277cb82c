"""How many drafts a step verifies, by ``features.schedule``, and what its steps took, measured by whom it concerns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dspark_components.dspark_sps import SpsCostTable, load_sps_table_from_path
from sglang.srt.speculative.dspark_components.dspark_sts import load_sts_calibration_from_path

from deepinfer_plugins.core.settings import SettingError, Settings, prefer
from deepinfer_plugins.features.calibration import per_position
from deepinfer_plugins.features.cost_curve import CostCurve, CostModel, find, sizes_to_measure
from deepinfer_plugins.features.schedule import Plan, VerificationSchedule, split_on_device


def temperatures(settings: Settings, depth: int) -> tuple[float, ...]:
    """By which the logits of confidences are divided, one for each draft.

    Raises:
        ValueError: If SGLang's file and DeepInfer's variable differ, or have neither one nor ``depth``.
    """
    path = get_spec().speculative_dspark_confidence_sts_path
    found = prefer(
        "temperatures of confidences",
        (1.0,),
        (
            f"--speculative-dspark-confidence-sts-path {path}",
            tuple(load_sts_calibration_from_path(path).temperatures) if path else None,
        ),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", settings.confidence_temperatures),
    )
    return per_position(found, depth)


def samples(most: int) -> list[int]:
    """Numbers of rows to time a step at that is not padded: every one up to 4, then two between doublings."""
    found = {*range(1, min(most, 4) + 1)}
    size = 4
    while size < most:
        found |= {size * 5 // 4, size * 3 // 2, size * 2}
        size *= 2
    return sorted(found)


def cost_curve(
    settings: Settings,
    most: int,
    captured: Sequence[int],
    run: Callable[[int], float],
    key: dict[str, Any],
) -> CostCurve:
    """What a step costs by its rows: from the file that was named, from the last start's, or measured.

    Args:
        settings: The environment.
        most: Rows of the largest step.
        captured: Rows of the steps that are captured in graphs.
        run: Runs a step of so many rows, and returns its milliseconds.
        key: What the times depend on.

    Raises:
        SettingError: If a flag and a variable name a file each.
    """
    table = get_spec().speculative_dspark_sps_table_path
    if table and settings.cost_curve:
        raise SettingError(
            f"--speculative-dspark-sps-table-path {table} and DEEPINFER_PLUGINS_COST_CURVE={settings.cost_curve} both "
            "say what a step costs; unset one"
        )
    if table:
        rates = load_sps_table_from_path(table)
        if not isinstance(rates, SpsCostTable):
            raise SettingError(
                f"--speculative-dspark-sps-table-path {table}: a table of sums is not supported; give one with "
                "sample_batch_tokens and sample_steps_per_sec, or DEEPINFER_PLUGINS_COST_CURVE"
            )
        return CostCurve(
            tuple(rates.sample_batch_tokens), tuple(1000 / rate for rate in rates.sample_steps_per_sec)
        )
    sizes = sizes_to_measure(samples(most), captured, most)
    return find(settings, {**key, "sizes": sizes}, run, sizes, padded=bool(captured))


class Budget:
    """Plans the steps of one worker.

    Args:
        num_slots: Slots that requests may have.
        depth: Drafts per request.
        curve: What a step costs; None: nothing is known.
        settings: The environment.
    """

    def __init__(self, num_slots: int, depth: int, curve: CostCurve | None, settings: Settings) -> None:
        self.cost = None if curve is None else CostModel(curve)
        self._depth = depth
        self._schedule = VerificationSchedule(num_slots, depth, self.cost, settings.verify_budget)
        self.temperatures = temperatures(settings, depth)

    def forget(self, slots: Sequence[int]) -> None:
        """These slots have new owners."""
        self._schedule.forget(list(slots))

    def plan(self, slots: torch.Tensor) -> Plan:
        """The next step's.

        Args:
            slots: int64 ``[requests]``, on the host.
        """
        owners = slots.numpy()
        return self._schedule.plan(owners, [self._depth] * len(owners), on_device=True)

    def lengths(self, confidences: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Drafts of each request that the step verifies, int64 ``[requests]``, on the device."""
        available = torch.full(confidences.shape[:1], self._depth, device=confidences.device)
        return split_on_device(confidences, available, plan.budget)

    def record(self, slots: torch.Tensor, confidences: torch.Tensor, plan: Plan) -> None:
        """Take in, on the host, what a step drafted."""
        self._schedule.record(slots.numpy(), confidences.numpy(), plan.step)
