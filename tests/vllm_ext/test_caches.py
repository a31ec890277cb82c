"""How the model's caches share vLLM's blocks, and what the adapter makes of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="these tests run in vLLM's environment")

import torch  # noqa: E402

from deepinfer_plugins.model.caches import cache_specs  # noqa: E402
from deepinfer_plugins.model.config import ModelConfig  # noqa: E402
from deepinfer_plugins.model.presets import preset  # noqa: E402
from deepinfer_plugins.model.step import NO_TOKEN  # noqa: E402
from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41 import caches  # noqa: E402
from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41.state import tokens_before  # noqa: E402


def configuration(block: int | None = None) -> Any:
    """As much of vLLM's configuration as the grouping reads."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block or 16, user_specified_block_size=block is not None),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def groups(
    config: ModelConfig, block: int | None = None, draft: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    vllm_config = configuration(block)
    layers = caches.register(cache_specs(config, draft), vllm_config)
    specs = {layer.name: layer.get_kv_cache_spec(vllm_config) for layer in layers}
    return caches.group(vllm_config, specs), specs


@pytest.mark.parametrize("shape", ["tiny", "small", "wide", "release"])
@pytest.mark.parametrize("block", [None, 2, 48, 256])
@pytest.mark.parametrize("draft", [False, True])
def test_every_cache_is_in_one_group_and_pages_divide_the_block(
    shape: str, block: int | None, draft: bool
) -> None:
    made, specs = groups(preset(shape), block, draft)
    assert sorted(name for group in made for name in group.layer_names) == sorted(specs)
    tokens = block or caches.DEFAULT_BLOCK
    assert {tokens % group.kv_cache_spec.block_size for group in made} == {0}
    for group in made:
        assert len({name.rpartition(".")[2] == "draft" for name in group.layer_names}) == 1


def test_little_of_a_block_is_wasted_at_release_shape() -> None:
    """A decoding request's blocks hold at most twice the bytes that its entries have."""
    config = preset("release")
    made, _ = groups(config)
    block = max(group.kv_cache_spec.page_size_bytes for group in made)
    held = used = 0
    for group in made:
        spec = group.kv_cache_spec
        window = getattr(spec, "sliding_window", None)
        if window is not None:
            held += (-(-window // spec.block_size) + 1) * block
            used += len(group.layer_names) * window * spec.state_content_size_bytes
        else:
            held += block * 64
            used += spec.page_size_bytes * 64
    assert held <= 2 * used, (held, used)
    assert block == pytest.approx(128 * 2.5 * (288 + 68), rel=0.2)


def test_a_block_must_hold_whole_entries() -> None:
    with pytest.raises(ValueError, match="--block-size 3.*multiple of 2"):
        groups(preset("small"), 3)


def test_a_cache_can_not_be_registered_twice() -> None:
    vllm_config = configuration()
    caches.register(cache_specs(preset("tiny")), vllm_config)
    with pytest.raises(ValueError, match="built twice"):
        caches.register(cache_specs(preset("tiny")), vllm_config)


def test_layers_of_a_group_share_one_table() -> None:
    """By identity: that is how the model computes their slots once."""
    vllm_config = configuration()
    layers = caches.register(cache_specs(preset("tiny")), vllm_config)
    table = torch.zeros(2, 4, dtype=torch.int32)
    for layer in layers:
        layer.bind_kv_cache(torch.zeros(8, 1, 16, layer.cache.record_bytes, dtype=torch.uint8))
    made = caches.caches(layers, {layer.name: SimpleNamespace(block_table_tensor=table) for layer in layers})
    kinds = made.window, made.compressed, made.index_key, made.compressor
    paged = [cache for kind in kinds for cache in kind.values()]
    assert len(paged) == len(layers) and made.draft == {}
    assert all(cache.table is table and cache.page_size == 16 for cache in paged)


def test_tokens_before_a_step() -> None:
    record = torch.tensor(
        [[11, 12, 13, 14, 15, 0], [21, 22, 23, 0, 0, 0], [31, 0, 0, 0, 0, 0]], dtype=torch.int32
    )
    got = tokens_before(record, torch.tensor([1, 0, 2]), torch.tensor([2, 5, 0]), 3)
    assert got.tolist() == [[22, 21, NO_TOKEN], [15, 14, 13], [NO_TOKEN] * 3]
    assert got.dtype == torch.int64
