"""What our model needs from vLLM's configuration, whatever the chip."""

from __future__ import annotations

from typing import Any

ARCHITECTURE = "DeepseekV41ForCausalLM"
# Those in which vLLM hands the model the checkpoint's own tensors.
_LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors")


def runs_our_model(vllm_config: Any) -> bool:
    """Whether this configuration is of the model that we register."""
    model = vllm_config.model_config
    return model is not None and ARCHITECTURE in model.architectures


def _refusals(vllm_config: Any) -> list[str]:
    """What was asked for and would otherwise go unnoticed: the model reads config.json and the tensors itself."""
    model, load, cache = vllm_config.model_config, vllm_config.load_config, vllm_config.cache_config
    dtype = str(model.dtype).removeprefix("torch.")
    return [
        what
        for unsupported, what in (
            (bool(model.hf_overrides), "--hf-overrides"),
            (dtype != "bfloat16", f"--dtype {dtype}"),
            (load.load_format not in _LOAD_FORMATS, f"--load-format {load.load_format}"),
            (
                cache.cache_dtype != "auto" and not cache.cache_dtype.startswith("fp8"),
                f"--kv-cache-dtype {cache.cache_dtype}",
            ),
            (
                not vllm_config.use_v2_model_runner,
                "vLLM's V1 model runner, which VLLM_USE_V2_MODEL_RUNNER=0 or another option chose",
            ),
        )
        if unsupported
    ]


def apply(vllm_config: Any) -> None:
    """Refuse what the model can't do yet; switch off what it does not go through.

    Raises:
        ValueError: For a way of spreading the model over ranks that is not there.
    """
    parallel = vllm_config.parallel_config
    for flag, size in (
        ("--tensor-parallel-size", parallel.tensor_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--data-parallel-size", parallel.data_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
    ):
        if size > 1:
            raise ValueError(
                f"{flag} {size}: this version of deepinfer_plugins runs the model on one rank; set it to 1, or "
                "DEEPINFER_PLUGINS_MODEL=native for vLLM's own model"
            )
    if vllm_config.speculative_config is not None:
        raise ValueError(
            "--speculative-config: this version of deepinfer_plugins does not draft; leave it out, or set "
            "DEEPINFER_PLUGINS_MODEL=native for vLLM's own model"
        )
    if refusals := _refusals(vllm_config):
        raise ValueError(
            f"deepinfer_plugins does not run DeepSeek-V4.1 with {', '.join(refusals)} yet. Leave that out, or set "
            "DEEPINFER_PLUGINS_MODEL=native for vLLM's own model"
        )
    # Platform classes are imported while vllm.config still is.
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    # The model reads shapes on the host between operators: neither a compiler nor a graph can hold it.
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.cudagraph_capture_sizes = []
    compilation.max_cudagraph_capture_size = 0
