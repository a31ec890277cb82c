"""Our model's pieces against SGLang's own V4.1 code: its references in plain torch, and its fallbacks for a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels import cache_layout
from deepinfer_plugins.kernels.catalogue import Ops, load_ops
from deepinfer_plugins.model import oracle
from deepinfer_plugins.model.engram import engram_tables
from deepinfer_plugins.model.presets import preset

# One step of float32 and of bf16, relative.
ULP = 2.0**-23
STEP = 2.0**-7


@pytest.fixture(scope="module")
def ops() -> Ops:
    return load_ops(Want(Arch.CPU, batch_invariant=True))


def _normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def _spread(rows: int, width: int, seed: int) -> torch.Tensor:
    """bf16 rows of very different size, with a row of zeros, one of ties and one of one value."""
    x = _normal(rows, width, seed=seed)
    x = x * torch.exp2(torch.arange(rows).remainder(19) - 9.0)[:, None]
    x[1] = 0
    x[2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(width // 8)
    x[3] = -0.0078125
    return x.bfloat16()


def _stored(store, x: torch.Tensor, record_bytes: int) -> torch.Tensor:
    """The records that an operator writes for ``x``."""
    pages = torch.full((x.shape[0], 1, record_bytes), 0xFF, dtype=torch.uint8)
    store(x, pages, torch.arange(x.shape[0]))
    return pages[:, 0]


# ---- Cache records ----


def test_window_record(ops: Ops) -> None:
    from sglang.test.kernels.deepseek_v4.dsv41_kv_quant_reference import (
        interleave_pages,
        quantize_k_cache_v41,
    )

    # SGLang holds the scale up by 1e-4 where the release holds the greatest value: no difference above 448e-4.
    x = _spread(40, 512, seed=1)
    x = x[x.float().unflatten(-1, (-1, 32)).abs().amax(-1).amin(-1) > 448e-4]
    assert len(x) > 10
    theirs = interleave_pages(quantize_k_cache_v41(x[None]), len(x), 512, 16).view(len(x), -1)
    assert_same_bits(oracle._mxfp8_record(oracle._mxfp8(x.double())), theirs, "oracle")
    assert_same_bits(_stored(ops.store_window, x, cache_layout.window_bytes(512)), theirs, "store_window")


def test_compressed_record(ops: Ops) -> None:
    from sglang.test.kernels.deepseek_v4 import dsv41_kv_quant_reference as reference

    x = _spread(40, 512, seed=2)
    theirs = reference.interleave_pages(reference.quantize_k_cache_v41_fp4(x[None]), 40, 256, 32).view(40, -1)
    for label, ours in (
        ("oracle", oracle._fp4_record(oracle._fp4(x.double()))),
        ("store_compressed", _stored(ops.store_compressed, x, cache_layout.compressed_bytes(512))),
    ):
        assert_same_bits(ours[:, 256:], theirs[:, 256:], f"{label}: scales")
        # SGLang divides by the scale; the release multiplies by its reciprocal, rounded, and so decides some ties
        # the other way. Everything else must be the same code.
        scale = ours[:, 256:].contiguous().view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)
        twice = (x.double() / scale).abs() * 4
        tie = torch.isin(twice, torch.tensor([1.0, 3, 5, 7, 10, 14, 20], dtype=torch.float64))
        codes = [
            torch.stack([part[:, :256] & 15, part[:, :256] >> 4], -1).flatten(1).int()
            for part in (ours, theirs)
        ]
        differ = codes[0] != codes[1]
        assert not (differ & ~tie).any(), label
        assert (codes[0] - codes[1]).abs().max() <= 1, label
        assert differ.sum() < tie.sum(), label


def test_index_record(ops: Ops) -> None:
    from sglang.kernels.ops.quantization.fp4_fake_quant import fake_quant_fp4

    x = _spread(40, 128, seed=3)
    want = fake_quant_fp4(x).double()
    assert_same_bits(oracle._value(oracle._mxfp4(x.double())) + 0.0, want + 0.0, "oracle")
    records = _stored(ops.store_index_key, x, cache_layout.index_key_bytes(128))
    assert_same_bits(records, oracle._mxfp4_record(oracle._mxfp4(x.double())), "store_index_key")


def test_compressed_values() -> None:
    from sglang.kernels.ops.quantization.fp4_fake_quant import fake_quant_compressed_kv

    x = _spread(40, 512, seed=4)
    got, want = oracle._value(oracle._fp4(x.double())), fake_quant_compressed_kv(x).double()
    differ = (got != want).double().mean()
    # Ties only, as above: one value in 2**6 or so sits on one in bf16, and half of those may go the other way.
    assert differ < 2.0**-6
    step = x.double().unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1) / 3 * 1.07
    assert ((got - want).abs() <= step).all()


# ---- Engram ----


def test_engram_layout() -> None:
    from sglang.srt.layers.engram import EngramLayout, compute_hash_multipliers

    for shape in ("small", "release"):
        config = preset(shape)
        layout = EngramLayout.from_config(SimpleNamespace(**config.to_dict()["text_config"]))
        multipliers = compute_hash_multipliers(
            config.engram_layer_ids, config.engram_max_ngram_size, config.engram_compressed_vocab_size
        )
        for i, (layer, table) in enumerate(engram_tables(config).items()):
            assert oracle.engram_primes(config)[layer].tolist() == [list(row) for row in layout.primes[i]]
            assert [list(row) for row in table.primes] == [list(row) for row in layout.primes[i]]
            assert list(table.multipliers) == multipliers[i].tolist()
            assert table.num_rows == layout.column_bounds(i)[-1]


def test_engram_hash(ops: Ops) -> None:
    from sglang.srt.layers.engram import compute_engram_hash_ids

    config = preset("small")
    layer, ngram = config.engram_layer_ids[0], config.engram_max_ngram_size
    vocab = config.engram_compressed_vocab_size
    token_map = torch.arange(1024) % vocab
    pad = int(token_map[config.engram_pad_token_id])
    multipliers = oracle.engram_multipliers(layer, ngram, vocab)
    primes = oracle.engram_primes(config)[layer]
    offsets = primes.flatten().cumsum(0) - primes.flatten()
    tokens = torch.randint(0, 1024, (61,), generator=torch.Generator().manual_seed(5))
    image = torch.zeros(61, dtype=torch.bool)
    image[[0, 7, 8, 30]] = True
    back = torch.arange(61)[:, None] - torch.arange(ngram)
    context = tokens[back.clamp(min=0)]
    blocked = ((back < 0) | image[back.clamp(min=0)]).int().cummax(-1).values.bool()
    theirs = compute_engram_hash_ids(
        context, blocked, pad, token_map, multipliers[None], primes[None], offsets[None]
    )[:, 0]
    ours = oracle.engram_rows(torch.where(image, -1, token_map[tokens]), pad, multipliers, primes)
    assert_same_bits(ours[~image], theirs[~image], "oracle")
    got = ops.engram_hash(
        token_map[context].masked_fill(blocked, pad), multipliers, primes, offsets.view_as(primes)
    )
    assert_same_bits(got, theirs, "engram_hash")


def test_engram_gate(ops: Ops) -> None:
    from sglang.srt.layers.engram import engram_gate

    n, s, hidden = 37, 4, 96
    streams = _normal(n, s, hidden, seed=6, scale=3).bfloat16()
    projected = _normal(n, s + 1, hidden, seed=7).bfloat16()
    q_weight, k_weight = (1 + _normal(s, hidden, seed=seed, scale=0.2).bfloat16() for seed in (8, 9))
    ids = torch.arange(n).remainder(5)
    theirs = engram_gate(streams, projected.flatten(1), q_weight, k_weight, 1e-20, 1e-6, ids, 3)
    got = ops.engram_gate(
        streams, projected[:, :-1], projected[:, -1], q_weight.float() * k_weight.float(), 1e-20, ids == 3
    )
    assert_same_bits(got[ids == 3], streams[ids == 3], "images stay")
    # One rounding to bf16 on both sides. The gate has at most 96 + 30 float32 steps, and a slope of one quarter
    # times 1 / (2 * sqrt(1e-6)) at its steepest.
    gate = 126 * ULP * 0.25 / (2 * 1e-3)
    torch.testing.assert_close(got, theirs, rtol=STEP, atol=gate * float(projected[:, -1].abs().max()))
    assert (got != theirs).double().mean() < 0.01


# ---- Hyper-connections ----


def test_hyper_connections(ops: Ops) -> None:
    from sglang.kernels.ops.layernorm.mhc import _mhc_post_torch, _mhc_pre_torch
    from sglang.test.kernels.mhc import hc_split_sinkhorn_torch

    n, s, hidden, eps = 29, 4, 96, 1e-6
    streams = _normal(n, s, hidden, seed=10).bfloat16()
    fn = _normal(s * (2 + s), s * hidden, seed=11) / (s * hidden) ** 0.5
    base, scale = _normal(s * (2 + s), seed=12), _normal(3, seed=13)
    pre, post, comb = ops.hc_mix(streams, fn, base, scale, 1e-20, eps, 20)
    their_post, their_comb, entered = _mhc_pre_torch(streams, fn, scale, base, 1e-20, eps, eps, 2.0, 20)
    # A float32 dot product of 384 terms near 384**-0.5: at most 384 steps; the rest adds a few.
    torch.testing.assert_close(post, their_post[..., 0], rtol=0, atol=800 * ULP)
    torch.testing.assert_close(comb, their_comb, rtol=0, atol=400 * ULP)
    torch.testing.assert_close(ops.hc_collapse(streams, pre), entered, rtol=STEP, atol=2000 * ULP)
    # Their other reference begins behind the dot product, so float32 has only some sixty steps left to differ in.
    flat = streams.double().flatten(1)
    z = (flat @ fn.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)).float()
    their_pre, their_post, their_comb = hc_split_sinkhorn_torch(z[None], scale, base)
    torch.testing.assert_close(pre, their_pre[0], rtol=0, atol=8 * ULP)
    torch.testing.assert_close(post, their_post[0], rtol=0, atol=16 * ULP)
    torch.testing.assert_close(comb, their_comb[0], rtol=0, atol=64 * ULP)
    logits = z[:, 2 * s :].double() * scale[2].double() + base[2 * s :].double()
    mixed = oracle.sinkhorn(logits.unflatten(-1, (s, s)), 20, eps)
    torch.testing.assert_close(comb.double(), mixed, rtol=0, atol=ULP)
    x = _normal(n, hidden, seed=14).bfloat16()
    theirs = _mhc_post_torch(x, streams, post[..., None], comb)
    torch.testing.assert_close(ops.hc_merge(x, streams, post, comb), theirs, rtol=STEP, atol=32 * ULP)


# ---- Routing ----


def test_routing(ops: Ops) -> None:
    from sglang.srt.layers.moe.topk import fused_topk_torch_native

    logits, bias = _normal(41, 17, seed=15, scale=4), _normal(17, seed=16)
    weights, ids = fused_topk_torch_native(logits, logits, 3, True, bias, "sqrtsoftplus")
    theirs = torch.zeros(41, 17, dtype=torch.float64).scatter(1, ids.long(), weights.double() * 1.5)
    for label, (got_ids, got_weights) in (
        ("route", ops.route(logits, bias, 3, 1.5)),
        ("oracle", oracle.gate(logits.double(), bias.double(), 3, 1.5)),
    ):
        ours = torch.zeros(41, 17, dtype=torch.float64).scatter(1, got_ids, got_weights.double())
        assert_same_bits(ours != 0, theirs != 0, f"{label}: chosen experts")
        torch.testing.assert_close(ours, theirs, rtol=16 * ULP, atol=0)


# ---- Selection ----


def _as_sets(ids: torch.Tensor) -> list[set[int]]:
    return [set(row) - {-1} for row in ids.tolist()]


@pytest.mark.parametrize("width", [1, 8, 61, 200])
def test_candidate_blocks_and_the_choice_among_them(width: int) -> None:
    from sglang.kernels.ops.attention.dsv4.candidate_blocks import (
        select_candidate_block_ids,
        topk_among_blocks,
    )

    config = SimpleNamespace(candidate_block_size=8, candidate_topk_blocks=6)
    # Every score of a row is distinct: SGLang leaves ties to torch.topk.
    order = torch.stack(
        [torch.randperm(width, generator=torch.Generator().manual_seed(i)) for i in range(width + 1)]
    )
    lengths = torch.arange(width + 1)
    valid = torch.arange(width) < lengths[:, None]
    score = order.double()
    theirs = select_candidate_block_ids(
        score.masked_fill(~valid, -torch.inf)[1:], lengths[1:, None], config.candidate_topk_blocks, 8
    )
    ours = oracle.Oracle._candidates(SimpleNamespace(config=config), score, valid, lengths)  # type: ignore[arg-type]
    assert _as_sets(ours[1:]) == _as_sets(theirs)
    assert (ours[0] == -1).all()
    among = torch.zeros(width + 1, width + 8, dtype=torch.bool)
    for row, blocks in enumerate(_as_sets(ours)):
        for block in blocks:
            among[row, block * 8 : block * 8 + 8] = True
    chosen = oracle._largest(score, valid & among[:, :width], 20)
    theirs = topk_among_blocks(score[1:], lengths[1:], ours[1:].int(), 20, 8)
    assert _as_sets(chosen[1:]) == _as_sets(theirs)
    assert width < 200 or (among[:, :width] & valid).sum() < valid.sum(), "no block was left out"


def test_pooling_of_pairs(ops: Ops) -> None:
    from sglang.srt.layers.attention.dsv4.dsv41_sparse import DeepseekV41Compressor

    gates, latents = _normal(23, 2, 64, seed=17, scale=2), _normal(23, 2, 64, seed=18)
    theirs = DeepseekV41Compressor.pool_pairs(latents, gates).bfloat16()
    got = ops.pool_pairs(gates, latents)
    torch.testing.assert_close(got, theirs, rtol=STEP, atol=16 * ULP)
    assert (got != theirs).double().mean() < 0.01
