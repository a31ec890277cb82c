"""What an engine's own Llama needs on a machine where neither engine has a supported CPU build."""

from __future__ import annotations

import os
from typing import Any

# A library's operators live as long as it does.
_libraries: list[Any] = []


def _store(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *_: Any) -> None:
    """FlexAttention's one compiled operator: write new keys and values into their slots."""
    page_size = key_cache.shape[1]
    page, offset = slots // page_size, slots % page_size
    rows = slots.shape[0]
    key_cache[page, offset] = key[:rows]
    value_cache[page, offset] = value[:rows]


def _attend(query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: float, **_: Any) -> Any:
    """What the compiled ``flex_attention`` computes, over the cache entries that some row sees.

    Args:
        query: ``[1, heads, rows, head_dim]``.
        key: ``[1, heads, entries of the cache, head_dim]``, as ``value``.
    """
    import torch

    if not hasattr(block_mask, "seen"):
        # The same for all layers of a step.
        row = torch.arange(query.shape[2])[:, None]
        entry = torch.arange(key.shape[2])[None, :]
        zero = torch.zeros((), dtype=torch.int64)
        mask = block_mask.mask_mod(zero, zero, row, entry)
        block_mask.seen = mask.any(0).nonzero().flatten()
        block_mask.dense = mask[:, block_mask.seen]
    key, value = key[:, :, block_mask.seen], value[:, :, block_mask.seen]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=block_mask.dense, scale=scale)


def vllm_options() -> dict[str, Any]:
    """Options, and the changes that let a model use vLLM's FlexAttention on a CPU.

    Without compiled operators vLLM has no CPU attention. FlexAttention is its one backend in plain torch; the CPU
    platform never selects it, and torch's compiler can't build it for a CPU at these sizes.
    """
    # Read when torch is imported.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    import torch
    import vllm.platforms
    from vllm.v1.attention.backends import flex_attention
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if not hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"):
        library = torch.library.Library("_C_cache_ops", "FRAGMENT")
        library.define(
            "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
            "Tensor slots, str dtype, Tensor k_scale, Tensor v_scale) -> ()"
        )
        library.impl("reshape_and_cache_flash", _store, "CompositeExplicitAutograd")
        _libraries.append(library)
    flex_attention.flex_attention_compiled = _attend
    path = AttentionBackendEnum.FLEX_ATTENTION.get_path()
    platform = type(vllm.platforms.current_platform)
    platform.get_attn_backend_cls = classmethod(lambda cls, *arguments, **named: path)
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "compilation_config": {"custom_ops": ["none"]},
    }


def sglang_options() -> dict[str, Any]:
    """Options that keep SGLang's Llama to attention and graphs that a CPU has."""
    return {"attention_backend": "torch_native", "disable_cuda_graph": True, "max_total_tokens": 16384}
