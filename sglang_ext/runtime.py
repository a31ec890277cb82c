"""What the process that holds the model does, once."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.mem_cache.allocation import get_last_loc_torch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_loader.weight_utils import download_weights_from_hf
from sglang.srt.runtime_context import get_exec, get_model, get_schedule, get_spec, process_model_config

from deepinfer_plugins.core import patch
from deepinfer_plugins.core.report import report
from deepinfer_plugins.core.settings import Settings
from deepinfer_plugins.features.graphs import sizes_up_to
from deepinfer_plugins.features.sampling import SamplingState, choose_verify
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.caches import CacheSpec, cache_specs
from deepinfer_plugins.model.checkpoint import Checkpoint, resolve_model_folder
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.loading import load
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.platforms.detect import want
from deepinfer_plugins.sglang_ext.attention import StepBackend
from deepinfer_plugins.sglang_ext.cache import CachePool, Sizes, assign_slots
from deepinfer_plugins.sglang_ext.hooks import ATTENTION_BACKEND, is_release
from deepinfer_plugins.sglang_ext.sampling import Sampling
from deepinfer_plugins.sglang_ext.seeds import SEED_KEY
from deepinfer_plugins.sglang_ext.v0_5_23 import patches
from deepinfer_plugins.sglang_ext.worker import DraftingWorker

_LOG = logging.getLogger("deepinfer_plugins")


def open_checkpoint() -> Checkpoint:
    """Find the checkpoint by SGLang's own way and check all of it, before any memory is allocated."""
    model = get_model()

    def download(name: str) -> str:
        return download_weights_from_hf(name, model.download_dir, ["*.safetensors", "*.json"], model.revision)

    # Of another model's id, SGLang has read the configuration where that is; its tensors are there too.
    folder = Settings.from_env().hf_model_dir if is_release(model.model_path) else None
    return Checkpoint.open(resolve_model_folder(model.model_path, folder, download))


def build(checkpoint: Checkpoint, device: torch.device) -> DeepseekV41:
    """The model with its weights still empty, and SGLang's pools and attention made to fit it."""
    config = checkpoint.config
    depth = _depth()
    _install(config, depth > 0, device)
    wanted = want(Settings.from_env())
    _LOG.info("DeepSeek-V4.1 by deepinfer_plugins on %s, for %s", device, wanted)
    return DeepseekV41(
        config,
        load_ops(wanted),
        device=device,
        # Drafts lie beyond the last token; and with overlap scheduling a request that its last window took past the
        # end of the context runs for one more step, before the scheduler knows.
        max_positions=process_model_config().context_len + 2 * (depth + 1),
        vocabulary=CompressedVocabulary.from_folder(checkpoint.folder, config.vocab_size),
        draft=depth > 0,
    )


def sampling(network: DeepseekV41) -> Sampling:
    """What samples from the model's logits."""
    settings = Settings.from_env()
    return Sampling(network.ops, settings.verify, want(settings).batch_invariant)


def _depth() -> int:
    """Drafts per step; SGLang counts the token that they follow too."""
    return (get_spec().speculative_num_draft_tokens or 1) - 1


def load_weights(network: DeepseekV41, checkpoint: Checkpoint) -> None:
    """Stream every tensor of the model into place."""
    load(network, checkpoint, progress=sys.stdout.isatty())


def _install(config: ModelConfig, draft: bool, device: torch.device) -> None:
    specs = cache_specs(config, draft)
    patch.wrap(patches.KV_POOL, _own_pool(specs))
    patch.apply(patches.POOL_SIZES, lambda kvc: Sizes(kvc, specs, _record_bytes(config)))
    patch.wrap(patches.PROMPT, _checked_prompt(config.vocab_size))
    patch.wrap(patches.ADMIT, _admitting)
    patch.apply(patches.SAMPLE, _sample)
    patch.wrap(patches.SEED_REPORT, _once)
    patch.wrap(patches.STOP_STRINGS, _whole_stop_strings)
    patch.wrap(patches.GRAPHS, _capturing)
    if draft:
        patch.apply(patches.DRAFTING, lambda self, server_args: DraftingWorker)
        patch.wrap(patches.ROW_WIDTH, _wide_enough)
        if device.type == "cpu":
            patch.apply(patches.LAST_SLOTS, get_last_loc_torch)
            patch.apply(patches.ASSIGN_SLOTS, assign_slots)
    register_attention_backend(ATTENTION_BACKEND)(
        lambda runner: StepBackend(runner, context_length=config.engram_max_ngram_size - 1)
    )
    report().add(
        "hooks", f"attention backend {ATTENTION_BACKEND}", f"{StepBackend.__module__}:{StepBackend.__name__}"
    )


def _wide_enough(original: Callable[[], int]) -> Callable[[], int]:
    def get_req_to_token_extra_context_len() -> int:
        return max(original(), get_alloc_reserve_per_decode() + get_schedule().page_size - 1)

    return get_req_to_token_extra_context_len


def _whole_stop_strings(original: Callable[[Any, int], int]) -> Callable[[Any, int], int]:
    def stop_match_tail_len(self: Any, new_accepted_len: int) -> int:
        # No token is less than a byte.
        longest = max((len(text.encode()) for text in self.sampling_params.stop_strs), default=0)
        needed = min(longest + max(new_accepted_len, 1), len(self.output_ids))
        return max(original(self, new_accepted_len), needed)

    return stop_match_tail_len


def _capturing(original: Callable[..., Any]) -> Callable[..., Any]:
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    def capture_decode_graph(*, model_runner: Any) -> Any:
        backend = model_runner.attn_backend
        if not isinstance(backend, StepBackend):
            return original(model_runner=model_runner)
        depth = _depth()
        started, taken = time.monotonic(), 0.0
        if sizes := _graph_sizes():
            before = torch.cuda.mem_get_info()[0]
            backend.capture(sizes, depth + 1)
            taken = (before - torch.cuda.mem_get_info()[0]) / (1 << 30)
        return GraphCapture(
            # Steps run as without graphs, and the model replays them.
            runner=None,
            memory_phase="target_verify" if depth else "decode",
            memory_usage_gb=taken,
            capture_time=time.monotonic() - started,
        )

    return capture_decode_graph


def _graph_sizes() -> list[int]:
    """Numbers of requests whose steps are to be captured, by SGLang's flags."""
    decode, most = get_exec().graph.cuda_graph_config.decode, get_schedule().max_running_requests
    if decode.backend != Backend.FULL:
        return []
    return sorted({min(size, most) for size in decode.bs or sizes_up_to(min(decode.max_bs or most, most))})


def _record_bytes(config: ModelConfig) -> int:
    """Bytes of the table that graphs of drafts write to where drafts may be verified by rejection."""
    settings, depth = Settings.from_env(), _depth()
    verify = choose_verify(settings.verify, False, want(settings).batch_invariant)
    if not depth or not _graph_sizes() or verify != "rejection":
        return 0
    return SamplingState.record_bytes(get_schedule().max_running_requests, depth, config.vocab_size)


def _own_pool(specs: tuple[CacheSpec, ...]) -> Callable[[Any], Any]:
    def wrapper(original: Any) -> Any:
        def build_token_to_kv_pool(self: Any, *, sizes: Any, **_: Any) -> CachePool:
            return CachePool(
                sizes.full_max_total_num_tokens,
                sizes.swa_max_total_num_tokens,
                get_schedule().page_size,
                self.device,
                specs,
            )

        return build_token_to_kv_pool

    return wrapper


def _checked_prompt(vocab_size: int) -> Callable[[Any], Any]:
    def wrapper(original: Any) -> Any:
        def validate_input_length(req: Any, max_req_input_len: int, allow_auto_truncate: bool) -> str | None:
            if req.input_embeds is not None or req.positional_embed_overrides is not None:
                # Even a refused request runs for a token, and would run on these.
                req.input_embeds = req.positional_embed_overrides = None
                return "Embeddings in place of tokens are not supported: n-grams need the tokens; send token ids."
            if req.return_sampling_mask or (req.sampling_params.beam_width or 1) > 1:
                req.return_sampling_mask = False
                return "Beams and sampling masks are not supported: another sampler chooses the tokens of this model."
            ids = req.origin_input_ids
            if not len(ids):
                return "The prompt is empty; give at least one token."
            for token in (min(ids), max(ids)):
                if not 0 <= token < vocab_size:
                    return f"The prompt has the token id {token}; the vocabulary has ids from 0 to {vocab_size - 1}."
            return original(req, max_req_input_len, allow_auto_truncate)

        return validate_input_length

    return wrapper


def _admitting(original: Any) -> Any:
    def forward_batch_generation(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch is not None:
            self.model_runner.model.sampling.admit(self.model_runner, batch)
        result = original(self, batch, *args, **kwargs)
        # What SGLang says of the batch in its log and metrics.
        result.can_run_cuda_graph = self.model_runner.attn_backend.replays
        return result

    return forward_batch_generation


def _sample(self: Any, logits_output: Any, forward_batch: Any) -> torch.Tensor:
    return self.model.sampling.sample(logits_output, forward_batch)


def _once(original: Any) -> Any:
    def is_request_level_customized_info_key(self: Any, key: str) -> bool:
        return key == SEED_KEY or original(self, key)

    return is_request_level_customized_info_key
