"""index_select."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels import formats
from deepinfer_plugins.kernels.index_select import torch as provider
from deepinfer_plugins.kernels.index_select.torch import index_select

from .caches import Cache
from .conformance import Case, Conformance, Draw

D, HEADS, TOPK, BLOCK = 64, 3, 20, 8
LENGTHS = [300, 61]


def make_case(draw: Draw, num_rows: int, variant: str) -> Case:
    cache = Cache(draw, formats.encode_index_key, D, LENGTHS)
    request = (torch.arange(num_rows, device=draw.device) * 2) // max(num_rows, 1)
    lengths = draw.ints(0, 300, num_rows) % (torch.tensor(LENGTHS, device=draw.device)[request] + 1)
    if num_rows > 2:
        lengths[0], lengths[1], lengths[-1] = 300, 0, 1
    args: dict[str, Any] = {
        "q": draw.normal(num_rows, HEADS, D),
        "head_weights": draw.normal(num_rows, HEADS),
        "pages": cache.pages,
        "table": cache.table.int() if variant == "publish" else cache.table,
        "request": request,
        "lengths": lengths,
        "topk": TOPK,
        "candidates": None,
        "publish_blocks": 5 if variant == "publish" else 0,
        "block_size": BLOCK,
    }
    if variant == "candidates":
        kept = draw.ints(0, 2, num_rows, 38).bool() & (
            torch.arange(38, device=draw.device) * BLOCK < lengths[:, None]
        )
        names = (
            torch.arange(38, device=draw.device).expand(num_rows, -1).masked_fill(~kept, 1000).sort(1).values
        )
        args["candidates"] = names.masked_fill(names == 1000, -1)[:, :12].int()
    return Case(args, rows=("q", "head_weights", "request", "lengths", "candidates"))


class TestIndexSelect(Conformance):
    op = "index_select"
    variants = ("all", "publish", "candidates")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        return make_case(draw, num_rows, variant)


def scores_of(args: dict[str, Any], row: int) -> list[float]:
    """Scores of the valid entries of a row, by the formula, in bfloat16."""
    q = formats.decode_mxfp4(*formats.encode_mxfp4(args["q"][row])).tolist()
    weights = args["head_weights"][row].tolist()
    pages, table = args["pages"], args["table"][args["request"][row]].tolist()
    scores = []
    for entry in range(int(args["lengths"][row])):
        record = pages[table[entry // pages.shape[1]], entry % pages.shape[1]]
        key = formats.decode_index_key(record, D).tolist()
        heads = (max(0.0, math.fsum(a * b for a, b in zip(head, key))) for head in q)
        scores.append(math.fsum(w * h for w, h in zip(weights, heads)))
    return torch.tensor(scores, dtype=torch.float64).bfloat16().tolist()


@pytest.mark.parametrize("variant", ["publish", "candidates"])
def test_agrees_with_a_sort_in_python(device: torch.device, variant: str) -> None:
    args = make_case(Draw(device), 7, variant).args
    indices, blocks = index_select(**args)
    for row in range(7):
        scores = scores_of(args, row)
        entries = list(range(len(scores)))
        if variant == "candidates":
            allowed = set(args["candidates"][row].tolist())
            entries = [entry for entry in entries if entry // BLOCK in allowed]
        best = sorted(sorted(entries, key=lambda entry: (-scores[entry], entry))[:TOPK])
        assert indices[row].tolist() == best + [-1] * (TOPK - len(best)), f"row {row}"
        if variant == "publish":
            by_block = [max(scores[i : i + BLOCK]) for i in range(0, len(scores), BLOCK)]
            if by_block:
                by_block[-1] = math.inf
            names = sorted(sorted(range(len(by_block)), key=lambda block: (-by_block[block], block))[:5])
            assert blocks[row].tolist() == names + [-1] * (5 - len(names)), f"row {row}"


def test_ties_go_to_the_lower_entry_and_block(device: torch.device) -> None:
    args = make_case(Draw(device), 3, "publish").args
    # Negative weights and products of zero: scores of 0 and -0, which are equal.
    args["q"] = torch.zeros_like(args["q"])
    args["head_weights"] = -args["head_weights"].abs()
    indices, blocks = index_select(**args)
    assert indices[0].tolist() == list(range(TOPK))
    assert blocks[0].tolist() == [0, 1, 2, 3, 37]


def test_selection_leaves_entries_out(device: torch.device) -> None:
    args = make_case(Draw(device), 9, "all").args
    whole, _ = index_select(**args)
    limited, _ = index_select(**args | {"candidates": torch.arange(12, device=device).int().expand(9, -1)})
    assert whole[0].max() >= 12 * BLOCK > limited[0].max()
    assert 0 <= limited[0].min()


def test_all_blocks_as_candidates_change_nothing(device: torch.device) -> None:
    args = make_case(Draw(device), 23, "all").args
    every = torch.arange(38, device=device).int().expand(23, -1)
    for got, want in zip(index_select(**args | {"candidates": every}), index_select(**args)):
        assert_same_bits(got, want, "all candidates")


@pytest.mark.parametrize("variant", ["all", "publish", "candidates"])
def test_unwritten_records_have_no_influence(device: torch.device, variant: str) -> None:
    draw = Draw(device)
    case = make_case(draw, 23, variant)
    cache = Cache(Draw(device), formats.encode_index_key, D, LENGTHS)
    assert torch.equal(cache.pages, case.args["pages"])
    want = index_select(**case.args)
    table = case.args["table"].clone()
    for pages_of, length in zip(table, LENGTHS):
        pages_of[-(-length // 7) :] = 2**30
    for got, expected in zip(index_select(**case.args | {"table": table}), want):
        assert_same_bits(got, expected, "pages that hold no entry")
    for byte in (0x00, 0x7F):
        for got, expected in zip(index_select(**case.args | {"pages": cache.with_unwritten(byte)}), want):
            assert_same_bits(got, expected, f"unwritten {byte:#x}")


@pytest.mark.parametrize("variant", ["publish", "candidates"])
def test_pages_past_two_to_the_31_bytes(device: torch.device, variant: str) -> None:
    case = make_case(Draw(device), 9, variant)
    pages, table = Cache(Draw(device), formats.encode_index_key, D, LENGTHS).far_away()
    for got, want in zip(
        index_select(**case.args | {"pages": pages, "table": table}), index_select(**case.args)
    ):
        assert_same_bits(got, want, "far away")


def test_the_size_of_a_tile_has_no_influence(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(Draw(device), 23, "publish")
    want = index_select(**case.args)
    monkeypatch.setattr(provider, "ROWS", 5)
    monkeypatch.setattr(provider, "KEYS", 64)
    for got, expected in zip(index_select(**case.args), want):
        assert_same_bits(got, expected, "other tiles")


def test_using_and_publishing_candidates_at_once_is_refused(device: torch.device) -> None:
    args = make_case(Draw(device), 3, "candidates").args
    with pytest.raises(ValueError, match="publishes or uses, not both"):
        index_select(**args | {"publish_blocks": 4})
