"""What we replace inside SGLang 0.5.23. Applied in the process that builds the model, by it."""

from __future__ import annotations

from deepinfer_plugins.core.patch import Patch

KV_POOL = Patch(
    target="sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._build_token_to_kv_pool",
    why=(
        "the pool of a DeepSeek-V4 architecture is built from CUDA-only classes with a layout that has no ratio 1 "
        "or 2 outside them, and a platform can only bring pools of the kinds mha, mla and dsa"
    ),
    upstream="none",
    remove_when="a platform's get_kv_pool_cls is asked for the kind dsv4",
    parameters=("self", "sizes", "is_dsv4_model", "req_to_token_pool"),
)
POOL_SIZES = Patch(
    target="sglang.srt.model_executor.pool_configurator:create_memory_pool_configurator",
    why="it sizes a DeepSeek-V4 architecture by the native pool's bytes and wants pages of a multiple of 128",
    upstream="none",
    remove_when="a KV pool class can bring its own MemoryPoolConfigurator",
    parameters=("kvc",),
)
PROMPT = Patch(
    target="sglang.srt.managers.scheduler:validate_input_length",
    why=(
        "SGLang checks the length of a prompt but not its ids: an empty prompt, or an id outside the vocabulary, would "
        "take the scheduler down and with it every other request, and so would embeddings in place of tokens"
    ),
    upstream="none",
    remove_when="SGLang refuses a prompt whose ids are not in [0, vocab_size)",
    parameters=("req", "max_req_input_len", "allow_auto_truncate"),
)

PATCHES: tuple[Patch, ...] = (KV_POOL, POOL_SIZES, PROMPT)
