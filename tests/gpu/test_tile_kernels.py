"""Our operators against TileKernels' own, the release's kernels for the same arithmetic, on a GPU that these run on.

TileKernels asks for Python 3.12, TileLang 0.1.15 and an NVIDIA GPU of SM90 or SM100. The operators are those of the
CPU: it is their definition that is tested. Each bound is derived from the steps that a kernel takes in float32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels import cache_layout
from deepinfer_plugins.kernels.catalogue import Ops, load_ops
from deepinfer_plugins.model.engram import engram_tables
from deepinfer_plugins.model.presets import preset


def _reason() -> str:
    """Why TileKernels can't run here; empty if it can."""
    missing = [name for name in ("tilelang", "tile_kernels") if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}, not installed"
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU, none found"
    if (capability := torch.cuda.get_device_capability()) < (9, 0):
        return f"needs SM90 or SM100, found SM{capability[0]}{capability[1]}"
    return ""


pytestmark = pytest.mark.skipif(bool(_reason()), reason=f"TileKernels {_reason()}")

# One step of float32, and one of bf16, relative.
ULP = 2.0**-23
STEP = 2.0**-7
RELEASE = preset("release")
ROWS = [1, 37, 515]


@pytest.fixture(scope="module")
def ops() -> Ops:
    return load_ops(Want(Arch.CPU, batch_invariant=True))


def _normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# ---- Engram ----


@pytest.mark.parametrize("rows", ROWS)
def test_engram_hash(ops: Ops, rows: int) -> None:
    from tile_kernels.engram import engram_hash

    generator = torch.Generator().manual_seed(rows)
    context = torch.randint(0, 99092, (rows, RELEASE.engram_max_ngram_size), generator=generator)
    context[0] = 99091
    tables = engram_tables(RELEASE).values()
    multipliers = torch.tensor([list(table.multipliers) for table in tables])
    primes = torch.tensor([[list(row) for row in table.primes] for table in tables])
    offsets = torch.tensor([[list(row) for row in table.offsets] for table in tables])
    image = torch.rand(rows, generator=generator) < 0.1
    theirs = engram_hash(
        context.int().cuda(),
        multipliers.cuda(),
        primes.int().cuda(),
        offsets.flatten(1).int().cuda(),
        image.cuda(),
    ).cpu()
    for i in range(len(primes)):
        got = ops.engram_hash(context, multipliers[i], primes[i], offsets[i])
        assert_same_bits(got.masked_fill(image[:, None], -1).int(), theirs[i], f"table {i}")


@pytest.mark.parametrize("rows", ROWS)
def test_engram_gate(ops: Ops, rows: int) -> None:
    from tile_kernels.engram import engram_gate_fwd, fused_weight

    s, hidden, eps = RELEASE.hc_mult, RELEASE.hidden_size, RELEASE.rms_norm_eps
    streams = _normal(rows, s, hidden, seed=1, scale=3).bfloat16()
    projected = _normal(rows, s + 1, hidden, seed=2).bfloat16()
    q_weight, k_weight = (1 + _normal(s, hidden, seed=seed, scale=0.2).bfloat16() for seed in (3, 4))
    weight = fused_weight(q_weight.cuda(), k_weight.cuda())
    assert_same_bits(weight.cpu(), q_weight.float() * k_weight.float(), "fused weight")
    image = torch.arange(rows) % 5 == 3
    theirs = engram_gate_fwd(
        streams.cuda(),
        projected.cuda(),
        weight,
        eps,
        1e-6,
        save_for_backward=False,
        image_token_mask=image.cuda(),
    )[0].cpu()
    keys, value = projected[:, :-1].contiguous(), projected[:, -1].contiguous()
    got = ops.engram_gate(streams, keys, value, weight.cpu(), eps, image)
    assert_same_bits(got[image], theirs[image], "images stay")
    # A thread adds hidden / 32 products and a warp five times more: so many steps of the sum of magnitudes. Two
    # inverse roots and the rest add ten. The square root's slope is 1 / (2 sqrt(d)), the sigmoid's at most 1/4.
    x, k, w = streams.double(), keys.double(), weight.cpu().double()
    scale = torch.rsqrt(x.square().mean(-1)) * torch.rsqrt(k.square().mean(-1)) * hidden**-0.5
    likeness = ((x * w * k).sum(-1) * scale).abs().clamp(min=1e-6)
    error = ((x * w * k).abs().sum(-1) * scale * (hidden / 32 + 15) * ULP).minimum(2 * likeness)
    bound = error / (8 * likeness.sqrt()) + 16 * ULP
    allowed = got.double().abs() * STEP + bound[..., None] * value.double().abs()[:, None] + 2.0**-130
    assert ((got.double() - theirs.double()).abs() <= allowed).all()
    assert (got != theirs).double().mean() < 0.02


# ---- Hyper-connections ----


@pytest.mark.parametrize("rows", ROWS)
def test_split_and_sinkhorn(ops: Ops, rows: int) -> None:
    from tile_kernels.mhc.pre_split_mixes_kernel import mhc_pre_split_mixes_fwd
    from tile_kernels.mhc.sinkhorn_kernel import mhc_sinkhorn_fwd

    s, hidden, eps, iters = RELEASE.hc_mult, 256, RELEASE.hc_eps, RELEASE.hc_sinkhorn_iters
    streams = _normal(rows, s, hidden, seed=5).bfloat16()
    fn = _normal(s * (2 + s), s * hidden, seed=6) / (s * hidden) ** 0.5
    base, scale = _normal(s * (2 + s), seed=7), _normal(3, seed=8)
    want = ops.hc_mix(streams, fn, base, scale, RELEASE.rms_norm_eps, eps, iters)
    # The kernels begin behind the dot product, which the operator rounds to fp32.
    flat = streams.double().flatten(1)
    z = (flat @ fn.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True))).float()
    pre, post = torch.empty(rows, s, device="cuda"), torch.empty(rows, s, device="cuda")
    logits = torch.empty(rows, s * s, device="cuda")
    mhc_pre_split_mixes_fwd(z.cuda(), scale.cuda(), base.cuda(), pre, post, logits, 2.0, eps)
    comb = torch.empty(rows, s, s, device="cuda")
    mhc_sinkhorn_fwd(logits.view(rows, s, s), comb, iters, eps)
    # The exponent, some four in size, is off by two steps of its own; then the exponential and a division.
    for label, got, theirs, steps in (
        ("pre", want[0], pre, 16),
        ("post", want[1], post, 32),
        # Forty normalisations of numbers up to one: four additions and a division each.
        ("comb", want[2], comb, 16 + 40 * 5),
    ):
        torch.testing.assert_close(
            theirs.cpu(), got, rtol=0, atol=steps * ULP, msg=lambda text, at=label: f"{at}: {text}"
        )


@pytest.mark.parametrize("rows", ROWS)
def test_merge_and_collapse(ops: Ops, rows: int) -> None:
    from tile_kernels.mhc.post_kernel import mhc_post_fwd
    from tile_kernels.mhc.pre_apply_mix_kernel import mhc_pre_apply_mix_fwd

    s, hidden = RELEASE.hc_mult, RELEASE.hidden_size
    streams, x = _normal(rows, s, hidden, seed=9).bfloat16(), _normal(rows, hidden, seed=10).bfloat16()
    post, comb = 2 * _normal(rows, s, seed=11).sigmoid(), _normal(rows, s, s, seed=12).softmax(-1)
    theirs = mhc_post_fwd(
        x[None].cuda(), streams[None].cuda(), post[None, ..., None].cuda(), comb[None].cuda()
    )[0].cpu()
    # Five products and four sums in float32, at most some twenty in size; then one rounding to bf16 on both sides.
    torch.testing.assert_close(ops.hc_merge(x, streams, post, comb), theirs, rtol=STEP, atol=9 * 20 * ULP)
    collapsed = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda")
    mhc_pre_apply_mix_fwd(streams.cuda(), post.cuda(), collapsed)
    torch.testing.assert_close(ops.hc_collapse(streams, post), collapsed.cpu(), rtol=STEP, atol=7 * 20 * ULP)


# ---- Routing ----


@pytest.mark.parametrize("experts, topk", [(384, 6), (128, 3)])
@pytest.mark.parametrize("rows", ROWS)
def test_route(ops: Ops, rows: int, experts: int, topk: int) -> None:
    from tile_kernels.moe import moe_topk_gate_forward

    logits, bias = _normal(rows, experts, seed=13, scale=2), _normal(experts, seed=14, scale=0.1)
    image_bias, image = _normal(experts, seed=15, scale=0.1), torch.arange(rows) % 3 == 1
    ids, weights = moe_topk_gate_forward(
        logits.cuda(),
        topk,
        use_shared_as_routed=False,
        num_shared_experts=0,
        routed_scaling_factor=RELEASE.routed_scaling_factor,
        ep_rank=0,
        bias=bias.cuda(),
        image_bias=image_bias.cuda(),
        image_token_mask=image.cuda(),
    )
    per_row = torch.where(image[:, None], image_bias, bias)
    got_ids, got_weights = ops.route(logits, per_row, topk, RELEASE.routed_scaling_factor)
    # Both choose by fp32 keys of size one to four that may be off by a few steps: a different choice must be so near.
    key = torch.nn.functional.softplus(logits.double()).sqrt() + per_row.double()
    ours, theirs = key.gather(1, got_ids), key.gather(1, ids.cpu())
    torch.testing.assert_close(theirs, ours, rtol=0, atol=32 * ULP)
    assert (got_ids == ids.cpu()).double().mean() > 0.999
    same = (got_ids == ids.cpu()).all(-1)
    torch.testing.assert_close(got_weights[same], weights.cpu()[same], rtol=32 * ULP, atol=0)


def test_route_breaks_ties_by_the_lower_id(ops: Ops) -> None:
    from tile_kernels.moe import moe_topk_gate_forward

    logits = torch.zeros(5, 384)
    logits[1, 100:] = 1
    ids, _ = moe_topk_gate_forward(logits.cuda(), 6, False, 0, 1.5, 0, bias=torch.zeros(384, device="cuda"))
    assert ids[0].tolist() == list(range(6)) and ids[1].tolist() == list(range(100, 106))
    assert_same_bits(ops.route(logits, torch.zeros(384), 6, 1.5)[0], ids.cpu(), "ids")


# ---- Casts ----


def _spread(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different size; among them zeros and, where there are enough, ties of the small formats."""
    x = _normal(rows, width, seed=16) * torch.exp2(torch.arange(rows).remainder(19) - 9.0)[:, None]
    if rows > 2:
        x[1] = 0
        x[2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(width // 8)
    return x.to(dtype)


def _records(store: Callable[..., None], x: torch.Tensor, record_bytes: int) -> torch.Tensor:
    pages = torch.full((x.shape[0], 1, record_bytes), 0xFF, dtype=torch.uint8)
    store(x, pages, torch.arange(x.shape[0]))
    return pages[:, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", ROWS)
def test_mxfp8_cast(ops: Ops, rows: int, dtype: torch.dtype) -> None:
    from tile_kernels.quant import per_token_cast

    x = _spread(rows, RELEASE.hidden_size, dtype)
    theirs, scales = per_token_cast(x.cuda(), "e4m3", 32, round_sf=True)
    values, exponents = ops.mxfp8_cast(x)
    assert_same_bits(exponents, (scales.cpu().log2() + 127).to(torch.uint8), "scales")
    assert_same_bits(values, theirs.cpu(), "values")


@pytest.mark.parametrize("rows", ROWS)
def test_index_record(ops: Ops, rows: int) -> None:
    from tile_kernels.quant import per_token_cast

    x = _spread(rows, RELEASE.index_head_dim, torch.bfloat16)
    theirs, scales = per_token_cast(x.cuda(), "e2m1", 32, round_sf=True)
    ours = _records(ops.store_index_key, x, cache_layout.index_key_bytes(RELEASE.index_head_dim))
    half = RELEASE.index_head_dim // 2
    assert_same_bits(ours[:, half:], (scales.cpu().log2() + 127).to(torch.uint8), "scales")
    assert_same_bits(ours[:, :half], theirs.view(torch.uint8).cpu(), "values")


@pytest.mark.parametrize("rows", ROWS)
def test_compressed_record(ops: Ops, rows: int) -> None:
    from tile_kernels.quant import per_token_cast

    x = _spread(rows, RELEASE.head_dim, torch.bfloat16)
    theirs, scales = per_token_cast(x.cuda(), "e2m1", 16, use_e4m3_sf=True)
    ours = _records(ops.store_compressed, x, cache_layout.compressed_bytes(RELEASE.head_dim))
    half = RELEASE.head_dim // 2
    assert_same_bits(ours[:, half:], scales.view(torch.uint8).cpu(), "scales")
    assert_same_bits(ours[:, :half], theirs.view(torch.uint8).cpu(), "values")


# ---- Rotary positions ----


@pytest.mark.parametrize("inverse", [False, True])
def test_rope(ops: Ops, inverse: bool) -> None:
    from tile_kernels.transform import apply_rotary

    rope = RELEASE.qk_rope_head_dim
    positions = torch.tensor([0, 5, 4095, 77, 1023])
    angle = torch.arange(4096.0)[:, None] * 10000.0 ** (-torch.arange(0, rope, 2) / rope)
    table = torch.cat([angle.cos(), angle.sin()], -1)
    x = _normal(5, 3, 2 * rope, seed=17).bfloat16()
    theirs = x.cuda()
    apply_rotary(
        theirs[..., rope:], table.cuda(), positions=positions.cuda(), interleaved=True, conjugate=inverse
    )
    got = ops.rope(x, positions, table, inverse)
    # Two products and a sum of numbers below five, in float32; then one rounding to bf16 on both sides.
    torch.testing.assert_close(got, theirs.cpu(), rtol=STEP, atol=3 * 5 * ULP)
    assert_same_bits(got[..., :rope], x[..., :rope], "what isn't rotated")
