"""Each numpy stand-in leaves the bytes that vLLM's Triton kernel leaves, interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="these tests run in vLLM's environment")

import torch  # noqa: E402

from deepinfer_plugins.vllm_ext.v0_33 import cpu_kernels  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU vLLM's own kernels run")

STARTS = [0, 1, 4, 10, 11]
NUM_REQUESTS, MAX_REQUESTS, MAX_LENGTH, VOCAB = 4, 6, 40, 1500


@pytest.fixture(scope="module")
def kernel() -> Callable[[str], tuple[Any, Callable[..., None]]]:
    """vLLM's kernel of a name, and ours."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    assert current_platform.is_cpu()
    cpu_kernels.install()

    def both(name: str) -> tuple[Any, Callable[..., None]]:
        return dispatcher._registry[f"vllm.v1.worker.gpu.{name}"]

    return both


@pytest.fixture
def draw() -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int, low: int = 0, high: int = 50, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    return draw


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def same(
    both: tuple[Any, Callable[..., None]], grid: tuple[int, ...], *arguments: Any, **constants: Any
) -> None:
    """Run both on the same arguments; every tensor must come out alike, written or not."""
    original, ours = both
    theirs, mine = [copied(a) for a in arguments], [copied(a) for a in arguments]
    original[grid](*theirs, **constants)
    ours(*mine, **constants)
    for index, (a, b) in enumerate(zip(theirs, mine)):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), f"argument {index}"


def integers(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


REQUESTS = integers(3, 0, 5, 1, dtype=torch.int64)


def test_apply_write(kernel: Any, draw: Any) -> None:
    both = kernel("buffer_utils._apply_write_kernel")
    indices, starts, ends = integers(2, 0, 3, 0, 0), integers(1, 0, 4, 0, 0), integers(3, 7, 9, 0, 0)
    same(
        both,
        (3, 1),
        draw(MAX_REQUESTS, 8),
        8,
        indices,
        starts,
        draw(9),
        ends,
        None,
        BLOCK_SIZE=16,
        MULTI_GROUP=False,
    )


def test_apply_write_to_groups(kernel: Any, draw: Any) -> None:
    original, ours = kernel("buffer_utils._apply_write_kernel")
    arguments = integers(2, 0, 3), integers(1, 0, 4), draw(9), integers(3, 7, 9), integers(1, 0, 1)
    results = []
    for run in (original[(3, 1)], ours):
        tables = [torch.zeros(MAX_REQUESTS, width, dtype=torch.int32) for width in (16, 32)]
        pointers = torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64)
        strides = integers(16, 32, dtype=torch.int64)
        run(pointers, strides, *arguments, BLOCK_SIZE=16, MULTI_GROUP=True)
        results.append(torch.cat(tables, 1))
    assert torch.equal(*results) and results[0].any()


@pytest.mark.parametrize("masked", [True, False])
def test_gather_block_tables(kernel: Any, draw: Any, masked: bool) -> None:
    original, ours = kernel("block_table._gather_block_tables_kernel")
    sources = [draw(MAX_REQUESTS, width) for width in (16, 32)]
    counts = draw(2, MAX_REQUESTS, low=1, high=16)
    computed, reach, sizes = draw(MAX_REQUESTS, high=60), integers(0, 15), integers(16, 4)
    results = []
    for run in (original[(2, NUM_REQUESTS)], ours):
        targets = [torch.zeros(MAX_REQUESTS, width, dtype=torch.int32) for width in (16, 32)]
        pointers = [torch.tensor([t.data_ptr() for t in ts], dtype=torch.uint64) for ts in (sources, targets)]
        strides = integers(16, 32, dtype=torch.int64)
        run(
            *(REQUESTS, *pointers, strides, counts, counts.stride(0), NUM_REQUESTS, computed, reach, sizes),
            MASK_SLIDING_WINDOW=masked,
            BLOCK_SIZE=64,
        )
        results.append(torch.cat(targets, 1))
    assert torch.equal(*results)


def test_compute_slot_mappings(kernel: Any, draw: Any) -> None:
    original, ours = kernel("block_table._compute_slot_mappings_kernel")
    tables = [draw(MAX_REQUESTS, 16), draw(MAX_REQUESTS, 32)]
    pointers = torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64)
    arguments = (
        integers(3, -1, 5, 1, dtype=torch.int64),
        integers(*STARTS, 11, 11),
        draw(16, high=60, dtype=torch.int64),
        pointers,
        integers(16, 32, dtype=torch.int64),
        integers(16, 4),
        torch.tensor([True, False]),
        torch.tensor([True, True]),
    )
    results = []
    for run in (original[(2, NUM_REQUESTS + 1)], ours):
        slots = torch.full((2, 20), 7, dtype=torch.int64)
        run(
            *(20, *arguments, slots, 20, 0),
            CP_SIZE=1,
            CP_INTERLEAVE=1,
            PAD_ID=-1,
            TRITON_BLOCK_SIZE=16,
        )
        results.append(slots)
    assert torch.equal(*results)


def test_prepare_prefill_inputs(kernel: Any, draw: Any) -> None:
    both = kernel("input_batch._prepare_prefill_inputs_kernel")
    following, record = draw(2, MAX_REQUESTS), draw(MAX_REQUESTS, MAX_LENGTH)
    prefill, computed = integers(9, 4, 0, 4, 0, 12), integers(2, 7, 0, 3, 0, 5)
    arguments = following, 6, 2, REQUESTS, integers(*STARTS), record, MAX_LENGTH, prefill, computed
    same(both, (NUM_REQUESTS,), draw(16), *arguments, BLOCK_SIZE=16, LOOKAHEAD_BLOCK=2)


def test_prepare_pos_seq_lens(kernel: Any, draw: Any) -> None:
    both = kernel("input_batch._prepare_pos_seq_lens_kernel")
    positions, lengths = draw(16, dtype=torch.int64), draw(MAX_REQUESTS)
    arguments = REQUESTS, integers(*STARTS), draw(MAX_REQUESTS), MAX_REQUESTS
    same(both, (NUM_REQUESTS + 1,), positions, lengths, *arguments, BLOCK_SIZE=16)


@pytest.mark.parametrize("num_logits", [(1, 1, 1, 1), (1, 3, 2, 1)])
def test_combine_sampled_and_draft_tokens(kernel: Any, draw: Any, num_logits: tuple[int, ...]) -> None:
    both = kernel("input_batch._combine_sampled_and_draft_tokens_kernel")
    ends = torch.tensor([0, *num_logits]).cumsum(0).int()
    arguments = (
        REQUESTS,
        draw(MAX_REQUESTS, 1, dtype=torch.int64),
        integers(*STARTS),
        integers(5, 4, 20, 9),
        integers(4, 9, 0, 5, 0, 20),
        draw(MAX_REQUESTS, 3, dtype=torch.int64),
        3,
        ends,
        torch.zeros(int(ends[-1]), dtype=torch.int64),
    )
    same(both, (NUM_REQUESTS,), draw(16), *arguments, NUM_NEW_SAMPLED_TOKENS=1, BLOCK_SIZE=4)


def test_get_num_sampled_and_rejected(kernel: Any, draw: Any) -> None:
    both = kernel("input_batch._get_num_sampled_and_rejected_kernel")
    arguments = integers(1, 2, 1, 1), integers(9, 9, 9, 9), integers(5, 4, 20, 9), integers(0, 1, 4, 6, 7)
    same(both, (NUM_REQUESTS,), *arguments, REQUESTS, integers(4, 9, 0, 6, 0, 20))


@pytest.mark.parametrize("drafts", [0, 3])
def test_post_update(kernel: Any, draw: Any, drafts: int) -> None:
    both = kernel("input_batch._post_update_kernel")
    arguments = (
        integers(3, -1, 5, 1, dtype=torch.int64),
        draw(MAX_REQUESTS),
        draw(MAX_REQUESTS, 1, dtype=torch.int64),
        draw(MAX_REQUESTS, VOCAB),
        VOCAB,
        draw(NUM_REQUESTS, 4, high=VOCAB, dtype=torch.int64),
        4,
        integers(1, 1, 3, 0),
        integers(0, 0, 1, 1),
        integers(*STARTS),
        draw(MAX_REQUESTS, MAX_LENGTH),
        MAX_LENGTH,
        draw(MAX_REQUESTS, high=20),
        draw(NUM_REQUESTS, drafts, dtype=torch.int64) if drafts else None,
        draw(MAX_REQUESTS, drafts, dtype=torch.int64) if drafts else None,
        drafts,
    )
    same(both, (NUM_REQUESTS,), *arguments, num_warps=1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_gumbel_sample(kernel: Any, temperature: float) -> None:
    both = kernel("sample.gumbel._gumbel_sample_kernel")
    logits = torch.randn(NUM_REQUESTS, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[1, 40] = logits[1, 1300] = logits[1, 90] = 9.0
    temperatures = torch.full((MAX_REQUESTS,), temperature)
    arguments = (
        *(torch.zeros(NUM_REQUESTS, 2, dtype=torch.int64), 2, torch.zeros(NUM_REQUESTS, 2), 2),
        *(None, 0, 0, None, None, 0, logits, VOCAB, REQUESTS),
        *(torch.arange(MAX_REQUESTS), torch.arange(NUM_REQUESTS), temperatures, VOCAB),
    )
    constants = dict(
        BLOCK_SIZE=1024, IS_DRAFTING=False, APPLY_TEMPERATURE=True, USE_FP64=False, PER_TOKEN_COL=False
    )
    same(both, (NUM_REQUESTS, 2), *arguments, **constants)


def test_expand_idx_mapping(kernel: Any) -> None:
    both = kernel("input_batch._expand_idx_mapping_kernel")
    rows = torch.tensor([3, 0, 2, 5])
    ends = torch.tensor([0, 1, 4, 9, 10], dtype=torch.int32)
    expanded, local = torch.full((12,), -7), torch.full((12,), -7, dtype=torch.int32)
    same(both, (4,), rows, expanded, local, ends, BLOCK_SIZE=8)


@pytest.mark.parametrize("vocab_size", [1500, 1024])
def test_apply_grammar_bitmask(kernel: Any, draw: Any, vocab_size: int) -> None:
    """Rows that a schedule trimmed are behind a request's last, and left alone."""
    both = kernel("structured_outputs._apply_grammar_bitmask_kernel")
    words = -(-vocab_size // 32)
    logits = draw(7, vocab_size, dtype=torch.float32)
    bitmask = draw(6, words, low=-(2**31), high=2**31 - 1)
    places = torch.tensor([0, 1, 2, 6, 7, 8], dtype=torch.int32)  # requests 0 and 2, three rows each at most
    ends = torch.tensor([0, 2, 3, 6, 7], dtype=torch.int32)
    grid = (6, -(-vocab_size // 1024))
    arguments = (logits, logits.stride(0), places, ends, bitmask, bitmask.stride(0), vocab_size)
    same(both, grid, *arguments, MASK_STRIDE=3, BLOCK_SIZE=1024)
