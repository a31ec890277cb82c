"""Every private or experimental name of vLLM 0.33.0 that this package stands on.

They are looked up in vLLM's source text, so checking them imports nothing. A release that renames one
is refused with that name, instead of failing somewhere in the middle of a start.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Seam:
    """One name.

    Args:
        target: ``"module:name"`` or ``"module:Class.name"``, where it is defined.
        use: What we do with it.
        parameters: Parameters it must have, in any order.
    """

    target: str
    use: str
    parameters: tuple[str, ...] = ()


SEAMS = (
    Seam(
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config", "keep what the user set", ("vllm_config",)
    ),
    Seam("vllm.platforms.cpu:CpuPlatform.import_kernels", "stand in for compiled operators"),
    Seam("vllm.platforms.cuda:CudaPlatform", "base of the NVIDIA platform"),
    Seam("vllm.platforms.cuda:CudaPlatformBase.check_and_update_config", "extend it", ("vllm_config",)),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker._should_warm_up_model", "rely on: no warm-up in eager mode"),
    Seam("vllm.triton_utils.importing:HAS_TRITON", "made true by a driver for the interpreter"),
    Seam("vllm.config.model:ModelConfig.original_max_model_len", "-1 asks for a length that fits"),
    Seam("vllm.config.cache:CacheConfig.user_specified_block_size", "--block-size or our default"),
    Seam("vllm.config.cache:CacheConfig.kv_cache_memory_bytes", "a default on a CPU"),
    Seam("vllm.model_executor.models.interfaces:SupportsKVCacheGrouping.get_kv_cache_groups", "own grouping"),
    Seam(
        "vllm.model_executor.model_loader.weight_utils:download_weights_from_hf",
        "fetch a checkpoint as vLLM does",
        ("model_name_or_path", "cache_dir", "allow_patterns", "revision"),
    ),
    Seam(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.bind_kv_cache", "get the caches"
    ),
    Seam("vllm.v1.attention.backend:AttentionBackend.supported_kv_cache_layouts", "ask for blocks outermost"),
    Seam(
        "vllm.v1.attention.backend:AttentionMetadataBuilder.build",
        "pass metadata on",
        ("common_attn_metadata",),
    ),
    Seam("vllm.v1.attention.backend:CommonAttentionMetadata.query_start_loc", "rows of each request"),
    Seam("vllm.v1.attention.backend:CommonAttentionMetadata.block_table_tensor", "page tables"),
    Seam("vllm.v1.kv_cache_interface:KVCacheSpec.copy_with_new_block_size", "size pages", ("block_size",)),
    Seam("vllm.v1.kv_cache_interface:AttentionSpec.tokens_per_state", "entries that stand for two positions"),
    Seam("vllm.v1.kv_cache_interface:SlidingWindowMLASpec", "caches of a window"),
    Seam("vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs", "pages of several sizes in a group"),
    Seam("vllm.v1.kv_cache_interface:KVCacheGroupSpec", "groups"),
    Seam("vllm.v1.kv_cache_layout:KVCacheLayout.BLHNC", "blocks outermost"),
    Seam(
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_inputs",
        "add the tokens before a step",
        ("input_batch", "req_states"),
    ),
    Seam("vllm.v1.worker.gpu.model_states:resolve_model_state_cls", "calls the model's get_model_state_cls"),
    Seam("vllm.v1.worker.gpu.input_batch:InputBatch.idx_mapping", "row of a request in the token record"),
    Seam("vllm.v1.worker.gpu.input_batch:InputBatch.query_start_loc", "first row of a request"),
    Seam("vllm.v1.worker.gpu.input_batch:InputBatch.positions", "its position"),
    Seam("vllm.v1.worker.gpu.states:RequestState.all_token_ids", "the token record"),
    Seam("vllm.v1.worker.gpu.states:RequestState.draft_tokens", "what a request verifies next"),
    Seam("vllm.v1.worker.gpu.states:RequestState.num_computed_tokens", "where a request's next draft starts"),
    Seam("vllm.v1.worker.gpu.states:RequestState.last_sampled_tokens", "what it starts from"),
    Seam(
        "vllm.v1.worker.gpu.model_states.interface:ModelState.custom_sampler",
        "sample by ourselves",
        ("sampler",),
    ),
    Seam("vllm.v1.worker.gpu.sample.sampler:Sampler.get_logprobs_dims", "logprobs that requests ask for"),
    Seam("vllm.v1.worker.gpu.sample.sampler:Sampler.logits_processors", "the user's own processors"),
    Seam("vllm.v1.worker.gpu.sample.sampler:Sampler.thinking_budget_state", "budgets of thinking tokens"),
    Seam(
        "vllm.v1.worker.gpu.sample.logprob:compute_topk_scores",
        "report logprobs",
        (
            "logits",
            "num_logprobs",
            "sampled_token_ids",
            "cu_num_logits",
            "expanded_idx_mapping",
            "logits_mode",
        ),
    ),
    Seam("vllm.v1.worker.gpu.input_batch:get_num_sampled_and_rejected", "nothing is sampled within a prompt"),
    Seam("vllm.v1.worker.gpu.input_batch:InputBatch.expanded_local_pos", "drafts before a row"),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.observe_verification",
        "see what became of drafts",
        ("idx_mapping", "num_sampled", "num_rejected"),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.propose",
        "draft",
        ("input_batch", "attn_metadata", "dummy_run", "num_speculative_tokens"),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager.compact_batch",
        "lay out the host's side of a trimmed batch",
        ("num_draft_tokens_per_req", "num_scheduled_tokens", "cu_num_logits_np"),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager.reallocate_drafts",
        "trim drafts on the device",
        ("req_ids", "idx_mapping"),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager.get_num_tokens",
        "choose a budget",
        ("num_tokens_per_req", "draft_tokens"),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager.record_confidences",
        "see confidences",
        ("confidence_probs", "input_batch"),
    ),
    Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run", "time steps", ("num_tokens",)),
    Seam("vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model", "time steps once they can run"),
    Seam("vllm.v1.worker.gpu_worker:Worker.execute_model", "time steps", ("scheduler_output",)),
    Seam("vllm.v1.worker.gpu_worker:Worker.sample_tokens", "the same", ("grammar_output",)),
    Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model_state", "the rows that a step ran"),
    Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.adaptive_verification", "reach our budget"),
    Seam("vllm.v1.worker.gpu_worker:Worker.init_device", "change the runner before it is made"),
    Seam("vllm.v1.worker.gpu_worker:Worker.reload_weights", "refuse in time"),
    Seam("vllm.config.compilation:CUDAGraphMode.FULL", "ask for graphs of whole steps"),
    Seam("vllm.v1.attention.backend:AttentionCGSupport.ALWAYS", "have them for every batch"),
    Seam(
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_dummy_inputs",
        "capture with the tokens before a step",
        ("num_reqs", "num_tokens"),
    ),
    Seam(
        "vllm.v1.worker.gpu.block_table:BlockTables.input_block_tables", "the batch's page tables, in place"
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.set_attn",
        "learn where they are",
        ("model_state", "kv_cache_config", "block_tables"),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.init_cudagraph_manager",
        "learn which graphs there are",
        ("cudagraph_mode",),
    ),
    Seam("vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.capture", "capture drafts"),
    Seam("vllm.platforms.interface:Platform.get_global_graph_pool", "share the memory of graphs"),
    Seam("vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.captured_token_counts", "time those sizes"),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager.batches_to_profile",
        "time steps ourselves",
        ("capture_sizes",),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager.set_initial_cost_curves",
        "the same",
        ("samples",),
    ),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.init_device", "change the runner before it is made"),
    Seam("vllm.platforms.interface:Platform.register_custom_kv_cache_specs", "register the draft's caches"),
    Seam("vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register", "the same"),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.find_longest_cache_hit",
        "never shorten a prefix hit",
        ("block_hashes", "max_length", "kv_cache_group_ids", "block_pool", "alignment_tokens"),
    ),
)


def missing(seams: Iterable[Seam] = SEAMS) -> list[str]:
    """What the installed vLLM lacks, one line each; empty if nothing."""
    return [why for seam in seams if (why := _lacking(seam))]


def _lacking(seam: Seam) -> str:
    module, _, qualified = seam.target.partition(":")
    found = _find(module, tuple(qualified.split(".")))
    if found is None:
        return f"vLLM has no {seam.target} (needed to {seam.use}): it was renamed, or this is not the release we know"
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        has = {arg.arg for arg in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)}
        if absent := [name for name in seam.parameters if name not in has]:
            return f"{seam.target} has no parameter {', '.join(absent)} (needed to {seam.use})"
    return ""


@functools.cache
def _definitions(module: str) -> dict[tuple[str, ...], ast.AST]:
    """What a module of vLLM defines: names, members of its classes, attributes these give ``self``."""
    package = importlib.util.find_spec(module.partition(".")[0])
    if package is None or package.origin is None:
        return {}
    path = Path(package.origin).parent.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return dict(_walk(ast.parse(source.read_text()).body, ())) if source.is_file() else {}


def _walk(body: list[ast.stmt], holder: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.AST]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield (*holder, node.name), node
            yield from _walk(node.body, (*holder, node.name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (*holder, node.name), node
            if holder and node.args.args and node.args.args[0].arg == "self":
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                        if isinstance(inner.value, ast.Name) and inner.value.id == "self":
                            yield (*holder, inner.attr), inner
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield (*holder, target.id), node
        elif isinstance(node, ast.If | ast.Try):
            yield from _walk([*node.body, *node.orelse], holder)


def _find(module: str, qualified: tuple[str, ...]) -> ast.AST | None:
    return _definitions(module).get(qualified)
