"""What SGLang's configuration becomes for our model.

A resolution step is the one place where an exception of a plugin stops the launch, so the check that
our model is the one that will run sits here too.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from deepinfer_plugins.core.report import report
from deepinfer_plugins.core.settings import SettingError, Settings
from deepinfer_plugins.platforms.detect import no_graphs
from deepinfer_plugins.sglang_ext import speculation

_LOG = logging.getLogger("deepinfer_plugins")

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPE = "deepseek_v41"
# How the name of the release's id starts, whoever keeps the copy.
RELEASE = "deepseek-v4.1-flash"
ATTENTION_BACKEND = "deepinfer"
MODEL_CLASS = "deepinfer_plugins.sglang_ext.models.deepseek_v4:DeepseekV4ForCausalLM"

PAGE_SIZE = 64
# How much of the full pool the window pool is, at least: what a prefix needs to be found again.
SWA_FULL_TOKENS_RATIO = 0.25
MAX_RUNNING_REQUESTS = {"cpu": 32, "cuda": 256}

_registered = False


def register() -> None:
    """Hook into SGLang's configuration; again is harmless."""
    global _registered
    if _registered:
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    if ATTENTION_BACKEND not in choices.ATTENTION_BACKEND_CHOICES:
        choices.ATTENTION_BACKEND_CHOICES.append(ATTENTION_BACKEND)
    record = report()
    record.add("models", ARCHITECTURE, MODEL_CLASS)
    for step, hook in (
        ("handle_model_source_paths", _model_source),
        ("handle_gpu_memory_settings", _own_arguments),
        ("handle_model_specific_adjustments", _own_model),
        ("handle_speculative_decoding", _drafting),
    ):
        register_resolution_hook(step)(hook)
        record.add("hooks", step, f"{__name__}:{hook.__name__}")
    _registered = True


def is_release(model: str) -> bool:
    """Whether a Hugging Face id is one that ``DEEPINFER_HF_MODEL_DIR`` is about."""
    return model.rpartition("/")[2].lower().startswith(RELEASE)


def _model_source(server_args: Any, previous: Any) -> None:
    """Where a Hugging Face id of the release is: ``DEEPINFER_HF_MODEL_DIR``, or SGLang's own way to it."""
    from huggingface_hub import constants, try_to_load_from_cache
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    cfg = resolving_view(server_args)
    asked, folder = cfg.model_path, Settings.from_env().hf_model_dir
    if folder is not None and Path(asked).is_dir() and Path(asked).resolve() != Path(folder).resolve():
        raise SettingError(
            f"--model-path {asked} and DEEPINFER_HF_MODEL_DIR={folder} name different folders; unset one of them"
        )
    if is_release(asked) and not Path(asked).exists():
        if folder is not None:
            if not Path(folder).is_dir():
                raise SettingError(
                    f"DEEPINFER_HF_MODEL_DIR={folder}: there is no such folder; set it to the checkpoint's"
                )
            fields = {"model_path": folder}
            if cfg.tokenizer_path in (None, asked):
                fields["tokenizer_path"] = folder
            declare_resolution(server_args, "deepinfer", **fields)
        elif constants.HF_HUB_OFFLINE and not isinstance(
            try_to_load_from_cache(asked, "config.json", revision=cfg.revision), str
        ):
            raise FileNotFoundError(
                f"{asked} is not in the Hugging Face cache, and HF_HUB_OFFLINE forbids to download it: unset it, set "
                "DEEPINFER_HF_MODEL_DIR to a folder that has the checkpoint, or run once online"
            )
    previous(server_args)


def _is_ours(server_args: Any) -> bool:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    config = model_config_of(server_args).hf_config
    return list(config.architectures or [])[:1] == [ARCHITECTURE] and config.model_type == MODEL_TYPE


def _own_arguments(server_args: Any, previous: Any) -> None:
    """The release has a vision tower; this version serves its text side, and an image is refused. And drafting, where
    the environment asks for it."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if _is_ours(server_args):
        fields = speculation.asked_fields(server_args._raw_input, Settings.from_env())
        if not resolving_view(server_args).language_model_only:
            fields["language_model_only"] = True
            # SGLang remembers the model's configuration, and that one still says it is multimodal.
            server_args._model_config = None
        declare_resolution(server_args, "deepinfer", **fields)
    previous(server_args)


def _drafting(server_args: Any, previous: Any) -> None:
    """SGLang's own resolution of DSpark, and what ours adds to it."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    cfg = resolving_view(server_args)
    if cfg.speculative_algorithm is None or not _is_ours(server_args):
        return previous(server_args)
    speculation.check(cfg, server_args._raw_input)
    device = cfg.device
    # SGLang's DSpark kernels are CUDA's, and so it asks for that device; ours run on every one.
    declare_resolution(server_args, "deepinfer", device="cuda")
    previous(server_args)
    declare_resolution(server_args, "deepinfer", device=device)
    speculation.check_depth(int(cfg.speculative_num_draft_tokens))


def _refusals(cfg: Any, asked: Any) -> list[str]:
    """What was asked for and this package's model does not do yet, as the user wrote it.

    Args:
        cfg: The configuration as resolved so far.
        asked: By field, what the user gave.
    """
    return [
        what
        for unsupported, what in (
            (cfg.tp_size > 1, f"--tp-size {cfg.tp_size}"),
            (cfg.pp_size > 1, f"--pp-size {cfg.pp_size}"),
            (cfg.dp_size > 1, f"--dp-size {cfg.dp_size}"),
            (cfg.attn_dp_size > 1, f"--attn-dp-size {cfg.attn_dp_size}"),
            (cfg.ep_size > 1, f"--ep-size {cfg.ep_size}"),
            (cfg.enable_prefill_cp, "--enable-prefill-cp"),
            (
                (cfg.speculative_algorithm or speculation.ALGORITHM).upper() != speculation.ALGORITHM,
                f"--speculative-algorithm {cfg.speculative_algorithm}",
            ),
            (cfg.disaggregation_mode != "null", f"--disaggregation-mode {cfg.disaggregation_mode}"),
            (cfg.enable_hierarchical_cache, "--enable-hierarchical-cache"),
            (cfg.enable_unified_memory, "--enable-unified-memory"),
            (cfg.enable_hisparse, "--enable-hisparse"),
            (cfg.enable_memory_saver, "--enable-memory-saver"),
            (cfg.enable_lora, "--enable-lora"),
            (cfg.enable_two_batch_overlap, "--enable-two-batch-overlap"),
            (cfg.enable_torch_compile, "--enable-torch-compile"),
            (cfg.enable_deterministic_inference, "--enable-deterministic-inference"),
            (cfg.enable_return_hidden_states, "--enable-return-hidden-states"),
            (cfg.enable_watermark, "--enable-watermark"),
            (cfg.disable_hybrid_swa_memory, "--disable-hybrid-swa-memory"),
            (bool(cfg.enable_decoder_swa_bounded_replay), "--enable-decoder-swa-bounded-replay"),
            (bool(cfg.enable_encoder_swa_bounded_replay), "--enable-encoder-swa-bounded-replay"),
            (cfg.load_format not in ("auto", "safetensors"), f"--load-format {cfg.load_format}"),
            (asked["dtype"] not in ("auto", "bfloat16"), f"--dtype {asked['dtype']}"),
            (asked["quantization"] not in (None, "fp8"), f"--quantization {asked['quantization']}"),
            (
                asked["kv_cache_dtype"] not in ("auto", "fp8_e4m3"),
                f"--kv-cache-dtype {asked['kv_cache_dtype']}",
            ),
            # The model reads config.json itself, where such a change would go unnoticed.
            (asked["json_model_override_args"] not in ("{}", None), "--json-model-override-args"),
            *(
                (asked[field] not in (None, ATTENTION_BACKEND), f"--{field.replace('_', '-')} {asked[field]}")
                for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
            ),
        )
        if unsupported
    ]


def _check_chunk(asked: Any) -> None:
    page_size, chunk = asked["page_size"] or PAGE_SIZE, asked["chunked_prefill_size"]
    if chunk is not None and chunk > 0 and chunk % page_size:
        raise ValueError(
            f"--chunked-prefill-size {chunk}: SGLang prefills whole pages, so it must be a multiple of the page size, "
            f"{page_size}; change it, or --page-size (any from 1 on; even ones take less memory)"
        )


def _own_model(server_args: Any, previous: Any) -> None:
    """Refuse what is not there yet, set defaults, and make sure that our class is the one that will run."""
    if not _is_ours(server_args):
        return previous(server_args)
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    cfg, asked = resolving_view(server_args), server_args._raw_input
    if refusals := _refusals(cfg, asked):
        raise ValueError(
            f"deepinfer_plugins does not serve DeepSeek-V4.1 with {', '.join(refusals)} yet. Leave that out, or set "
            "DEEPINFER_PLUGINS_MODEL=native to use SGLang's own model."
        )
    _check_chunk(asked)
    if Path(cfg.model_path).is_dir():
        # Headers only. The scheduler looks again, but its errors come half a minute later, among many lines.
        from deepinfer_plugins.model.checkpoint import Checkpoint

        Checkpoint.open(cfg.model_path)
    ensure_active()
    _at_the_front()
    # Before, so that what the native step derives from these is right; after, because it sets two of them
    # for its own backend whatever was asked.
    declare_resolution(server_args, "deepinfer", **_defaults(server_args))
    previous(server_args)
    declare_resolution(server_args, "deepinfer", **_defaults(server_args))


def ensure_active() -> None:
    """Raise unless SGLang would build our model class.

    Raises:
        RuntimeError: If another class stands under the architecture's name.
    """
    from sglang.srt.models.registry import ModelRegistry

    from deepinfer_plugins.sglang_ext.entrypoints import MODELS

    found, _ = ModelRegistry.resolve_model_cls([ARCHITECTURE])
    if not found.__module__.startswith(MODELS):
        raise RuntimeError(
            f"deepinfer_plugins is registered but SGLang would run {found.__module__}.{found.__qualname__} for "
            f"{ARCHITECTURE}: its model registry was imported before our platform entry point ran "
            f"(SGLANG_EXTERNAL_MODEL_PACKAGE={os.environ.get('SGLANG_EXTERNAL_MODEL_PACKAGE')!r}). Set "
            f"SGLANG_EXTERNAL_MODEL_PACKAGE={MODELS} in the environment, or DEEPINFER_PLUGINS_MODEL=native to "
            "have that class."
        )


def _at_the_front() -> None:
    """Here, because this runs in the process that takes requests, and only for our model."""
    from deepinfer_plugins.core import patch
    from deepinfer_plugins.sglang_ext import parameters, seeds
    from deepinfer_plugins.sglang_ext.v0_5_23 import patches

    patch.wrap(patches.PARAMETERS, parameters.checking)
    patch.wrap(patches.PARALLEL_SEEDS, seeds.numbering)
    patch.wrap(patches.SEEDS_NOTED, seeds.noting)
    patch.wrap(patches.SEEDS_IN_COMPLETIONS, seeds.naming)
    patch.wrap(patches.SEEDS_IN_CHATS, seeds.naming_in_chats)
    for stream in (patches.SEEDS_IN_STREAMS, patches.SEEDS_IN_STREAMED_CHATS):
        patch.wrap(stream, seeds.naming_in_streams)


def _no_graphs(backend: str, asked_for: bool) -> str:
    """Why steps are not captured in CUDA graphs; empty if they are.

    Args:
        backend: SGLang's of graphs for decoding.
        asked_for: Whether the user chose it.

    Raises:
        ValueError: If graphs were asked for and can't be.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend

    if backend == Backend.DISABLED:
        return "switched off"
    reason = no_graphs(Settings.from_env(), asked=asked_for)
    if backend != Backend.FULL:
        reason = "deepinfer_plugins captures whole steps, which is the backend full"
    if reason and asked_for:
        raise ValueError(
            f"--cuda-graph-backend-decode {backend}: {reason}; use --cuda-graph-backend-decode disabled"
        )
    return reason


def _defaults(server_args: Any) -> dict[str, Any]:
    """Fields for our model, where the user said nothing or there is one possibility."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    cfg, asked = resolving_view(server_args), server_args._raw_input
    # Our graphs hold steps of any kind, as many rows as decoding has.
    graphs = with_phase(cfg.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED)
    asked_for = (Phase.DECODE, "backend") in server_args._cuda_graph_config_locked
    if reason := _no_graphs(graphs.decode.backend, asked_for):
        graphs = with_phase(graphs, Phase.DECODE, backend=Backend.DISABLED)
        _LOG.info("without CUDA graphs: %s", reason)
    fields: dict[str, Any] = {
        "attention_backend": ATTENTION_BACKEND,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "page_size": asked["page_size"] or PAGE_SIZE,
        "cuda_graph_config": graphs,
        "enable_decoder_swa_bounded_replay": False,
    }
    if asked["moe_runner_backend"] == "auto":
        # Ours is no fused MoE layer of SGLang; "auto" would ask for a package that it then does not use.
        fields["moe_runner_backend"] = "triton"
    if asked["sampling_backend"] is None:
        fields["sampling_backend"] = "pytorch"
    if asked["swa_full_tokens_ratio"] is None:
        fields["swa_full_tokens_ratio"] = SWA_FULL_TOKENS_RATIO
    if asked["max_running_requests"] is None:
        fields["max_running_requests"] = MAX_RUNNING_REQUESTS.get(cfg.device)
    return fields
