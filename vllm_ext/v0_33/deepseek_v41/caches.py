"""The model's caches as vLLM sees them: one layer object per cache, and how they share blocks.

vLLM allocates one pool. A block of it has one size in bytes and belongs to one *group* of layers at a
time; within a block the pages of the group's layers lie side by side. So a group wastes what its pages
leave over of a block, and :func:`group` picks the tokens per page that leave little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from deepinfer_plugins.model.caches import CacheSpec
from deepinfer_plugins.model.step import Caches, Paged
from deepinfer_plugins.vllm_ext.v0_33 import api
from deepinfer_plugins.vllm_ext.v0_33.draft_cache import DraftWindowSpec

# Tokens per block of the caches that keep the whole context, unless --block-size says otherwise.
DEFAULT_BLOCK = 128
# No window page is smaller, where --block-size allows: attention kernels load whole runs of entries.
_LEAST_WINDOW = 16
# Every page starts at a multiple of this many bytes where page sizes allow it (16-byte loads need 16).
_ALIGNMENT = 128


class PassThroughBuilder(api.AttentionMetadataBuilder):
    """Hands vLLM's own metadata on: the model builds its step from it."""

    # What the model reads of it lies in the runner's buffers, and no batch is special to it.
    _cudagraph_support = api.AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: api.KVCacheSpec,
        layer_names: list[str],
        vllm_config: api.VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: api.CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> api.CommonAttentionMetadata:
        return common_attn_metadata


class CacheBackend(api.AttentionBackend):
    """Tells vLLM what our caches need. It computes nothing: the model does."""

    @staticmethod
    def get_name() -> str:
        return "DEEPINFER"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        raise NotImplementedError("the model attends by itself; no vLLM attention layer uses this backend")

    @staticmethod
    def get_builder_cls() -> type[PassThroughBuilder]:
        return PassThroughBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: api.KVCacheSpec | None = None) -> list[Any]:
        return [api.MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[api.KVCacheLayout, ...]:
        # Pages of different sizes lie side by side in a block, so blocks are outermost.
        return (api.KVCacheLayout.BLHNC,)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        # In that mode the model takes batch-invariant providers only, or does not start.
        return True


class CacheLayer(torch.nn.Module, api.AttentionLayerBase):
    """One cache of one layer of the model, registered with vLLM under ``name``.

    Args:
        cache: What the model wants.
        name: Under which vLLM knows it; holds one number, by which vLLM sorts.
    """

    def __init__(self, cache: CacheSpec, name: str) -> None:
        super().__init__()
        self.cache = cache
        self.name = name
        # vLLM binds a view ``[blocks, 1, entries, bytes]`` of its pool.
        self.kv_cache = torch.empty(0)

    def get_attn_backend(self) -> type[CacheBackend]:
        return CacheBackend

    def get_kv_cache_spec(self, vllm_config: api.VllmConfig) -> api.KVCacheSpec:
        common = dict(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.cache.record_bytes,
            dtype=torch.uint8,
            block_stride_alignment=_ALIGNMENT,
        )
        if self.cache.window is not None:
            kind = DraftWindowSpec if self.cache.kind == "draft" else api.SlidingWindowMLASpec
            return kind(sliding_window=self.cache.window, **common)
        return api.MLAAttentionSpec(tokens_per_state=self.cache.ratio, **common)

    def paged(self, table: torch.Tensor) -> Paged:
        """This cache as the step sees it, with the block table of its group.

        Layers of one group get the same table object, which is how the model knows that they share slots.
        """
        return Paged(self.kv_cache[:, 0], table)


def register(specs: tuple[CacheSpec, ...], vllm_config: api.VllmConfig) -> list[CacheLayer]:
    """Make a layer per cache and put it where vLLM looks for layers."""
    layers = []
    known = vllm_config.compilation_config.static_forward_context
    for spec in specs:
        owner = "mtp" if spec.kind == "draft" else "model.layers"
        layer = CacheLayer(spec, f"{owner}.{spec.layer}.{spec.kind}")
        if layer.name in known:
            raise ValueError(
                f"vLLM already has a layer {layer.name}: is the model built twice in one engine?"
            )
        known[layer.name] = layer
        layers.append(layer)
    return layers


def caches(layers: list[CacheLayer], metadata: Mapping[str, api.CommonAttentionMetadata]) -> Caches:
    """Every cache as the step sees it, from vLLM's metadata per layer name."""
    kinds: dict[str, dict[int, Paged]] = {field.name: {} for field in dataclasses.fields(Caches)}
    for layer in layers:
        kinds[layer.cache.kind][layer.cache.layer] = layer.paged(metadata[layer.name].block_table_tensor)
    return Caches(**kinds)


def scratch(layers: list[CacheLayer], num_requests: int, length: int, device: torch.device) -> Caches:
    """Caches that belong to no one, for a run that only measures memory: a page per request.

    Layers of one kind share their bytes; each writes before it reads, so shapes and time are as in earnest.
    """
    table = torch.arange(num_requests, device=device)[:, None]
    pages: dict[tuple[str, int], torch.Tensor] = {}
    kinds: dict[str, dict[int, Paged]] = {field.name: {} for field in dataclasses.fields(Caches)}
    for layer in layers:
        spec = layer.cache
        shape = (num_requests, -(-length // spec.ratio), spec.record_bytes)
        if (spec.kind, spec.ratio) not in pages:
            pages[spec.kind, spec.ratio] = torch.zeros(shape, dtype=torch.uint8, device=device)
        kinds[spec.kind][spec.layer] = Paged(pages[spec.kind, spec.ratio], table)
    return Caches(**kinds)


def _halvings(tokens: int) -> Iterator[int]:
    """``tokens`` and its halves down to the last whole one: the sizes that divide it and align hits to it."""
    yield tokens
    while tokens % 2 == 0:
        tokens //= 2
        yield tokens


def _page_bytes(spec: api.KVCacheSpec, tokens: int) -> int:
    return spec.copy_with_new_block_size(tokens).page_size_bytes


def group(vllm_config: api.VllmConfig, specs: dict[str, api.KVCacheSpec]) -> list[api.KVCacheGroupSpec]:
    """Which caches share a block, and how many tokens a page of each holds.

    - All caches of the whole context are one group; its page holds ``--block-size`` tokens and its pages
      together set the size of a block.
    - Windows hold ``2**-k`` of that; ``k`` and the number of groups over which they are dealt are those
      with which a decoding request holds the fewest bytes.
    - Rows of the compressor hold as many tokens as fit a block.
    - Draft layers have groups of their own, so that theirs never veto a prefix hit of the others
      (see :mod:`~deepinfer_plugins.vllm_ext.v0_33.draft_cache`).

    Raises:
        ValueError: If ``--block-size`` does not hold whole entries.
    """
    cache_config = vllm_config.cache_config
    tokens = cache_config.block_size if cache_config.user_specified_block_size else DEFAULT_BLOCK
    whole = {name: spec for name, spec in specs.items() if not isinstance(spec, api.SlidingWindowMLASpec)}
    ratios = {int(spec.tokens_per_state) for spec in whole.values()}
    if odd := [ratio for ratio in sorted(ratios) if tokens % ratio]:
        raise ValueError(
            f"--block-size {tokens}: an entry stands for {odd[0]} tokens; use a multiple of {odd[0]}"
        )
    block = sum(_page_bytes(spec, tokens) for spec in whole.values())
    groups = [_uniform(whole, tokens)]

    kinds: dict[str, list[str]] = {}
    for name in specs:
        if name not in whole:
            kinds.setdefault(name.rpartition(".")[2], []).append(name)
    if windows := kinds.get("window"):
        spec = specs[windows[0]]
        sizes = [size for size in _halvings(tokens) if size >= _LEAST_WINDOW] or [tokens]
        _, window_tokens, num_groups = min(_held(spec, len(windows), size, block) for size in sizes)
        per_group = -(-len(windows) // num_groups)
        block = max(block, per_group * _page_bytes(spec, window_tokens))
        for kind in ("window", "draft"):
            names = kinds.get(kind, [])
            for first in range(0, len(names), per_group):
                chosen = names[first : first + per_group]
                groups.append(_uniform({name: specs[name] for name in chosen}, window_tokens))
    if rows := kinds.get("compressor"):
        sizes = [*_halvings(tokens)]
        fitting = (size for size in sizes if sum(_page_bytes(specs[name], size) for name in rows) <= block)
        groups.append(_uniform({name: specs[name] for name in rows}, next(fitting, sizes[-1])))
    return groups


def _held(spec: Any, num_layers: int, tokens: int, block: int) -> tuple[int, int, int]:
    """Bytes that windows of a decoding request hold, then what gives them: tokens per page, groups.

    Equal bytes are decided for the smaller page and then the fewer groups, by the order of the tuple.
    """
    page = _page_bytes(spec, tokens)
    num_groups = -(-num_layers // max(1, block // page))
    per_group = -(-num_layers // num_groups)
    blocks = -(-spec.sliding_window // tokens) + 1
    return num_groups * blocks * max(block, per_group * page), tokens, num_groups


def _uniform(specs: dict[str, api.KVCacheSpec], tokens: int) -> api.KVCacheGroupSpec:
    sized = {name: spec.copy_with_new_block_size(tokens) for name, spec in specs.items()}
    kinds = set(sized.values())
    spec = kinds.pop() if len(kinds) == 1 else api.UniformTypeKVCacheSpecs(tokens, kv_cache_specs=sized)
    return api.KVCacheGroupSpec([*sized], spec)
