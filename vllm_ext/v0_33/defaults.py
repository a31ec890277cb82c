"""What our model needs from vLLM's configuration, whatever the chip."""

from __future__ import annotations

from typing import Any

ARCHITECTURE = "DeepseekV41ForCausalLM"


def runs_our_model(vllm_config: Any) -> bool:
    """Whether this configuration is of the model that we register."""
    model = vllm_config.model_config
    return model is not None and ARCHITECTURE in model.architectures


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
    # Platform classes are imported while vllm.config still is.
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    # The model reads shapes on the host between operators: neither a compiler nor a graph can hold it.
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.cudagraph_capture_sizes = []
    compilation.max_cudagraph_capture_size = 0
