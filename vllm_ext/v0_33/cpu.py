"""vLLM on a CPU without compiled operators: the V2 model runner in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform

from deepinfer_plugins.platforms.cpu import CPU
from deepinfer_plugins.vllm_ext.v0_33 import cpu_kernels, defaults, patches

# A CPU that interprets its kernels does not reach the release's million positions, and tables of that
# length cost memory before the first token.
_LENGTH_LIMIT = 8192
_THEIRS = "vllm.v1.worker.cpu_worker.CPUWorker"
_OURS = "deepinfer_plugins.vllm_ext.v0_33.cpu_worker.DeepInferCpuWorker"

_operators: list[torch.library.Library] = []


class DeepInferCpuPlatform(CpuPlatform):
    """The built-in CPU platform, with what it switches off for MLA models left as the user set it."""

    @classmethod
    def import_kernels(cls) -> None:
        if importlib.util.find_spec("vllm._C") is not None:
            super().import_kernels()
        if not _operators and not hasattr(torch.ops._C, "init_cpu_memory_env"):
            # The one compiled operator that a worker of the V2 runner calls. It binds memory to a NUMA node.
            library = torch.library.Library("_C", "FRAGMENT")
            library.define("init_cpu_memory_env(int[] nodes) -> ()")
            library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
            _operators.append(library)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        cpu_kernels.install()

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        parallel = vllm_config.parallel_config
        asked = (
            cache.enable_prefix_caching,
            cache.block_size,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            scheduler.async_scheduling,
            parallel.distributed_executor_backend,
        )
        super().check_and_update_config(vllm_config)
        if not defaults.runs_our_model(vllm_config):
            return
        (
            cache.enable_prefix_caching,
            cache.block_size,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            scheduler.async_scheduling,
            parallel.distributed_executor_backend,
        ) = asked
        defaults.apply(vllm_config)
        defaults.set_worker(vllm_config, _THEIRS, _OURS)
        patches.apply_in_engine()
        cls._fit(vllm_config)

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: Any) -> None:
        super().register_custom_kv_cache_specs(vllm_config)
        # Too early for its imports while this module is.
        from deepinfer_plugins.vllm_ext.v0_33 import draft_cache

        draft_cache.register()

    @classmethod
    def _fit(cls, vllm_config: Any) -> None:
        """Defaults that fit a development machine, where the user set none."""
        cache, model = vllm_config.cache_config, vllm_config.model_config
        # Interpreted kernels have nothing to compile ahead of time.
        vllm_config.kernel_config.enable_jit_warmup = False
        if cache.kv_cache_memory_bytes is None:
            cache.kv_cache_memory_bytes = CPU.defaults.cache_bytes
        if model.original_max_model_len is None:
            model.max_model_len = min(model.max_model_len, _LENGTH_LIMIT)
            # vLLM's spelling of "shorten it further if the caches are too small".
            model.original_max_model_len = -1
