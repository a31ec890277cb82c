"""vLLM on an NVIDIA GPU. ``_enum`` stays CUDA: vLLM asks ``is_cuda()`` in hundreds of places."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cuda import CudaPlatform

from deepinfer_plugins.vllm_ext.v0_33 import defaults


class DeepInferCudaPlatform(CudaPlatform):
    """The built-in CUDA platform; it only differs for our model."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        if defaults.runs_our_model(vllm_config):
            defaults.apply(vllm_config)
