"""Our model's pieces against vLLM's own V4.1 code, where that runs without compiled operators."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="these tests run in vLLM's environment")

import torch  # noqa: E402

from deepinfer_plugins.core.target import Arch, Want  # noqa: E402
from deepinfer_plugins.kernels.catalogue import Ops, load_ops  # noqa: E402
from deepinfer_plugins.model import oracle  # noqa: E402
from deepinfer_plugins.model.config import ModelConfig  # noqa: E402
from deepinfer_plugins.model.engram import CompressedVocabulary, engram_tables  # noqa: E402
from deepinfer_plugins.model.make_checkpoint import make_checkpoint  # noqa: E402
from deepinfer_plugins.model.presets import preset  # noqa: E402
from deepinfer_plugins.vllm_ext.v0_33 import interpreter  # noqa: E402

# One step of float32, relative.
ULP = 2.0**-23

# vLLM's Triton kernels are decorated when their modules are imported, which only the tests below do.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    interpreter.install()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "small"
    make_checkpoint(folder, "small", seed=0)
    return folder


@pytest.fixture(scope="module")
def ops() -> Ops:
    return load_ops(Want(Arch.CPU, batch_invariant=True))


def _vllm_config(folder: Path):
    from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

    return DeepseekV41Config(**json.loads((folder / "config.json").read_text()))


class _Tokenizer:
    """As much of a tokenizer as vLLM asks for."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_file(str(path))

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)


# ---- Configuration ----


@pytest.mark.parametrize("shape", ["small", "release"])
def test_config_reads_alike(tmp_path: Path, shape: str) -> None:
    folder = tmp_path / shape
    folder.mkdir()
    ours = preset(shape)
    (folder / "config.json").write_text(json.dumps(ours.to_dict()))
    theirs = _vllm_config(folder)
    ours = ModelConfig.from_folder(folder)
    for name in (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank "
        "o_lora_rank o_groups swiglu_limit rms_norm_eps max_position_embeddings rope_theta compress_rope_theta "
        "sliding_window index_n_heads index_head_dim index_topk candidate_source_layer_id candidate_topk_blocks "
        "candidate_block_size "
        "hc_mult hc_sinkhorn_iters hc_eps n_routed_experts num_experts_per_tok moe_intermediate_size "
        "routed_scaling_factor engram_max_ngram_size engram_vocab_size engram_n_heads engram_head_dim "
        "engram_pad_token_id engram_compressed_vocab_size num_nextn_predict_layers dspark_block_size "
        "dspark_noise_token_id dspark_markov_rank dspark_n_routed_experts dspark_num_experts_per_tok "
        "bos_token_id eos_token_id pad_token_id image_token_id"
    ).split():
        assert getattr(theirs, name) == getattr(ours, name), name
    for name in (
        "compress_ratios kv_source_layer_ids index_source_layer_ids engram_layer_ids dspark_target_layer_ids"
    ).split():
        assert tuple(getattr(theirs, name)) == getattr(ours, name), name


# ---- Engram ----


def test_compressed_vocabulary(folder: Path) -> None:
    from vllm.models.deepseek_v41.common.engram import build_compressed_token_map

    theirs, size = build_compressed_token_map(_Tokenizer(folder / "tokenizer.json"))
    assert oracle.compressed_vocab(folder / "tokenizer.json").tolist() == theirs
    ours = CompressedVocabulary.from_folder(folder, len(theirs))
    assert ours.size == size and ours.map.tolist() == theirs


def _hard_words() -> list[str]:
    """Texts on which a reading of the normalisation could go wrong."""
    words = [
        " ",
        "  ",
        "\t",
        "\r\n",
        " a",
        "a ",
        "\u3000a",
        "\x1ca",
        "\x1fa\x1f",
        "a \n b",
        "\u00a0",
        "\ue000",
        " \ue000 ",
        "",
    ]
    words += [
        "ΣΑΣ",
        "ΑΣ",
        "İ",
        "ß",
        "ﬁ",
        "①",
        "é",
        "e\u0301",
        "\u0301",
        "\u0301 ",
        "Å",
        "ǅ",
        "가",
        "がｶﾞ",
        "ﷺ",
        "A\u20dd",
        "ி",
        "कि",
    ]
    # One character in eleven of the plane that nearly all text is in, alone and inside a word.
    for point in range(0x80, 0xFFFE, 11):
        if not 0xD800 <= point < 0xE000 and chr(point) != "\N{REPLACEMENT CHARACTER}":
            words += [chr(point), f"x{chr(point)} "]
    return list(dict.fromkeys(words))


def test_compressed_vocabulary_of_hard_words(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from vllm.models.deepseek_v41.common.engram import build_compressed_token_map

    words = _hard_words()
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(str(path))
    theirs, _ = build_compressed_token_map(_Tokenizer(path))
    for label, ours in (
        ("oracle", oracle.compressed_vocab(path).tolist()),
        ("model", CompressedVocabulary.from_folder(tmp_path, len(words)).map.tolist()),
    ):
        # Ids are numbered by first appearance, so only the first difference means anything.
        different = next((ascii(word) for word, a, b in zip(words, ours, theirs) if a != b), None)
        assert different is None, f"{label}: {different}"


@pytest.mark.parametrize("shape", ["small", "release"])
def test_engram_layout(shape: str) -> None:
    from vllm.models.deepseek_v41.common.engram import EngramLayout, compute_hash_multipliers

    config = preset(shape)
    layout = EngramLayout(SimpleNamespace(**config.to_dict()["text_config"], **{"dummy": None}))
    theirs = compute_hash_multipliers(
        config.engram_layer_ids, config.engram_max_ngram_size, config.engram_compressed_vocab_size
    )
    primes = oracle.engram_primes(config)
    tables = engram_tables(config)
    for i, layer in enumerate(config.engram_layer_ids):
        multipliers = oracle.engram_multipliers(
            layer, config.engram_max_ngram_size, config.engram_compressed_vocab_size
        )
        assert torch.equal(multipliers, theirs[i])
        assert list(tables[layer].multipliers) == theirs[i].tolist()
        assert primes[layer].tolist() == [list(row) for row in layout.primes[i]]
        assert [list(row) for row in tables[layer].primes] == primes[layer].tolist()
        assert [offset for row in tables[layer].offsets for offset in row] == layout.offsets[i].tolist()
        assert tables[layer].num_rows == layout.num_embeddings[i] == int(primes[layer].sum())


def test_engram_hash(ops: Ops) -> None:
    from vllm.models.deepseek_v41.common.engram import DEAD_ID, _hash_ids_kernel

    config = preset("small")
    layer, ngram = config.engram_layer_ids[1], config.engram_max_ngram_size
    vocab = config.engram_compressed_vocab_size
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, 1000, (67,), generator=generator)
    image = torch.zeros(67, dtype=torch.bool)
    image[[9, 10, 30, 66]] = True
    token_map = torch.arange(1024) % vocab
    pad = int(token_map[config.engram_pad_token_id])
    multipliers = oracle.engram_multipliers(layer, ngram, vocab)
    primes = oracle.engram_primes(config)[layer]
    offsets = primes.flatten().cumsum(0) - primes.flatten()
    lookback = torch.zeros(1, ngram - 1, dtype=torch.int64, device=DEVICE)
    output = torch.empty(67, 1, primes.numel(), dtype=torch.int32, device=DEVICE)

    def on_device(x: torch.Tensor) -> torch.Tensor:
        return x.to(DEVICE)

    _hash_ids_kernel[(3, 1)](
        on_device(tokens),
        on_device(token_map.int()),
        on_device(image),
        on_device(torch.arange(67)),
        None,
        on_device(torch.tensor([0, 67], dtype=torch.int32)),
        on_device(multipliers[None]),
        on_device(primes[None]),
        on_device(offsets[None]),
        None,
        lookback,
        lookback.bool(),
        output,
        67,
        0,
        pad,
        input_stride=1,
        mask_stride=1,
        position_stride=1,
        table_stride=0,
        table_col_stride=0,
        query_stride=1,
        num_query_rows=1,
        num_table_rows=0,
        max_blocks=0,
        cache_block_size=64,
        MAX_NGRAM=ngram,
        num_heads=primes.shape[1],
        BLOCK_T=32,
        BLOCK_H=4,
        dead_id=DEAD_ID,
        lookback_depth=ngram - 1,
        lookback_row_stride=ngram - 1,
        lookback_col_stride=1,
        lookback_mask_row_stride=ngram - 1,
        lookback_mask_col_stride=1,
    )
    theirs = output[:, 0].long().cpu()
    ours = oracle.engram_rows(torch.where(image, -1, token_map[tokens]), pad, multipliers, primes)
    assert torch.equal(ours[~image], theirs[~image])
    # The operator is given the context made up: pads before the start and from the first image on.
    context = torch.full((67, ngram), pad)
    for back in range(ngram):
        context[back:, back] = torch.where(image, -1, token_map[tokens])[: 67 - back]
    broken = (context == -1).long().cummax(1).values.bool()
    got = ops.engram_hash(context.masked_fill(broken, pad), multipliers, primes, offsets.view_as(primes))
    assert torch.equal(got[~image], theirs[~image])


# ---- Rotary positions ----


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("shape", ["small", "release"])
def test_rotary_frequencies(tmp_path: Path, shape: str, ratio: int) -> None:
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.models.deepseek_v41.common.rope import build_deepseek_v4_rope

    config = preset(shape)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        rope = build_deepseek_v4_rope(
            _vllm_config(tmp_path),
            head_dim=config.head_dim,
            rope_head_dim=config.qk_rope_head_dim,
            max_position_embeddings=4096,
            compress_ratio=ratio,
        )
    table = rope.cos_sin_cache[:4096].double()
    frequencies = oracle.rotary_frequencies(config, compressed=ratio > 0)
    angle = torch.arange(4096, dtype=torch.float64)[:, None] * frequencies
    want = torch.cat([angle.cos(), angle.sin()], -1)
    # Theirs is float32 throughout: a power and some products (8 steps of the frequency), the product with the
    # position and the function itself (2 more).
    bound = (angle * 10 * ULP + 2 * ULP).repeat(1, 2)
    assert ((table - want).abs() <= bound).all()


# ---- Hyper-connections ----


def test_hyper_connections(ops: Ops) -> None:
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_delayed_torch

    generator = torch.Generator().manual_seed(12)
    n, s, hidden, eps = 33, 4, 96, 1e-6
    streams = torch.randn(n, s, hidden, generator=generator).bfloat16()
    fn = torch.randn(s * (2 + s), s * hidden, generator=generator) / (s * hidden) ** 0.5
    base, scale = torch.randn(s * (2 + s), generator=generator), torch.randn(3, generator=generator)
    before = torch.rand(n, s, generator=generator)
    post, comb, entered, pre = mhc_pre_delayed_torch(
        streams, fn, scale, base, 1e-20, eps, eps, 2.0, 20, before
    )
    got_pre, got_post, got_comb = ops.hc_mix(streams, fn, base, scale, 1e-20, eps, 20)
    # A float32 dot product of 384 terms near 384**-0.5: at most 384 steps; the rest adds a few.
    bound = {"rtol": 0, "atol": 400 * ULP}
    torch.testing.assert_close(got_pre, pre, **bound)
    torch.testing.assert_close(got_post, post[..., 0], rtol=0, atol=800 * ULP)
    torch.testing.assert_close(got_comb, comb, **bound)
    # Sums of four in float32 may fall on the other side of a tie: one step of bf16.
    step = 2.0**-7
    torch.testing.assert_close(ops.hc_collapse(streams, before), entered, rtol=step, atol=4 * ULP)
    x = torch.randn(n, hidden, generator=generator).bfloat16()
    theirs = mhc_post_torch(x, streams, post, comb)
    torch.testing.assert_close(ops.hc_merge(x, streams, post[..., 0], comb), theirs, rtol=step, atol=16 * ULP)
    want = oracle._merge(x.double(), streams.double(), post[..., 0].double(), comb.double())
    torch.testing.assert_close(theirs.double(), want, rtol=step, atol=16 * ULP)


# ---- Which rows the decoder side keeps ----


def test_replay_rows() -> None:
    from vllm.models.deepseek_v41.nvidia.model_state import _gather_replay_batch_kernel

    window, lengths = 16, torch.tensor([5, 40, 1, 16, 23], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    starts = torch.cat([zero, lengths.cumsum(0, dtype=torch.int32)])
    kept = lengths.clamp(max=window)
    dropped = torch.cat([zero, (lengths - kept).cumsum(0, dtype=torch.int32)])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    total, total_kept = len(positions), int(kept.sum())
    rows = torch.full((total_kept,), -7, device=DEVICE)
    kept_positions, kept_slots = rows.clone(), rows[None].clone()
    kept_starts, floor = torch.zeros(6, dtype=torch.int32, device=DEVICE), zero.repeat(5).to(DEVICE)
    slots = 1000 + torch.arange(total)
    _gather_replay_batch_kernel[(5,)](
        starts.to(DEVICE),
        dropped.to(DEVICE),
        lengths.to(DEVICE),
        torch.zeros_like(lengths).to(DEVICE),
        positions.to(DEVICE),
        slots[None].to(DEVICE),
        total,
        rows,
        kept_starts,
        kept_positions,
        kept_slots,
        total_kept,
        floor,
        window,
        NUM_GROUPS=1,
        BLOCK=8,
    )
    first = [oracle.replay_start(length, window) for length in lengths.tolist()]
    want = [
        start + position
        for start, begin, length in zip(starts.tolist(), first, lengths.tolist())
        for position in range(begin, length)
    ]
    assert rows.tolist() == want
    assert kept_positions.tolist() == positions[want].tolist()
    assert kept_slots[0].tolist() == slots[want].tolist()
    assert floor.tolist() == first
