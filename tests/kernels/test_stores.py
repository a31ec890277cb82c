"""store_window, store_compressed, store_index_key, store_compressor and load_compressor."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels import cache_layout, formats
from deepinfer_plugins.kernels.load_compressor.reference import load_compressor
from deepinfer_plugins.kernels.records import _all_with_slots
from deepinfer_plugins.kernels.store_compressed.reference import store_compressed
from deepinfer_plugins.kernels.store_compressor.reference import store_compressor
from deepinfer_plugins.kernels.store_index_key.reference import store_index_key
from deepinfer_plugins.kernels.store_window.reference import store_window

from .conformance import Case, Conformance, Draw

PAGE_SIZE = 7
NUM_PAGES = 200


def slots_for(draw: Draw, num_rows: int) -> torch.Tensor:
    """Distinct slots, every third row without one."""
    slots = draw.order(NUM_PAGES * PAGE_SIZE)[:num_rows]
    return slots.masked_fill(torch.arange(num_rows, device=draw.device) % 3 == 2, -1)


def stored(args: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The record of each row's slot; zeros for a row without one."""
    slots, pages = args["slots"], args["pages"]
    records = [
        pages[slot // PAGE_SIZE, slot % PAGE_SIZE] if slot >= 0 else pages[0, 0] * 0
        for slot in slots.tolist()
    ]
    return (torch.stack(records) if records else pages[0, :0],)


class _Store(Conformance):
    record_bytes: ClassVar[int]

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        args = {"x": draw.normal(num_rows, 64), "slots": slots_for(draw, num_rows)}
        args["pages"] = draw.pages(NUM_PAGES, PAGE_SIZE, self.record_bytes)
        return Case(args, rows=("x", "slots"), written=("pages",), read=stored)


class TestStoreWindow(_Store):
    op = "store_window"
    record_bytes = cache_layout.window_bytes(64)


class TestStoreCompressed(_Store):
    op = "store_compressed"
    record_bytes = cache_layout.compressed_bytes(64)


class TestStoreIndexKey(_Store):
    op = "store_index_key"
    record_bytes = cache_layout.index_key_bytes(64)


class TestStoreCompressor(Conformance):
    op = "store_compressor"

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        args = {name: draw.normal(num_rows, 64, dtype=torch.float32) for name in ("gates", "latents")}
        args["slots"] = slots_for(draw, num_rows)
        args["pages"] = draw.pages(NUM_PAGES, PAGE_SIZE, cache_layout.compressor_bytes(64))
        return Case(args, rows=("gates", "latents", "slots"), written=("pages",), read=stored)


class TestLoadCompressor(Conformance):
    op = "load_compressor"

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        pages = draw.pages(NUM_PAGES, PAGE_SIZE, cache_layout.compressor_bytes(64))
        pages.copy_(draw.ints(0, 255, *pages.shape, dtype=torch.uint8))
        return Case({"pages": pages, "slots": slots_for(draw, num_rows)}, rows=("slots",))


Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
STORES: list[tuple[Store, Callable[[torch.Tensor, int], torch.Tensor], int]] = [
    (store_window, formats.decode_window, cache_layout.window_bytes(64)),
    (store_compressed, formats.decode_compressed, cache_layout.compressed_bytes(64)),
    (store_index_key, formats.decode_index_key, cache_layout.index_key_bytes(64)),
]
each_store = pytest.mark.parametrize(
    "store, decode, record_bytes", STORES, ids=lambda x: getattr(x, "__name__", "")
)


@each_store
def test_what_is_stored_is_near_what_was_given(
    device: torch.device, store: Store, decode: Callable[[torch.Tensor, int], torch.Tensor], record_bytes: int
) -> None:
    draw = Draw(device)
    x, pages = draw.normal(5, 64), draw.pages(3, PAGE_SIZE, record_bytes)
    store(x, pages, torch.tensor([20, 0, -1, 7, 13], device=device))
    for row, (page, offset) in {0: (2, 6), 1: (0, 0), 3: (1, 0), 4: (1, 6)}.items():
        # Half a step of e2m1 at its coarsest, of a group whose scale may be up to twice what it needs.
        error = (decode(pages[page, offset], 64) - x[row].double()).abs().max() / x[row].abs().max()
        assert error < 1 / 3, f"row {row}"


@each_store
def test_nothing_else_is_written(
    device: torch.device, store: Store, decode: object, record_bytes: int
) -> None:
    draw = Draw(device)
    both = torch.full((3, PAGE_SIZE, 2 * record_bytes), 0xFF, dtype=torch.uint8, device=device)
    store(draw.normal(2, 64), both[..., record_bytes:], torch.tensor([-1, 8], device=device))
    assert (both[1, 1, record_bytes:] != 0xFF).any()
    both[1, 1, record_bytes:] = 0xFF
    assert (both == 0xFF).all()


@each_store
def test_pages_of_another_record_size_are_refused(
    device: torch.device, store: Store, decode: object, record_bytes: int
) -> None:
    draw = Draw(device)
    with pytest.raises(
        ValueError, match=f"has {record_bytes} bytes, but the pages hold records of {record_bytes + 1}"
    ):
        store(draw.normal(1, 64), draw.pages(1, 1, record_bytes + 1), torch.tensor([0], device=device))


def test_compressor_rows_come_back_unrounded(device: torch.device) -> None:
    draw = Draw(device)
    gates, latents = draw.normal(3, 64, dtype=torch.float32), draw.normal(3, 64, dtype=torch.float32)
    pages = draw.pages(2, PAGE_SIZE, cache_layout.compressor_bytes(64))
    slots = torch.tensor([9, 2, 13], device=device)
    store_compressor(gates, latents, pages, slots)
    for got, want in zip(load_compressor(pages, slots), (gates, latents)):
        assert_same_bits(got, want, "compressor")
    for missing in load_compressor(pages, torch.tensor([-1], device=device)):
        assert not missing.any()


def test_a_slot_past_two_to_the_31_bytes(device: torch.device) -> None:
    record_bytes = cache_layout.window_bytes(64)
    num_pages = 2**31 // (PAGE_SIZE * record_bytes) + 10
    size = num_pages * PAGE_SIZE * record_bytes
    if device.type == "cpu":
        # Costs only the pages that are touched.
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    else:
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
    pages = memory.view(num_pages, PAGE_SIZE, record_bytes)
    x = Draw(device).normal(1, 64)
    store_window(x, pages, torch.tensor([num_pages * PAGE_SIZE - 1], device=device))
    assert_same_bits(memory[-record_bytes:], formats.encode_window(x[0]), "last record")
    start = (num_pages * PAGE_SIZE - 1) * record_bytes - 2**32
    assert start < 0 or not memory[start : start + record_bytes].any()


@pytest.mark.parametrize("slots", [[3, -1, 9, 0], [-1, 5, -1, -1], [-1, -1, -1, -1]])
def test_a_write_that_the_host_does_not_look_at_has_the_same_effect(
    device: torch.device, slots: list[int]
) -> None:
    draw = Draw(device)
    pages, records = draw.ints(0, 256, 3, 4, 5, dtype=torch.uint8), draw.ints(0, 256, 4, 5, dtype=torch.uint8)
    want = pages.clone()
    for slot, record in zip(slots, records):
        if slot >= 0:
            want[slot // 4, slot % 4] = record
    places, written = _all_with_slots(records, pages, torch.tensor(slots, device=device))
    pages[places // 4, places % 4] = written
    assert_same_bits(pages, want, "pages")
