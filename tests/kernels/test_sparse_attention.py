"""sparse_attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels import formats
from deepinfer_plugins.kernels.sparse_attention import torch as provider
from deepinfer_plugins.kernels.sparse_attention.torch import sparse_attention

from .caches import Cache
from .conformance import Case, Conformance, Draw

D, HEADS, WINDOW = 64, 3, 70
LENGTHS = [200, 90]


def make_caches(device: torch.device) -> tuple[Cache, Cache]:
    draw = Draw(device, seed=1)
    return (
        Cache(draw, formats.encode_window, D, LENGTHS),
        Cache(draw, formats.encode_compressed, D, [length // 2 for length in LENGTHS]),
    )


def make_case(draw: Draw, num_rows: int, variant: str) -> Case:
    window, compressed = make_caches(draw.device)
    request = (torch.arange(num_rows, device=draw.device) * 2) // max(num_rows, 1)
    position = draw.ints(0, 200, num_rows) % torch.tensor(LENGTHS, device=draw.device)[request]
    if num_rows > 2:
        position[0], position[1] = 199, 0
    end = position
    if variant == "block":
        # The rows of a draft block all see its end.
        end = (position // 5 * 5 + 4).minimum(torch.tensor(LENGTHS, device=draw.device)[request] - 1)
    args: dict[str, Any] = {
        "q": draw.normal(num_rows, HEADS, D),
        "window_pages": window.pages,
        "window_table": window.table.int(),
        "compressed_pages": None,
        "compressed_table": None,
        "indices": None,
        "request": request,
        "window_start": position - (WINDOW - 1),
        "window_end": end,
        "sinks": draw.normal(HEADS, dtype=torch.float32),
        "scale": D**-0.5,
    }
    if variant == "compressed":
        visible = (position + 1) // 2
        entry = torch.arange(100, device=draw.device)
        kept = draw.ints(0, 2, num_rows, 100).bool() & (entry < visible[:, None])
        chosen = entry.expand(num_rows, -1).masked_fill(~kept, 1000).sort(1).values[:, :33]
        args["indices"] = chosen.masked_fill(chosen == 1000, -1).int()
        args |= {"compressed_pages": compressed.pages, "compressed_table": compressed.table}
    return Case(args, rows=("q", "indices", "request", "window_start", "window_end"))


class TestSparseAttention(Conformance):
    op = "sparse_attention"
    variants = ("window", "block", "compressed")

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        return make_case(draw, num_rows, variant)


@pytest.mark.parametrize("variant", ["block", "compressed"])
def test_agrees_with_the_formula(device: torch.device, variant: str) -> None:
    args = make_case(Draw(device), 5, variant).args
    got = sparse_attention(**args)
    for row in range(5):
        keys = []
        for entry in range(max(0, int(args["window_start"][row])), int(args["window_end"][row]) + 1):
            page = args["window_table"][args["request"][row], entry // 7]
            keys.append(formats.decode_window(args["window_pages"][page, entry % 7], D).tolist())
        for entry in args["indices"][row].tolist() if args["indices"] is not None else []:
            if entry >= 0:
                page = args["compressed_table"][args["request"][row], entry // 7]
                keys.append(formats.decode_compressed(args["compressed_pages"][page, entry % 7], D).tolist())
        for head, (q, sink) in enumerate(zip(args["q"][row].tolist(), args["sinks"].tolist())):
            shares = [math.exp(D**-0.5 * math.fsum(a * b for a, b in zip(q, key))) for key in keys]
            total = math.fsum(shares) + math.exp(sink)
            out = [math.fsum(p * key[c] for p, key in zip(shares, keys)) / total for c in range(D)]
            want = torch.tensor(out, dtype=torch.float64).bfloat16()
            assert_same_bits(got[row, head].cpu(), want, f"row {row}, head {head}")


def test_no_key_gives_zeros(device: torch.device) -> None:
    args = make_case(Draw(device), 2, "compressed").args
    args |= {"indices": torch.full_like(args["indices"], -1), "window_end": args["window_start"] - 1}
    assert_same_bits(sparse_attention(**args), torch.zeros_like(args["q"]), "no key")


def test_a_great_sink_takes_everything(device: torch.device) -> None:
    args = make_case(Draw(device), 2, "window").args
    assert not sparse_attention(**args | {"sinks": torch.full_like(args["sinks"], 1e4)}).any()
    without = sparse_attention(**args | {"sinks": torch.full_like(args["sinks"], -1e4)})
    assert without.isfinite().all() and without.any()


def test_great_scores_do_not_overflow(device: torch.device) -> None:
    args = make_case(Draw(device), 9, "compressed").args
    assert sparse_attention(**args | {"scale": 1e4}).isfinite().all()


@pytest.mark.parametrize("variant", ["window", "block", "compressed"])
def test_unwritten_records_have_no_influence(device: torch.device, variant: str) -> None:
    args = make_case(Draw(device), 23, variant).args
    want = sparse_attention(**args)
    assert want.isfinite().all()
    window, compressed = make_caches(device)
    for byte in (0x00, 0x7F):
        other = {"window_pages": window.with_unwritten(byte)}
        if variant == "compressed":
            other["compressed_pages"] = compressed.with_unwritten(byte)
        assert_same_bits(sparse_attention(**args | other), want, f"unwritten {byte:#x}")


def test_page_ids_of_entries_that_nobody_reads_may_be_anything(device: torch.device) -> None:
    args = make_case(Draw(device), 9, "compressed").args
    args["window_start"], args["window_end"] = args["window_start"] * 0 + 70, args["window_end"] * 0 + 80
    args["request"] = args["request"] * 0
    want = sparse_attention(**args)
    tables = {name: args[name].clone() for name in ("window_table", "compressed_table")}
    tables["window_table"][:, : 70 // 7] = 2**30
    tables["window_table"][:, 80 // 7 + 1 :] = -1
    tables["compressed_table"][:, 100 // 7 + 1 :] = 2**30
    assert_same_bits(sparse_attention(**args | tables), want, "freed pages")


def test_pages_past_two_to_the_31_bytes(device: torch.device) -> None:
    args = make_case(Draw(device), 9, "compressed").args
    window, compressed = make_caches(device)
    far: dict[str, Any] = {}
    far["window_pages"], far["window_table"] = window.far_away()
    far["compressed_pages"], far["compressed_table"] = compressed.far_away()
    assert_same_bits(sparse_attention(**args | far), sparse_attention(**args), "far away")


def test_the_number_of_rows_in_a_tile_has_no_influence(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make_case(Draw(device), 23, "compressed").args
    want = sparse_attention(**args)
    monkeypatch.setattr(provider, "ROWS", 3)
    monkeypatch.setattr(provider, "ROWS_AT_ONCE", 7)
    assert_same_bits(sparse_attention(**args), want, "three rows")
