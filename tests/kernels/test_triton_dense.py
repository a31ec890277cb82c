"""The Triton providers of linear layers, experts, router, norms and casts: in Triton's interpreter, or on a GPU.

On a GPU the tests of each operator run them as well.
"""

from __future__ import annotations

import importlib
import inspect
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.mxfp8_cast.reference import mxfp8_cast
from deepinfer_plugins.kernels.registry import NoProvider, choose, providers
from deepinfer_plugins.kernels.spec import Provider
from deepinfer_plugins.model.presets import preset

from .conformance import Case, Conformance, Draw, check_agreement, reference
from .test_combine import TestCombine as _Combine
from .test_experts import TestExperts as _Experts
from .test_linear import TestLinear as _Linear
from .test_mxfp8_cast import TestMxfp8Cast as _Cast
from .test_mxfp8_grouped_linear import TestMxfp8GroupedLinear as _Grouped
from .test_mxfp8_linear import TestMxfp8Linear as _Mxfp8
from .test_rms_norm import TestRmsNorm as _Norm
from .test_rope import TestRope as _Rope
from .test_route import TestRoute as _Route
from .test_swiglu_and_cast import TestSwigluAndCast as _Swiglu

OPERATORS: dict[str, type[Conformance]] = {
    tests.op: tests
    for tests in (_Mxfp8, _Grouped, _Linear, _Experts, _Route, _Combine, _Swiglu, _Cast, _Norm, _Rope)
}
VARIANTS = [(op, variant) for op, tests in OPERATORS.items() for variant in tests.variants]
SUMS = ["mxfp8_linear", "mxfp8_grouped_linear", "linear"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Length of a row's part. The interpreter, which is slow, gets parts of one step.
PART = 128 if INTERPRETED else 1024


@pytest.fixture(scope="module")
def chip() -> torch.device:
    """Where the kernels run here."""
    if INTERPRETED:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU")


@pytest.fixture
def matmul(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the linear layers share, with two parts of rows of twice ``PART`` or a little more."""
    module = pytest.importorskip("deepinfer_plugins.kernels.triton_matmul")
    monkeypatch.setattr(module, "_SPLITS", {2 * PART: 2, 2 * PART + 64: 2})
    return module


def triton_provider(op: str) -> Provider:
    return next(provider for provider in providers(op) if provider.name == "triton")


def check_some_rows(function: Callable[..., Any], case: Case) -> None:
    """Fail unless rows have the same bits alone, in small batches and in another order."""
    together = case.call(function)
    n = case.num_rows
    orders = [[n - 1], [n // 2, 0], list(range(2, 9)), list(range(n))[::-1]]
    for rows in orders:
        index = torch.tensor(rows, device=together[0].device)
        for got, want in zip(case.call(function, index), together, strict=True):
            assert_same_bits(got, want[index], f"rows {rows} of {n}")


@pytest.mark.parametrize("op", OPERATORS)
def test_is_chosen_by_name_on_the_chips_it_is_built_for(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"DEEPINFER_PLUGINS_{op.upper()}", "triton")
    assert (
        choose(op, Want(Arch.SM90)).provider == choose(op, Want(Arch.SM100)).provider == triton_provider(op)
    )
    with pytest.raises(NoProvider, match="built for sm100, sm90, not cpu"):
        choose(op, Want(Arch.CPU))


@pytest.mark.parametrize("op", OPERATORS)
def test_signature_is_the_definitions(op: str, chip: torch.device) -> None:
    assert inspect.signature(triton_provider(op).load()) == inspect.signature(reference(op))


@pytest.mark.parametrize("num_rows", [0, 1, 63])
@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_agrees_as_claimed(op: str, variant: str, num_rows: int, chip: torch.device) -> None:
    check_agreement(triton_provider(op), OPERATORS[op]().case(Draw(chip), num_rows, variant))


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_row_does_not_depend_on_the_batch(op: str, variant: str, chip: torch.device) -> None:
    """More rows than a program computes, and as many as other programs compute."""
    num_rows = 70 if op in SUMS else 20
    check_some_rows(triton_provider(op).load(), OPERATORS[op]().case(Draw(chip, seed=2), num_rows, variant))


# ---- sums over long rows ----


def cancelling(op: str, device: torch.device, num_rows: int, k: int = 2 * PART) -> Case:
    """Rows whose second half takes away what the first half adds: what is left are the roundings of the sum."""
    draw = Draw(device, seed=7)
    if op == "linear":
        x, weight = draw.normal(num_rows, k // 2, scale=30), draw.normal(40, k // 2)
        args = {
            "x": torch.cat([x, x], 1),
            "weight": torch.cat([weight, -weight], 1),
            "out_dtype": torch.bfloat16,
        }
        return Case(args, rows=("x",))
    groups = 2 if op == "mxfp8_grouped_linear" else 1
    values, scales = mxfp8_cast(draw.normal(num_rows, groups, k // 2))
    weight, weight_scales = draw.e4m3(groups * 32, k // 2), draw.scales(groups, k // 64)
    negative = (weight.view(torch.uint8) ^ 0x80).view(weight.dtype)
    args = {
        "values": torch.cat([values.view(torch.uint8)] * 2, 2).view(values.dtype),
        "scales": torch.cat([scales] * 2, 2),
        "weight": torch.cat([weight.view(torch.uint8), negative.view(torch.uint8)], 1).view(weight.dtype),
        "weight_scales": torch.cat([weight_scales] * 2, 1),
    }
    if op == "mxfp8_linear":
        args |= {name: args[name][:, 0] for name in ("values", "scales")}
    return Case(args, rows=("values", "scales"))


@pytest.mark.parametrize("op", SUMS)
def test_long_rows_do_not_depend_on_the_batch(op: str, chip: torch.device, matmul: Any) -> None:
    """Parts of unequal length, not of whole words of scales."""
    k = 2 * PART + 64
    case = cancelling(op, chip, 20 if INTERPRETED else 70, k)
    assert matmul.num_splits(k, 40) == 2
    check_some_rows(triton_provider(op).load(), case)


@pytest.mark.parametrize("op", SUMS)
def test_a_split_that_depends_on_the_batch_is_caught(
    op: str, chip: torch.device, matmul: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cancelling(op, chip, 10)
    function = triton_provider(op).load()

    def mutant(**args: Any) -> Any:
        few = len(args[case.rows[0]]) < 8
        with monkeypatch.context() as patch:
            patch.setattr(matmul, "num_splits", lambda k, m: 1 if few else 2)
            return function(**args)

    with pytest.raises(AssertionError, match="first difference"):
        check_some_rows(mutant, case)


@pytest.mark.parametrize("op", SUMS)
def test_every_tiling_gives_the_same_bits(
    op: str, chip: torch.device, matmul: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cancelling(op, chip, 17 if INTERPRETED else 200)
    function = triton_provider(op).load()
    want = case.call(function)[0]
    tiles = [*matmul._FEW.values(), *matmul._MORE]
    if INTERPRETED:
        tiles = [tile._replace(step=128) for tile in (tiles[0], tiles[-1], tiles[-3])]
    for tile in tiles:
        for separate in (False, True):
            if tile.rows > 128 and not separate:
                continue
            monkeypatch.setattr(matmul, "tiling", lambda *_, tile=tile, separate=separate: (tile, separate))
            assert_same_bits(case.call(function)[0], want, f"{tile}, separate={separate}")


@pytest.mark.parametrize("op", SUMS)
def test_operands_read_by_descriptors_give_the_same_bits(
    op: str, chip: torch.device, matmul: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are decoded beforehand, and those that are not, in tiles of every kind."""
    case = cancelling(op, chip, 65)
    function = triton_provider(op).load()
    few = torch.tensor([64, 3], device=chip)
    want = case.call(function, few)[0]
    monkeypatch.setattr(matmul, "_MANY_ROWS", 65)
    tiles = [tile for tile, _ in matmul._DESCRIBED]
    for tile in (tiles[-1]._replace(step=128),) if INTERPRETED else tiles:
        for separate in (False, True):
            if tile.outputs > 128 and not separate:
                continue
            choice = (tile, separate)
            monkeypatch.setattr(matmul, "described_tiling", lambda *_, choice=choice: choice)
            assert_same_bits(case.call(function)[0][few], want, f"{tile}, separate={separate}")


@pytest.mark.parametrize("op", ["mxfp8_linear", "mxfp8_grouped_linear"])
def test_decoding_a_part_at_a_time_changes_nothing(
    op: str, chip: torch.device, matmul: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = OPERATORS[op]().case(Draw(chip), 63, OPERATORS[op].variants[0])
    function = triton_provider(op).load()
    want = case.call(function)[0]
    monkeypatch.setattr(matmul, "_MANY_ROWS", 40)
    assert_same_bits(case.call(function)[0], want, "a weight decoded beforehand")
    monkeypatch.setattr(matmul, "_WEIGHT_ELEMENTS", 1)
    monkeypatch.setattr(matmul, "_ROW_ELEMENTS", 20 * case.args["values"][0].numel())
    assert_same_bits(case.call(function)[0], want, "20 rows and 128 outputs at a time")


def test_a_fused_projection_has_the_bits_of_its_parts(chip: torch.device, matmul: Any) -> None:
    draw, k = Draw(chip), 2 * PART
    values, scales = mxfp8_cast(draw.normal(5, k))
    weight, weight_scales = draw.e4m3(200, k), draw.scales(7, k // 32)
    function = triton_provider("mxfp8_linear").load()
    fused = function(values, scales, weight, weight_scales)
    for start, stop in [(0, 64), (64, 200)]:
        part = function(values, scales, weight[start:stop], weight_scales[start // 32 : -(-stop // 32)])
        assert_same_bits(part, fused[:, start:stop], f"outputs {start} to {stop}")


def test_sums_of_float32_are_as_near_as_float32_allows(chip: torch.device) -> None:
    draw = Draw(chip)
    x, weight = draw.normal(9, 4096), draw.normal(50, 4096)
    got = triton_provider("linear").load()(x, weight, torch.float32).double()
    want = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert float(((got - want).abs() / size).max()) < 2.0**-21


def test_a_nan_row_stays_alone(chip: torch.device) -> None:
    draw = Draw(chip)
    values, scales = mxfp8_cast(draw.normal(6, 64))
    scales[-1] = 0xFF
    got = triton_provider("mxfp8_linear").load()(values, scales, draw.e4m3(32, 64), draw.scales(1, 2))
    assert got[-1].isnan().all() and got[:-1].isfinite().all()


def test_the_workspace_is_bounded() -> None:
    """Sums of parts, for every shape of weight and number of rows: at most 64 MiB."""
    matmul = pytest.importorskip("deepinfer_plugins.kernels.triton_matmul")
    gluon = pytest.importorskip("deepinfer_plugins.kernels.gluon_matmul")
    for k in (256, 1280, 2304, 4096, 5120, 8192, 15360):
        for m in (1, 32, 384, 1024, 1792, 5120, 32768, 129280):
            splits = matmul.num_splits(k, m)
            for groups in (1, 8):
                for n in (1, 16, 17, 64, 65, 100, 256, 1000, 4096, 16384):
                    for _, separate in (
                        matmul.tiling(n, m, groups, splits),
                        matmul.described_tiling(n, m, k, groups, splits),
                        gluon.tiling(n, m, groups, splits),
                    ):
                        assert not separate or 4 * splits * n * groups * m <= 64 << 20, (n, m, k, groups)


class Unlaunched:
    """In place of a kernel: nothing runs."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: None


@pytest.mark.parametrize(
    ("op", "name", "most"),
    [("mxfp8_linear", "wq_b", 192), ("mxfp8_linear", "wo_b", 192), ("experts", "experts", 1024)],
)
@pytest.mark.parametrize("provider", ["triton", "gluon"])
def test_the_workspace_of_16k_tokens_is_bounded(
    provider: str, op: str, name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the release's shapes, without memory: what is allocated beside the result, in MiB."""
    paths = ["triton_matmul", "experts.triton"]
    if provider == "gluon":
        pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
        paths += ["gluon_matmul", "experts.gluon"]
    function = next(one for one in providers(op) if one.name == provider).load()
    for path in paths:
        module = importlib.import_module(f"deepinfer_plugins.kernels.{path}")
        for kernel in [
            name for name, value in vars(module).items() if hasattr(value, "warmup") and name[:1] == "_"
        ]:
            monkeypatch.setattr(module, kernel, Unlaunched())
    config, n = preset("release"), 16384

    def meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="meta")

    def mxfp8(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return meta(rows, k, dtype=torch.float8_e4m3fn), meta(rows, k // 32)

    k, d, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    if op == "experts":
        topk = config.num_experts_per_tok
        chosen = meta(n, topk, dtype=torch.int64), meta(n, topk, dtype=torch.float32)
        w13 = meta(count, 2 * d, k // 2), meta(count, 2 * d, k // 32)
        w2 = meta(count, k, d // 2), meta(count, k, d // 32)
        args = (*mxfp8(n, k), *chosen, *w13, *w2, 0, 10.0)
    else:
        heads, groups = config.num_attention_heads * config.head_dim, config.o_groups * config.o_lora_rank
        m, k = (heads, config.q_lora_rank) if name == "wq_b" else (k, groups)
        args = (*mxfp8(n, k), meta(m, k, dtype=torch.float8_e4m3fn), meta(m // 32, k // 32))
    living: list[weakref.ref[torch.Tensor]] = []
    peak, empty = 0, torch.empty

    def watched(*shape: Any, **options: Any) -> torch.Tensor:
        nonlocal peak
        tensor: torch.Tensor = empty(*shape, **options)
        living.append(weakref.ref(tensor))
        alive = [one for one in (ref() for ref in living) if one is not None]
        peak = max(peak, sum(one.numel() * one.element_size() for one in alive))
        return tensor

    monkeypatch.setattr(torch, "empty", watched)
    result = function(*args)
    workspace = peak - result.numel() * result.element_size()
    assert 0 < workspace <= most << 20, f"{workspace / 2**20:.0f} MiB"


# ---- experts ----


def cancelling_experts(device: torch.device, num_rows: int) -> Case:
    """Experts whose second half of inner columns takes away what the first half adds."""
    draw = Draw(device, seed=8)
    values, scales = mxfp8_cast(draw.normal(num_rows, 64))
    w13, w13_scales = draw.ints(0, 256, 2, 2, 128, 32, dtype=torch.uint8), draw.scales(2, 2, 128, 2)
    w2, w2_scales = draw.ints(0, 256, 2, 64, 64, dtype=torch.uint8), draw.scales(2, 64, 4)
    args = {
        "values": values,
        "scales": scales,
        "ids": draw.ints(0, 2, num_rows, 1),
        "weights": torch.ones(num_rows, 1, device=device),
        "w13": torch.cat([w13, w13], 2).flatten(1, 2),
        "w13_scales": torch.cat([w13_scales, w13_scales], 2).flatten(1, 2),
        "w2": torch.cat([w2, w2 ^ 0x88], 2),
        "w2_scales": torch.cat([w2_scales, w2_scales], 2),
        "first_expert": 0,
        "limit": 10.0,
    }
    return Case(args, rows=("values", "scales", "ids", "weights"))


@pytest.mark.skipif(not INTERPRETED, reason="a matrix unit rounds after each of its own steps")
def test_a_step_of_experts_that_depends_on_the_batch_is_caught(
    chip: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("deepinfer_plugins.kernels.experts.triton")
    case = cancelling_experts(chip, 10)
    check_some_rows(module.experts, case)

    def mutant(**args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_STEP", 128 if len(args["values"]) < 8 else 64)
            return module.experts(**args)

    with pytest.raises(AssertionError, match="first difference"):
        check_some_rows(mutant, case)


def long_experts(device: torch.device, num_rows: int) -> Case:
    """Rows of several steps, so that the order of steps shows in their sums."""
    draw = Draw(device, seed=13)
    values, scales = mxfp8_cast(draw.normal(num_rows, 1024))
    args = {
        "values": values,
        "scales": scales,
        "ids": draw.ints(0, 2, num_rows, 1),
        "weights": torch.ones(num_rows, 1, device=device),
        "w13": draw.ints(0, 256, 2, 128, 512, dtype=torch.uint8),
        "w13_scales": draw.scales(2, 128, 32),
        "w2": draw.ints(0, 256, 2, 1024, 32, dtype=torch.uint8),
        "w2_scales": draw.scales(2, 1024, 2),
        "first_expert": 0,
        "limit": 1e4,
    }
    return Case(args, rows=("values", "scales", "ids", "weights"))


@pytest.mark.parametrize("make", [cancelling_experts, long_experts])
def test_blocks_of_experts_of_any_size_give_the_same_bits(
    make: Any, chip: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_provider("experts").load()
    module = importlib.import_module("deepinfer_plugins.kernels.experts.triton")
    case = make(chip, 35 if INTERPRETED else 140)
    want = case.call(module.experts)[0]
    for size in (16, 64) if INTERPRETED else (16, 32, 64, 128):
        monkeypatch.setattr(module, "block_size", lambda *_, size=size: size)
        assert_same_bits(case.call(module.experts)[0], want, f"blocks of {size}")
    monkeypatch.setattr(module, "_AT_ONCE", 20)
    assert_same_bits(case.call(module.experts)[0], want, "20 rows at a time")


def test_unequal_experts(chip: torch.device) -> None:
    """One expert has nearly all rows, others none; and the ids of a shard that has few of them."""
    args = _Experts().case(Draw(chip), 63, "all here").args
    args["ids"] = torch.tensor([[0, 4, 1]], device=chip).repeat(63, 1)
    args["ids"][5] = torch.tensor([2, 3, 4], device=chip)
    for first_expert in (0, 3):
        check_agreement(
            triton_provider("experts"), Case(args | {"first_expert": first_expert}, rows=("values",))
        )


# ---- router ----


def test_route_takes_what_sorting_takes(chip: torch.device) -> None:
    """Ties, both zeros, infinities and NaN."""
    logits = torch.zeros(4, 24, device=chip)
    logits[1, 5], logits[1, 9] = torch.inf, -torch.inf
    bias = torch.zeros(24, device=chip)
    bias[3], bias[7] = -0.0, -torch.inf
    logits[2, 8] = torch.nan
    logits[3] = -60.0
    check_agreement(
        triton_provider("route"),
        Case({"logits": logits[[0, 3]], "bias": bias, "topk": 24, "scaling": 1.5}, rows=("logits",)),
    )
    ids, _ = triton_provider("route").load()(logits, bias, 6, 1.5)
    want, _ = reference("route")(logits, bias, 6, 1.5)
    assert torch.equal(ids, want)
