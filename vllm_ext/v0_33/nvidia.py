"""vLLM on an NVIDIA GPU. ``_enum`` stays CUDA: vLLM asks ``is_cuda()`` in hundreds of places."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cuda import CudaPlatform

from deepinfer_plugins.vllm_ext.v0_33 import defaults, patches

_THEIRS = "vllm.v1.worker.gpu_worker.Worker"
_OURS = "deepinfer_plugins.vllm_ext.v0_33.nvidia_worker.DeepInferCudaWorker"


class DeepInferCudaPlatform(CudaPlatform):
    """The built-in CUDA platform; it only differs for our model."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        if defaults.runs_our_model(vllm_config):
            defaults.apply(vllm_config)
            defaults.set_worker(vllm_config, _THEIRS, _OURS)
            patches.apply_in_engine()

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: Any) -> None:
        super().register_custom_kv_cache_specs(vllm_config)
        # Too early for its imports while this module is.
        from deepinfer_plugins.vllm_ext.v0_33 import draft_cache

        draft_cache.register()
