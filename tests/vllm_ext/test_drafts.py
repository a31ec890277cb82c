"""The pieces between vLLM and the draft: prefixes of rows, windows, the cache that never vetoes, budgets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="these tests run in vLLM's environment")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from deepinfer_plugins.core.settings import SettingError  # noqa: E402
from deepinfer_plugins.features.schedule import VerificationSchedule  # noqa: E402
from deepinfer_plugins.model.step import Paged  # noqa: E402
from deepinfer_plugins.vllm_ext.v0_33 import draft_cache, patches  # noqa: E402
from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41 import budget, sampling, speculator  # noqa: E402


def test_prefixes_end_where_a_draft_is_missing_or_invalid() -> None:
    drafts = torch.tensor([[7, 8, 9], [4, -1, 6], [1, 2, 3]])
    request = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    offset = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1])
    invalid = torch.zeros(9, dtype=torch.bool)
    got = sampling.prefixes(drafts, request, offset, invalid)
    assert torch.equal(got, sampling.prefixes(drafts, request, offset, None))
    assert got.tolist() == [
        [-1, -1, -1],
        [7, -1, -1],
        [7, 8, -1],
        [7, 8, 9],
        [-1, -1, -1],
        [4, -1, -1],
        [4, -1, -1],
        [-1, -1, -1],
        [1, -1, -1],
    ]
    # The row whose input is the second draft of request 0.
    invalid[2] = True
    got = sampling.prefixes(drafts, request, offset, invalid)
    assert got[:4].tolist() == [[-1, -1, -1], [7, -1, -1], [7, -1, -1], [7, -1, -1]]
    assert got[7:].tolist() == [[-1, -1, -1], [1, -1, -1]]


@pytest.mark.parametrize(
    ("table", "position", "floor"),
    [
        ([3, 4, 5, 6], 12, 0),  # a window of 10: from position 2 on, all there
        ([0, 4, 5, 6], 12, 4),
        ([0, 0, 5, 6], 13, 8),
        ([0, 0, 0, 6], 15, 12),
        ([0, 0, 0, 0], 16, 16),  # nothing known
        ([0, 4, 5, 6], 16, 0),  # the page that is missing is before the window
        ([7, 0, 0, 0], 3, 0),  # pages behind the position do not count
        ([0, 0, 0, 0], 2, 2),
        ([0, 0, 0, 0], 0, 0),
    ],
)
def test_a_draft_starts_behind_what_its_cache_lost(table: list[int], position: int, floor: int) -> None:
    cache = Paged(torch.zeros(8, 4, 1, dtype=torch.uint8), torch.tensor([table], dtype=torch.int32))
    assert speculator.window_floor(cache, torch.tensor([position]), 10).tolist() == [floor]


def test_drafts_past_the_longest_request_go_to_the_null_block() -> None:
    table = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    cache = Paged(torch.zeros(8, 4, 1, dtype=torch.uint8), table)
    made = speculator.at_requests({0: cache, 1: cache}, torch.tensor([2, 0]), 7 + 5)
    assert made[0].table is made[1].table and made[0].table.tolist() == [[5, 6, 0, 0], [1, 2, 0, 0]]
    assert made[0].slots(torch.tensor([1]), torch.tensor([12])).tolist() == [0]


def lookup(known: set[int], length: int, alignment: int = 32) -> tuple[list[str], int]:
    """A hit of a window of 20 in pages of 8, of which some are still known."""
    spec = draft_cache.DraftWindowSpec(
        block_size=8, num_kv_heads=1, head_size=16, dtype=torch.uint8, sliding_window=20
    )
    pool: Any = SimpleNamespace(
        null_block="null",
        hash_block_size=8,
        get_cached_block=lambda key, groups: [f"b{key}"] * len(groups) if key in known else None,
    )
    found, hit = draft_cache.DraftWindowManager.find_longest_cache_hit(
        block_hashes=[*range(16)],  # type: ignore[arg-type]
        max_length=length,
        kv_cache_group_ids=[3, 5],
        block_pool=pool,
        kv_cache_spec=spec,
        drop_eagle_block=False,
        alignment_tokens=alignment,
    )
    assert found[0] == found[1]
    return [str(block) for block in found[0]], hit


def test_the_draft_s_cache_never_shortens_a_hit() -> None:
    assert lookup({*range(8)}, 64) == (["null"] * 5 + ["b5", "b6", "b7"], 64)
    assert lookup(set(), 64) == (["null"] * 8, 64)
    # vLLM takes a null block to have none before it.
    assert lookup({4, 5, 7}, 64) == (["null"] * 7 + ["b7"], 64)
    assert lookup({*range(8)}, 63) == (["null"] + ["b1", "b2", "b3"], 32)
    assert lookup({0}, 8, alignment=8) == (["b0"], 8)
    assert lookup(set(), 7) == ([], 0)


def test_a_budget_becomes_rows_of_each_request() -> None:
    """What the runner asks for in a step, on requests of all kinds."""
    states: Any = SimpleNamespace(
        max_num_reqs=4,
        device=torch.device("cpu"),
        req_id_to_index={"a": 2, "b": 0, "prompt": 1},
        num_computed_tokens_np=np.array([20, 4, 9, 0]),
        prefill_len=SimpleNamespace(np=np.array([10, 30, 8, 0])),
    )
    starts = torch.full((5,), -7, dtype=torch.int32)
    manager = budget.Budget(states, starts, 100, VerificationSchedule(4, 3, None, "random:1"))
    batch: Any = SimpleNamespace(
        num_reqs=3, idx_mapping=torch.tensor([2, 0, 1]), idx_mapping_np=np.array([2, 0, 1])
    )
    confidences = torch.tensor([[0.9, 0.5, 0.5], [0.8, 0.7, 0.1], [-1.0, -1.0, -1.0]])
    totals = set()
    for _ in range(40):
        manager.record_confidences(confidences, batch)
        rows = manager.get_num_tokens({"a": 4, "b": 4, "prompt": 6}, {"a": [-1] * 3, "b": [-1] * 3})
        total = rows - 8
        totals.add(total)
        logits, first, verified, _ = manager.reallocate_drafts(["a", "b", "prompt"], batch.idx_mapping)
        # Survival: a 0.9 0.45 0.225, b 0.8 0.56 0.056.
        of_a = [0, 1, 1, 1, 2, 3, 3][total]
        assert verified == total
        assert logits.tolist() == [0, 1 + of_a, 2 + total, 3 + total]
        assert first.tolist() == [0, 1 + of_a, 2 + total, 8 + total, 8 + total]
    assert totals == {*range(7)}
    # A request that enters a slot has no drafts: others come first.
    manager.add_request(2)
    while (total := manager.get_num_tokens({"a": 4, "b": 4}, {"a": [-1] * 3, "b": [-1] * 3}) - 2) != 3:
        pass
    logits, *_ = manager.reallocate_drafts(["a", "b"], batch.idx_mapping[:2])
    assert logits.tolist() == [0, 1, 5]


@pytest.mark.parametrize(
    ("arguments", "depth", "becomes"),
    [
        ({}, 5, {"method": "dspark", "num_speculative_tokens": 5}),
        ({}, 0, None),
        ({"speculative_config": {"method": "dspark"}}, 3, {"method": "dspark", "num_speculative_tokens": 3}),
        ({"spec_tokens": 4}, 4, None),
        (
            {"speculative_config": {"method": "dspark", "num-speculative-tokens": 4}},
            4,
            {"method": "dspark", "num-speculative-tokens": 4, "num_speculative_tokens": 4},
        ),
        (
            {"speculative_config": {"num_speculative_tokens": 2}},
            3,
            "2 drafts and DEEPINFER_USE_NEXTN_DECODE for 3",
        ),
        ({"spec_method": "dspark"}, 0, "DEEPINFER_USE_NEXTN_DECODE for 0"),
    ],
)
def test_the_depth_of_the_environment(arguments: dict[str, Any], depth: int, becomes: Any) -> None:
    given = {"speculative_config": None, "spec_method": None, "spec_model": None, "spec_tokens": None}
    asked: Any = SimpleNamespace(**{**given, **arguments})
    if isinstance(becomes, str):
        with pytest.raises(SettingError, match=becomes):
            patches._ask_for_drafts(asked, depth)
    else:
        patches._ask_for_drafts(asked, depth)
        assert asked.speculative_config == becomes
