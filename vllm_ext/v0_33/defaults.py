"""What our model needs from vLLM's configuration, whatever the chip."""

from __future__ import annotations

import logging
from typing import Any

from deepinfer_plugins.core.settings import Settings, prefer
from deepinfer_plugins.platforms import detect

_log = logging.getLogger("vllm.deepinfer_plugins")

ARCHITECTURE = "DeepseekV41ForCausalLM"
DRAFT_ARCHITECTURE = "DSparkV41DraftModel"
# As many drafts as a request may have.
_MAX_DEPTH = 8
# Those in which vLLM hands the model the checkpoint's own tensors.
_LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors")


def runs_our_model(vllm_config: Any) -> bool:
    """Whether this configuration is of the model that we register."""
    model = vllm_config.model_config
    return model is not None and ARCHITECTURE in model.architectures


def has_our_draft(speculative: Any) -> bool:
    """Whether this speculative configuration is of the draft that comes with our model."""
    draft = speculative.draft_model_config
    return draft is not None and DRAFT_ARCHITECTURE in draft.architectures


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
            (model.return_sampling_mask, "--return-sampling-mask"),
            (model.enable_trace_replay, "--enable-trace-replay"),
            (vllm_config.watermark_config is not None, "--watermark-config"),
            (vllm_config.weight_transfer_config is not None, "--weight-transfer-config"),
            (
                not vllm_config.use_v2_model_runner,
                "vLLM's V1 model runner, which VLLM_USE_V2_MODEL_RUNNER=0 or another option chose",
            ),
        )
        if unsupported
    ]


def _check_speculation(speculative: Any) -> None:
    """Refuse what our draft and our verification would not do as asked."""
    depth = speculative.num_speculative_tokens
    if not has_our_draft(speculative):
        raise ValueError(
            f"--speculative-config method {speculative.method}: deepinfer_plugins drafts with the model's own layers; "
            "use method dspark without a model, or set DEEPINFER_PLUGINS_MODEL=native for vLLM's own model"
        )
    if not 1 <= depth <= _MAX_DEPTH:
        raise ValueError(
            f"--speculative-config num_speculative_tokens {depth}: supported are 1 to {_MAX_DEPTH}"
        )
    if speculative.rejection_sample_method != "standard":
        raise ValueError(
            f"--speculative-config rejection_sample_method {speculative.rejection_sample_method}: deepinfer_plugins "
            "verifies by DEEPINFER_PLUGINS_VERIFY=auto, coupling or rejection; leave it out"
        )
    # vLLM's flag is off unless set, so off says nothing.
    speculative.enable_adaptive_verification = prefer(
        "confidence-scheduled verification",
        False,
        (
            "--speculative-config enable_adaptive_verification",
            speculative.enable_adaptive_verification or None,
        ),
        ("DEEPINFER_ENABLE_MTP_VARLEN", Settings.from_env().varlen),
    )


def set_worker(vllm_config: Any, theirs: str, ours: str) -> None:
    """Put our worker in the place of the platform's.

    Raises:
        ValueError: If the user chose another one.
    """
    parallel = vllm_config.parallel_config
    if parallel.worker_cls not in (theirs, ours):
        raise ValueError(
            f"--worker-cls {parallel.worker_cls}: deepinfer_plugins runs the model in a worker of its own; leave it "
            "out, or set DEEPINFER_PLUGINS_MODEL=native for vLLM's own model"
        )
    parallel.worker_cls = ours


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
        _check_speculation(vllm_config.speculative_config)
    if refusals := _refusals(vllm_config):
        raise ValueError(
            f"deepinfer_plugins does not run DeepSeek-V4.1 with {', '.join(refusals)} yet. Leave that out, or set "
            "DEEPINFER_PLUGINS_MODEL=native for vLLM's own model"
        )
    # Platform classes are imported while vllm.config still is.
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    # The operators are compiled already.
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = _graph_mode(compilation.cudagraph_mode)
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        compilation.cudagraph_capture_sizes = []
        compilation.max_cudagraph_capture_size = 0


def _graph_mode(asked: Any) -> Any:
    """The CUDA graphs to capture, given vLLM's mode: of whole steps, whatever rows they have, or none.

    Pieces, which vLLM chooses where nothing was said, would end at attention: an operator like any other here.

    Raises:
        ValueError: If graphs of whole steps are asked for and can't be.
    """
    from vllm import envs
    from vllm.config import CUDAGraphMode

    if asked == CUDAGraphMode.NONE:
        return asked
    name = "VLLM_BATCH_INVARIANT"
    flag = (name, bool(envs.VLLM_BATCH_INVARIANT) if envs.is_set(name) else None)
    whole = not asked.has_piecewise_cudagraphs()
    reason = detect.no_graphs(Settings.from_env(), asked=whole, flag=flag)
    if reason and whole:
        raise ValueError(f"--compilation-config cudagraph_mode {asked}: {reason}; use --enforce-eager")
    if reason:
        _log.info("without CUDA graphs: %s", reason)
        return CUDAGraphMode.NONE
    return asked if whole else CUDAGraphMode.FULL
