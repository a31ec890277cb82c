"""The whole-model reference, held to what can be known of it without another model."""

import dataclasses
import math

import pytest
import torch

from deepinfer_plugins.model.config import ModelConfig, RopeScaling
from deepinfer_plugins.model.oracle import (
    Oracle,
    _e2m1,
    _fp4,
    _mxfp4,
    _mxfp8,
    _round,
    engram_multipliers,
    engram_primes,
    engram_rows,
    gate,
    replay_start,
    rotary_frequencies,
    sinkhorn,
)

LAYERS = 12
CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    head_dim=64,
    qk_rope_head_dim=32,
    q_lora_rank=64,
    o_lora_rank=32,
    o_groups=2,
    swiglu_limit=10.0,
    rms_norm_eps=1e-20,
    max_position_embeddings=4096,
    rope_theta=10000.0,
    rope_scaling=RopeScaling(
        factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=256
    ),
    compress_rope_theta=160000.0,
    sliding_window=16,
    compress_ratios=(0, 0, *[2] * 6, *[1] * 4, 0, 0, 0),
    kv_source_layer_ids=(2, 4, 6, 8),
    index_source_layer_ids=(2, 4, 6, 8, 10),
    index_k_source_layer_ids=(2, 4, 6, 8),
    index_n_heads=4,
    index_head_dim=64,
    index_topk=8,
    candidate_source_layer_id=8,
    candidate_topk_blocks=4,
    candidate_block_size=8,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    routed_scaling_factor=1.5,
    engram_layer_ids=(1, 4),
    engram_max_ngram_size=4,
    engram_vocab_size=100,
    engram_n_heads=4,
    engram_head_dim=32,
    engram_pad_token_id=2,
    engram_compressed_vocab_size=200,
    num_nextn_predict_layers=3,
    dspark_block_size=5,
    dspark_noise_token_id=319,
    dspark_target_layer_ids=(9, 10, 11),
    dspark_markov_rank=32,
    dspark_n_routed_experts=4,
    dspark_num_experts_per_tok=2,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    image_token_id=318,
    vision=None,
)
VOCABULARY = torch.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size


class _Tensors:
    """Random tensors under the release's names, of a size that keeps every activation near one."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def scales(self, rows: int, columns: int, inputs: int, unit: float) -> torch.Tensor:
        middle = 127 - round(math.log2(unit * math.sqrt(inputs)))
        return (middle + torch.randint(-1, 2, (rows, columns), generator=self.generator)).to(torch.uint8)

    def fp8(self, name: str, rows: int, inputs: int) -> None:
        self.tensors[f"{name}.weight"] = (self.normal(rows, inputs) * 32).to(torch.float8_e4m3fn)
        self.tensors[f"{name}.scale"] = self.scales(-(-rows // 32), -(-inputs // 32), inputs, 32)

    def fp4(self, name: str, rows: int, inputs: int) -> None:
        packed = torch.randint(-128, 128, (rows, inputs // 2), generator=self.generator)
        self.tensors[f"{name}.weight"] = packed.to(torch.int8)
        self.tensors[f"{name}.scale"] = self.scales(rows, inputs // 32, inputs, 3)

    def bf16(self, name: str, rows: int, inputs: int, gain: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = (self.normal(rows, inputs) * gain / math.sqrt(inputs)).bfloat16()

    def norm(self, name: str, width: int) -> None:
        self.tensors[f"{name}.weight"] = (1 + 0.1 * self.normal(width)).bfloat16()


def _layer(t: _Tensors, config: ModelConfig, name: str, experts: int) -> None:
    hidden, width = config.hidden_size, config.head_dim
    for part in ("attn", "ffn"):
        mixes = config.hc_mult * (2 + config.hc_mult)
        t.tensors[f"{name}.hc_{part}_fn"] = t.normal(mixes, config.hc_mult * hidden) / math.sqrt(
            config.hc_mult * hidden
        )
        t.tensors[f"{name}.hc_{part}_base"] = t.normal(mixes)
        t.tensors[f"{name}.hc_{part}_scale"] = 1 + 0.1 * t.normal(3)
        t.norm(f"{name}.{part}_norm", hidden)
    t.tensors[f"{name}.attn.attn_sink"] = t.normal(config.num_attention_heads)
    t.fp8(f"{name}.attn.wq_a", config.q_lora_rank, hidden)
    t.norm(f"{name}.attn.q_norm", config.q_lora_rank)
    t.fp8(f"{name}.attn.wq_b", config.num_attention_heads * width, config.q_lora_rank)
    t.fp8(f"{name}.attn.wkv", width, hidden)
    t.norm(f"{name}.attn.kv_norm", width)
    low = config.o_groups * config.o_lora_rank
    t.fp8(f"{name}.attn.wo_a", low, config.num_attention_heads * width // config.o_groups)
    t.fp8(f"{name}.attn.wo_b", hidden, low)
    t.bf16(f"{name}.ffn.gate", experts, hidden)
    t.tensors[f"{name}.ffn.gate.bias"] = 0.2 * t.normal(experts)
    t.tensors[f"{name}.ffn.gate.bias_vl"] = 0.2 * t.normal(experts)
    for expert in range(experts):
        for matrix, rows, inputs in (
            ("w1", config.moe_intermediate_size, hidden),
            ("w3", config.moe_intermediate_size, hidden),
            ("w2", hidden, config.moe_intermediate_size),
        ):
            t.fp4(f"{name}.ffn.experts.{expert}.{matrix}", rows, inputs)
            if expert == 0:
                t.fp8(f"{name}.ffn.shared_experts.{matrix}", rows, inputs)


def random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    t = _Tensors(seed)
    hidden = config.hidden_size
    t.bf16("embed", config.vocab_size, hidden, gain=math.sqrt(hidden))
    t.bf16("head", config.vocab_size, hidden)
    t.norm("norm", hidden)
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}"
        _layer(t, config, name, config.n_routed_experts)
        if layer in config.kv_source_layer_ids:
            t.bf16(f"{name}.attn.compressor.wkv", config.head_dim, hidden)
            if config.compress_ratios[layer] == 2:
                t.bf16(f"{name}.attn.compressor.wgate", config.head_dim, hidden)
            t.norm(f"{name}.attn.compressor.norm", config.head_dim)
            t.bf16(f"{name}.attn.indexer.wk", config.index_head_dim, config.head_dim)
            t.norm(f"{name}.attn.indexer.k_norm", config.index_head_dim)
        if layer in config.index_source_layer_ids:
            t.fp8(
                f"{name}.attn.indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank
            )
            t.bf16(f"{name}.attn.indexer.weights_proj", config.index_n_heads, hidden)
    for layer, primes in engram_primes(config).items():
        name = f"layers.{layer}.engram"
        width = config.engram_head_dim
        t.fp8(f"{name}.embed", int(primes.sum()), width)
        t.tensors[f"{name}.embed.scale"] = t.scales(int(primes.sum()), width // 32, 1, 32)
        t.fp8(f"{name}.wkv", (config.hc_mult + 1) * hidden, primes.numel() * width)
        for side in ("q_weight", "k_weight"):
            t.tensors[f"{name}.{side}"] = (1 + 0.1 * t.normal(config.hc_mult, hidden)).bfloat16()
    for layer in range(config.num_nextn_predict_layers):
        _layer(t, config, f"mtp.{layer}", config.dspark_n_routed_experts)
    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    t.fp8("mtp.0.main_proj", hidden, hidden * len(config.dspark_target_layer_ids))
    t.norm("mtp.0.main_norm", hidden)
    t.norm(f"{last}.norm", hidden)
    t.bf16(f"{last}.markov_head.embed", config.vocab_size, config.dspark_markov_rank)
    t.bf16(f"{last}.markov_head.head", config.vocab_size, config.dspark_markov_rank)
    t.bf16(f"{last}.confidence_head.proj", 1, hidden + config.dspark_markov_rank)
    return t.tensors


def _tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (count,), generator=generator).tolist()


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(CONFIG, random_tensors(CONFIG, seed=1), VOCABULARY)


@pytest.fixture(scope="module")
def long(oracle: Oracle) -> tuple[list[int], torch.Tensor, dict[str, torch.Tensor]]:
    """A prompt long enough for every selection to leave something out, its logits and its trace."""
    trace: dict[str, torch.Tensor] = {}
    tokens = _tokens(151, seed=2)
    return tokens, oracle.logits(tokens, trace=trace), trace


# ---- What must follow from causality ----


@pytest.mark.parametrize("changed", [150, 101, 64, 1])
def test_no_row_depends_on_a_later_token(oracle: Oracle, long, changed: int) -> None:
    tokens, logits, _ = long
    other = list(tokens)
    other[changed] = 3 + (other[changed] - 2) % 297
    got = oracle.logits(other)
    assert torch.equal(got[:changed], logits[:changed])
    assert not torch.equal(got[changed], logits[changed])


@pytest.mark.parametrize("length", [1, 2, 17, 63])
def test_a_prefix_alone_has_the_bits_it_has_in_the_whole(oracle: Oracle, long, length: int) -> None:
    tokens, logits, _ = long
    assert torch.equal(oracle.logits(tokens[:length]), logits[:length])


def test_verify_accepts_what_generate_made_and_nothing_else(oracle: Oracle) -> None:
    prompt = _tokens(21, seed=3)
    generated = oracle.generate(prompt, 5)
    assert oracle.verify(prompt, generated) is None
    for place in range(5):
        wrong = list(generated)
        wrong[place] = (wrong[place] + 1) % CONFIG.vocab_size
        assert oracle.verify(prompt, wrong) == place


def test_replay_of_every_row_is_no_replay(oracle: Oracle, long) -> None:
    tokens, logits, _ = long
    prompt, generated = tokens[:40], oracle.generate(tokens[:40], 2)
    assert oracle.verify(prompt, generated, replay_keep=40) is None
    assert torch.equal(oracle.logits(tokens, decoder_from=0), logits)


def test_replay_keeps_at_least_the_last_row_and_at_most_all() -> None:
    assert [replay_start(5, keep) for keep in (None, 0, 1, 4, 5, 6)] == [0, 4, 4, 1, 0, 0]


def test_replay_leaves_the_encoder_side_and_narrows_the_windows_of_the_rest(oracle: Oracle, long) -> None:
    tokens, logits, trace = long
    kept: dict[str, torch.Tensor] = {}
    start = len(tokens) - 20
    got = oracle.logits(tokens, decoder_from=start, trace=kept)
    assert got.shape == (20, CONFIG.vocab_size)
    cut = CONFIG.decoder_start
    for name in (f"layers.{cut - 1}.ffn", f"layers.{cut}.compressed", f"layers.{cut}.index_key"):
        assert torch.equal(kept[name], trace[name]), name
    for name in (f"layers.{cut}.streams", f"layers.{cut}.selected", f"layers.{cut}.window"):
        assert torch.equal(kept[name], trace[name][start:]), name
    # A row with a whole window sees what it saw without replay; one at the edge does not.
    whole = CONFIG.sliding_window - 1
    assert torch.equal(kept[f"layers.{cut}.attn"][whole:], trace[f"layers.{cut}.attn"][start + whole :])
    assert not torch.equal(kept[f"layers.{cut}.attn"][0], trace[f"layers.{cut}.attn"][start])
    assert not torch.equal(got[-1], logits[-1])


# ---- Selections bite ----


def test_selection_leaves_entries_out_and_takes_the_best(long) -> None:
    _, _, trace = long
    for layer in CONFIG.index_source_layer_ids:
        selected = trace[f"layers.{layer}.selected"]
        ratio = CONFIG.compress_ratios[layer]
        for position, row in enumerate(selected.tolist()):
            entries = [entry for entry in row if entry >= 0]
            valid = (position + 1) // ratio
            assert len(entries) == min(valid, CONFIG.index_topk)
            assert entries == sorted(set(entries)) and all(entry < valid for entry in entries)
            assert row[len(entries) :] == [-1] * (CONFIG.index_topk - len(entries))
        assert (len(selected) // ratio) > CONFIG.index_topk


def test_candidates_leave_blocks_out_and_bind_later_layers(oracle: Oracle, long) -> None:
    tokens, _, trace = long
    size = CONFIG.candidate_block_size
    free = dataclasses.replace(CONFIG, candidate_source_layer_id=None)
    unbound: dict[str, torch.Tensor] = {}
    Oracle(free, oracle.tensors, VOCABULARY).logits(tokens, trace=unbound)
    candidates = trace["layers.8.candidates"]
    for position, blocks in enumerate(candidates.tolist()):
        named = [block for block in blocks if block >= 0]
        assert position // size in named, "the newest block always competes"
        assert len(named) == min(position // size + 1, CONFIG.candidate_topk_blocks)
        chosen = {entry // size for entry in trace["layers.10.selected"][position].tolist() if entry >= 0}
        assert chosen <= set(named)
    assert torch.equal(trace["layers.8.selected"], unbound["layers.8.selected"])
    moved = (trace["layers.10.selected"] != unbound["layers.10.selected"]).any(-1)
    assert moved.sum() > 50, "blocks that were left out must have held some of the best entries"


def test_sliding_window_forgets(oracle: Oracle, long) -> None:
    tokens, _, trace = long
    wider: dict[str, torch.Tensor] = {}
    config = dataclasses.replace(CONFIG, sliding_window=CONFIG.sliding_window + 1)
    Oracle(config, oracle.tensors, VOCABULARY).logits(tokens, trace=wider)
    same = (wider["layers.0.attn"] == trace["layers.0.attn"]).all(-1)
    assert same[: CONFIG.sliding_window].all()
    assert not same[CONFIG.sliding_window :].any()


def test_image_rows_route_by_their_own_bias_and_meet_no_ngram(oracle: Oracle, long) -> None:
    tokens, _, text = long
    image = torch.zeros(len(tokens), dtype=torch.bool)
    image[30:40] = True
    trace: dict[str, torch.Tensor] = {}
    oracle.logits(tokens, image, trace=trace)
    same = (trace["layers.0.experts"] == text["layers.0.experts"]).all(-1)
    assert same[~image].all() and not same[image].all()
    before = (trace["layers.1.streams"] == text["layers.1.streams"]).flatten(1).all(-1)
    assert before[:30].all() and not before[30:43].any() and before[60]


# ---- Formulas, another way ----


def test_rounding_is_that_of_the_formats() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5001, generator=generator, dtype=torch.float64) * torch.exp2(
        torch.randint(-30, 12, (5001,), generator=generator).double()
    )
    x = x.float().double()
    assert torch.equal(_round(x, 8, -126), x.bfloat16().double())
    assert torch.equal(_round(x, 4, -6).clamp(-448, 448), x.clamp(-448, 448).to(torch.float8_e4m3fn).double())
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    for low, high, even in zip(grid[:-1], grid[1:], [0, 1, 1, 2, 2, 4, 4]):
        middle = (low + high) / 2
        assert _e2m1(middle) == even and _e2m1(-middle) == -even
        assert _e2m1(middle * (1 - 1e-9)) == low and _e2m1(middle * (1 + 1e-9)) == high


@pytest.mark.parametrize("exponent", [-40, -6, 0, 9])
def test_casts_are_near_and_their_scales_are_the_least_that_hold(exponent: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn(33, 64, generator=generator) * 2.0**exponent).bfloat16().double()
    for cast, group, qmax, floor in ((_mxfp8, 32, 448, 1e-4), (_mxfp4, 32, 6, 6 * 2.0**-126)):
        values, scale = cast(x)
        amax = x.unflatten(-1, (-1, group)).abs().amax(-1, keepdim=True)
        least = amax.float().clamp(min=floor) / qmax
        assert (least <= scale).all() and (scale / 2 < least).all()
        assert (values.abs() <= qmax).all()
    values, scale = _fp4(x)
    error = (values * scale).flatten(-2) - x
    # Half of e2m1's widest step, and the scale's own rounding: one part in 16, or half its least step.
    amax = x.unflatten(-1, (-1, 16)).abs().amax(-1).clamp(min=6 * 2.0**-9)
    assert (
        error.unflatten(-1, (-1, 16)).abs().amax(-1) <= amax / 6 * (1 + 1 / 16) * 1.5 + 2.0**-10 * 6
    ).all()


def test_sinkhorn_ends_doubly_stochastic_and_keeps_cross_ratios() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(7, 4, 4, generator=generator, dtype=torch.float64)
    got = sinkhorn(logits, 400, 0.0)
    for axis in (-1, -2):
        torch.testing.assert_close(got.sum(axis), torch.ones(7, 4, dtype=torch.float64), rtol=0, atol=1e-12)
    # Scaling rows and columns moves no cross-ratio, so the limit is known by them and by its sums.
    log = got.log()
    for a in (log - logits,):
        cross = a - a[:, :1] - a[:, :, :1] + a[:, :1, :1]
        torch.testing.assert_close(cross, torch.zeros_like(cross), rtol=0, atol=1e-10)
    released = sinkhorn(logits, 20, 1e-6)
    torch.testing.assert_close(released.sum(-2), torch.ones(7, 4, dtype=torch.float64), rtol=0, atol=2e-6)
    torch.testing.assert_close(released, got, rtol=0, atol=2e-2)


def test_gate_selects_with_the_bias_and_weighs_without() -> None:
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn(19, 9, generator=generator) * 4).double()
    bias = torch.randn(9, generator=generator).double()
    ids, weights = gate(logits, bias, 3, 1.5)
    for row in range(19):
        score = [math.sqrt(math.log1p(math.exp(x))) for x in logits[row].tolist()]
        key = [a + b for a, b in zip(score, bias.tolist())]
        want = sorted(range(9), key=lambda e: (-key[e], e))[:3]
        assert ids[row].tolist() == want
        total = sum(score[e] for e in want)
        for e, w in zip(want, weights[row].tolist()):
            assert math.isclose(w, 1.5 * score[e] / total, rel_tol=2**-22)
    equal, _ = gate(torch.zeros(1, 9, dtype=torch.float64), torch.zeros(9, dtype=torch.float64), 3, 1.5)
    assert equal.tolist() == [[0, 1, 2]]


def _release_rope() -> ModelConfig:
    return dataclasses.replace(
        CONFIG, qk_rope_head_dim=64, rope_scaling=RopeScaling(16.0, 32.0, 1.0, 65536), rope_theta=10000.0
    )


def test_release_yarn_keeps_the_fast_pairs_and_stretches_the_slow_ones() -> None:
    got = rotary_frequencies(_release_rope(), compressed=True)
    base = torch.tensor([160000.0 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    torch.testing.assert_close(got[:16], base[:16], rtol=1e-15, atol=0)
    torch.testing.assert_close(got[25:], base[25:] / 16, rtol=1e-15, atol=0)
    assert ((got[16:25] < base[16:25]) & (got[16:25] > base[16:25] / 16)).all()


def test_yarn_agrees_with_transformers() -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    for config in (_release_rope(), CONFIG):
        yarn = config.rope_scaling
        assert yarn is not None
        theirs = transformers.LlamaConfig(
            hidden_size=4 * config.qk_rope_head_dim,
            num_attention_heads=4,
            head_dim=config.qk_rope_head_dim,
            max_position_embeddings=int(yarn.original_max_position_embeddings * yarn.factor),
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": config.compress_rope_theta,
                "factor": yarn.factor,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "original_max_position_embeddings": yarn.original_max_position_embeddings,
                "attention_factor": 1.0,
            },
        )
        want, amplitude = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, device="cpu")
        assert amplitude == 1.0
        # Theirs is computed in float32: a power (some 4 ulp) and a few products.
        torch.testing.assert_close(rotary_frequencies(config, True), want.double(), rtol=8 * 2.0**-23, atol=0)


# ---- Engram hashing ----


def test_primes_are_the_next_ones_and_distinct() -> None:
    release = dataclasses.replace(
        CONFIG, engram_vocab_size=16_000_000, engram_n_heads=8, engram_layer_ids=(1, 14), engram_head_dim=256
    )
    primes = engram_primes(release)
    flat = torch.cat([primes[layer].flatten() for layer in (1, 14)])
    assert (flat.diff() > 0).all() and flat[0] > 15_999_999
    # The release's own table sizes.
    assert [int(primes[layer].sum()) for layer in (1, 14)] == [384006168, 384016682]


def test_multipliers_are_odd_and_cannot_overflow() -> None:
    for layer in (1, 14):
        got = engram_multipliers(layer, 4, 99092)
        assert (got % 2 == 1).all() and (got > 0).all()
        assert int(got.max()) * (99092 - 1) < 2**63
    assert not torch.equal(engram_multipliers(1, 4, 99092), engram_multipliers(14, 4, 99092))


def test_rows_of_the_table_by_hand() -> None:
    primes = torch.tensor([[101, 103], [107, 109], [113, 127]])
    multipliers = [3, 5, 7, 11]
    ids = [4, 9, -1, 6, 8, 2, 1]
    pad = 5
    got = engram_rows(torch.tensor(ids), pad, torch.tensor(multipliers), primes)
    for position in range(len(ids)):
        context = [ids[position - back] if position >= back else pad for back in range(4)]
        if -1 in context:
            broken = context.index(-1)
            context[broken:] = [pad] * (4 - broken)
        want, offset = [], 0
        for size in (2, 3, 4):
            mixed = 0
            for token, multiplier in zip(context[:size], multipliers):
                mixed ^= token * multiplier
            for prime in primes[size - 2].tolist():
                want.append(mixed % prime + offset)
                offset += prime
        assert got[position].tolist() == ([-1] * 6 if ids[position] == -1 else want)


# ---- The draft block ----


def test_draft_chain_moves_the_markov_part_only(oracle: Oracle) -> None:
    tokens = _tokens(40, seed=8)
    golden = 7
    free = oracle.draft(tokens, golden, 5)
    chain = [golden, *free.tokens[:-1].tolist()]
    given = oracle.draft(tokens, golden, 5, chain)
    assert torch.equal(given.logits, free.logits) and torch.equal(given.confidence, free.confidence)
    assert torch.equal(free.tokens, free.logits.argmax(-1))
    assert ((free.confidence > 0) & (free.confidence < 1)).all()
    other = list(chain)
    other[2] = (other[2] + 1) % CONFIG.vocab_size
    moved = oracle.draft(tokens, golden, 5, other)
    same = (moved.logits == free.logits).all(-1)
    assert same.tolist() == [True, True, False, True, True]
    assert (moved.confidence == free.confidence).tolist() == [True, True, False, True, True]


def test_draft_block_is_not_causal_and_forgets_what_left_the_window(oracle: Oracle) -> None:
    tokens = _tokens(40, seed=9)
    states, (_, taps) = [], oracle._backbone(tokens, None, 0, None)
    for depth in (1, 2, 5):
        states.append(oracle._draft_states(taps, 7, depth)[0])
    assert not torch.equal(states[0], states[1]) and not torch.equal(states[1], states[2])
    old = taps.clone()
    old[: len(tokens) - CONFIG.sliding_window] = 1.0
    assert torch.equal(oracle._draft_states(old, 7, 5)[0], states[2])
    old[len(tokens) - CONFIG.sliding_window] = 1.0
    assert not torch.equal(oracle._draft_states(old, 7, 5)[0], states[2])


# ---- Bad input ----


def test_refusals_say_what_was_wrong(oracle: Oracle) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        oracle.logits([])
    with pytest.raises(ValueError, match="decoder_from=3 must be one of the rows 0 to 2"):
        oracle.logits([5, 6, 7], decoder_from=3)
