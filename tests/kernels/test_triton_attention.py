"""Triton providers of attention, caches, hyper-connections and Engram, in Triton's interpreter.

On a GPU the tests of each operator run them for real.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.cache_layout import compressed_bytes, index_key_bytes, window_bytes
from deepinfer_plugins.kernels.registry import NoProvider, choose, providers
from deepinfer_plugins.kernels.spec import Provider
from deepinfer_plugins.model.presets import preset

from .conformance import Case, Conformance, Draw, check_agreement
from .test_engram_gate import TestEngramGate as _EngramGate
from .test_engram_gather import TestEngramGather as _EngramGather
from .test_engram_hash import TestEngramHash as _EngramHash
from .test_hc_collapse import TestHcCollapse as _HcCollapse
from .test_hc_merge import TestHcMerge as _HcMerge
from .test_hc_mix import TestHcMix as _HcMix
from .test_index_select import TestIndexSelect as _IndexSelect
from .test_pool_pairs import TestPoolPairs as _PoolPairs
from .test_sparse_attention import TestSparseAttention as _SparseAttention
from .test_stores import TestLoadCompressor as _LoadCompressor
from .test_stores import TestStoreCompressed as _StoreCompressed
from .test_stores import TestStoreCompressor as _StoreCompressor
from .test_stores import TestStoreIndexKey as _StoreIndexKey
from .test_stores import TestStoreWindow as _StoreWindow

OPERATORS: dict[str, type[Conformance]] = {
    tests.op: tests
    for tests in (
        _HcMerge,
        _HcMix,
        _HcCollapse,
        _EngramHash,
        _EngramGather,
        _EngramGate,
        _PoolPairs,
        _LoadCompressor,
        _StoreCompressor,
        _StoreWindow,
        _StoreCompressed,
        _StoreIndexKey,
        _SparseAttention,
        _IndexSelect,
    )
}
VARIANTS = [(op, variant) for op, tests in OPERATORS.items() for variant in tests.variants]

# More than a program computes.
MANY_ROWS = {("hc_mix", "1 iteration"): 70, ("engram_hash", ""): 40, ("engram_gather", ""): 19}

CPU = torch.device("cpu")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="needs TRITON_INTERPRET=1; a GPU runs the kernels themselves"
)


@pytest.fixture
def chip(device: torch.device) -> torch.device:
    """A device that runs Triton kernels, if by its interpreter."""
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    return device


def triton_provider(op: str) -> Provider:
    return next(provider for provider in providers(op) if provider.name == "triton")


@pytest.mark.parametrize("op", OPERATORS)
def test_is_chosen_by_name_on_the_chips_it_is_built_for(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"DEEPINFER_PLUGINS_{op.upper()}", "triton")
    assert choose(op, Want(Arch.SM90)).provider == triton_provider(op)
    with pytest.raises(NoProvider, match="built for sm100, sm90, not cpu"):
        choose(op, Want(Arch.CPU))


@interpreted
@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("op, variant", VARIANTS)
def test_agrees_as_claimed(op: str, variant: str, num_rows: int) -> None:
    check_agreement(triton_provider(op), OPERATORS[op]().case(Draw(CPU), num_rows, variant))


def check_rows(function: Callable[..., Any], case: Case) -> None:
    """Fail unless some rows have the same bits alone, and in other batches and places."""
    together = case.call(function)
    last = case.num_rows - 1
    for rows in ([last], [last - 1, 1, 0]):
        for got, want in zip(
            case.call(function, torch.tensor(rows, device=together[0].device)), together, strict=True
        ):
            assert_same_bits(got, want[rows], f"rows {rows}")


def many_rows(op: str, variant: str, device: torch.device = CPU) -> Case:
    """More rows than a program computes."""
    return OPERATORS[op]().case(Draw(device, seed=4), MANY_ROWS.get((op, variant), 5), variant)


@interpreted
@pytest.mark.parametrize("op, variant", VARIANTS)
def test_row_does_not_depend_on_the_batch(op: str, variant: str) -> None:
    check_rows(triton_provider(op).load(), many_rows(op, variant))


def wide_mix(device: torch.device) -> Case:
    """Streams of several parts, the last of which is not whole."""
    draw, width = Draw(device, seed=5), 4 * 336
    args = many_rows("hc_mix", "1 iteration", device).args
    args |= {
        "streams": draw.normal(66, 4, 336),
        "fn": draw.normal(24, width, dtype=torch.float32, scale=0.05),
    }
    return Case(args, rows=("streams",))


def test_streams_of_several_parts(chip: torch.device) -> None:
    case = wide_mix(chip)
    check_agreement(triton_provider("hc_mix"), case)
    check_rows(triton_provider("hc_mix").load(), case)


@pytest.mark.parametrize(
    "op, constant, other",
    [("hc_mix", "SPLIT", 320), ("sparse_attention", "KEYS", 64), ("sparse_attention", "INDEX_PARTS", 1)],
)
def test_a_split_that_depends_on_the_batch_is_caught(
    op: str, constant: str, other: int, chip: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators that sum in float32. What the others sum in float64 is rounded to the same bits in any order."""
    module = importlib.import_module(f"deepinfer_plugins.kernels.{op}.triton")
    usual = getattr(module, constant)

    def mutant(**args: Any) -> Any:
        few = len(args["streams" if op == "hc_mix" else "q"]) < 3
        monkeypatch.setattr(module, constant, other if few else usual)
        return getattr(module, op)(**args)

    case = wide_mix(chip) if op == "hc_mix" else many_rows(op, "compressed", chip)
    if op == "sparse_attention":
        # Every part has keys.
        case.args["indices"] = torch.arange(45, device=chip).int().repeat(case.num_rows, 1)
    with pytest.raises(AssertionError, match="first difference"):
        check_rows(mutant, case)


def repaged(pages: torch.Tensor, table: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same entries in pages of another size, in another order; NaN where none is."""
    records = pages[table].flatten(1, 2)
    per_request = -(-records.shape[1] // page_size)
    names = Draw(pages.device, seed=page_size).order(len(table) * per_request).view(len(table), per_request)
    new = torch.full((names.numel(), page_size, pages.shape[2]), 0xFF, dtype=torch.uint8, device=pages.device)
    for row, record in zip(names, records):
        entry = torch.arange(len(record), device=pages.device)
        new[row[entry // page_size], entry % page_size] = record
    return new, names.int()


PAGED = [("sparse_attention", "compressed"), ("index_select", "publish")]


@pytest.mark.parametrize("op, variant", PAGED)
def test_page_size_has_no_influence(op: str, variant: str, chip: torch.device) -> None:
    """The pages of the case hold 7 entries."""
    case = OPERATORS[op]().case(Draw(chip), 4, variant)
    function = triton_provider(op).load()
    together = case.call(function)
    kinds = [""] if op == "index_select" else ["window_", "compressed_"]
    for page_size in (16, 64):
        for kind in kinds:
            pages, table = repaged(case.args[f"{kind}pages"], case.args[f"{kind}table"], page_size)
            case.args[f"{kind}pages"], case.args[f"{kind}table"] = pages, table
        for got, want in zip(case.call(function), together, strict=True):
            assert_same_bits(got, want, f"pages of {page_size}")


@pytest.mark.parametrize("op, variant", PAGED)
def test_graph_padding_has_no_influence(op: str, variant: str, chip: torch.device) -> None:
    """Rows that a graph adds see nothing: no window, no entries, no candidates."""
    case = OPERATORS[op]().case(Draw(chip), 3, variant)
    function = triton_provider(op).load()
    alone = case.call(function)
    nothing = {"window_end": -1, "window_start": 0, "lengths": 0, "indices": -1, "candidates": -1}
    for padding in (1, 5):
        padded = dict(case.args)
        for name in case.rows:
            if padded[name] is not None:
                extra = torch.full_like(padded[name][:1].expand(padding, *padded[name].shape[1:]), 0)
                padded[name] = torch.cat([padded[name], extra + nothing.get(name, 0)])
        got = function(**padded)
        for part, want in zip(got if isinstance(got, tuple) else (got,), alone, strict=True):
            assert_same_bits(part[:3], want, f"padded by {padding}")
            assert not part[3:].gt(0).any()


@pytest.mark.parametrize(
    "op, constant", [("sparse_attention", "ELEMENTS_AT_ONCE"), ("index_select", "KEYS_AT_ONCE")]
)
def test_a_small_workspace_has_no_influence(
    op: str, constant: str, chip: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = OPERATORS[op]().case(Draw(chip), 5, "compressed" if op == "sparse_attention" else "publish")
    function = triton_provider(op).load()
    want = case.call(function)
    # That of two rows.
    per_row = 3 * 3 * 64 if op == "sparse_attention" else case.args["table"].shape[1] * 7
    monkeypatch.setattr(
        importlib.import_module(f"deepinfer_plugins.kernels.{op}.triton"), constant, 2 * per_row + 1
    )
    for got, expected in zip(case.call(function), want, strict=True):
        assert_same_bits(got, expected, "two rows at a time")


def test_wide_keys(chip: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are decoded some columns at a time and whose results programs share; read by bytes, and by words."""
    monkeypatch.setattr("tests.kernels.test_sparse_attention.D", 256)
    case = OPERATORS["sparse_attention"]().case(Draw(chip), 2, "compressed")
    provider = triton_provider("sparse_attention")
    alone = case.call(provider.load(), torch.tensor([1], device=chip))[0]
    for name in ("window_pages", "compressed_pages"):
        case.args[name] = case.args[name].contiguous()
    check_agreement(provider, case)
    assert_same_bits(case.call(provider.load())[0][1:], alone, "a row alone, by bytes")


def test_kernels_of_one_cache_each_give_the_same_bits(
    chip: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for many rows."""
    case = OPERATORS["sparse_attention"]().case(Draw(chip), 2, "compressed")
    module = importlib.import_module("deepinfer_plugins.kernels.sparse_attention.triton")
    want = module.sparse_attention(**case.args)
    monkeypatch.setattr(module, "FEW_ROWS", 0)
    assert_same_bits(module.sparse_attention(**case.args), want, "two kernels")


def test_number_of_heads_has_no_influence(chip: torch.device) -> None:
    """One head, as a rank of many would have, and more than a program computes."""
    args = _SparseAttention().case(Draw(chip), 2, "compressed").args
    function = triton_provider("sparse_attention").load()
    want = function(**args)
    for heads in (torch.tensor([1]), torch.arange(66) % 3):
        heads = heads.to(chip)
        got = function(**args | {"q": args["q"][:, heads], "sinks": args["sinks"][heads]})
        assert_same_bits(got, want[:, heads], f"{len(heads)} heads")


def test_the_size_of_a_step_has_no_influence(chip: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a selection: its scores are exact, and it counts."""
    case = OPERATORS["index_select"]().case(Draw(chip), 3, "publish")
    module = importlib.import_module("deepinfer_plugins.kernels.index_select.triton")
    want = case.call(module.index_select)
    for name, value in {"PLACES": 32, "KEYS": 64, "PROGRAMS": 5}.items():
        monkeypatch.setattr(module, name, value)
    for got, expected in zip(case.call(module.index_select), want, strict=True):
        assert_same_bits(got, expected, "small steps")


class Unlaunched:
    """In place of a kernel: nothing runs."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: None


@pytest.mark.parametrize(("op", "most"), [("sparse_attention", 80), ("index_select", 160), ("hc_mix", 64)])
def test_the_workspace_of_16k_tokens_and_a_million_entries_is_bounded(
    op: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the release's shapes, without memory: what is allocated beside the results, in MiB."""
    module = importlib.import_module(f"deepinfer_plugins.kernels.{op}.triton")
    for kernel in [
        name for name, value in vars(module).items() if hasattr(value, "warmup") and name[:1] == "_"
    ]:
        monkeypatch.setattr(module, kernel, Unlaunched())
    config, n = preset("release"), 16384
    allocated: list[int] = []

    def meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="meta")

    empty = torch.empty

    def watched(*shape: Any, **options: Any) -> torch.Tensor:
        tensor: torch.Tensor = empty(*shape, **options)
        allocated.append(tensor.numel() * tensor.element_size())
        return tensor

    def cache(record_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_pages = config.max_position_embeddings // 64
        return meta(num_pages, 64, record_bytes), meta(1, num_pages, dtype=torch.int32)

    row, bfloat16, float32 = meta(n, dtype=torch.int64), torch.bfloat16, torch.float32
    if op == "sparse_attention":
        heads, d = config.num_attention_heads, config.head_dim
        indices = meta(n, config.index_topk, dtype=torch.int32)
        caches = *cache(window_bytes(d)), *cache(compressed_bytes(d))
        q, sinks = meta(n, heads, d, dtype=bfloat16), meta(heads, dtype=float32)
        args: tuple[Any, ...] = (q, *caches, indices, row, row, row, sinks, 1.0)
    elif op == "index_select":
        heads, d = config.index_n_heads, config.index_head_dim
        q, weights = meta(n, heads, d, dtype=bfloat16), meta(n, heads, dtype=bfloat16)
        choice = config.index_topk, None, config.candidate_topk_blocks, config.candidate_block_size
        args = (q, weights, *cache(index_key_bytes(d)), row, row, *choice)
    else:
        streams, width = config.hc_mult, config.hc_mult * config.hidden_size
        mixes = streams * (2 + streams)
        fn, base = meta(mixes, width, dtype=float32), meta(mixes, dtype=float32)
        streams_of_rows = meta(n, streams, config.hidden_size, dtype=bfloat16)
        args = (streams_of_rows, fn, base, meta(3, dtype=float32), 1e-20, 1e-6, 20)
    monkeypatch.setattr(torch, "empty", watched)
    results = getattr(module, op)(*args)
    results = results if isinstance(results, tuple) else (results,)
    workspace = sum(allocated) - sum(result.numel() * result.element_size() for result in results)
    assert 0 < workspace <= most << 20, f"{workspace / 2**20:.0f} MiB"
