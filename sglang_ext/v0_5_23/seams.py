"""Every name of SGLang 0.5.23 that this room builds on, checked without importing it.

Importing them at registration would pull the scheduler's modules into the tokenizer and the
detokenizer too; reading the source finds a renamed one in milliseconds.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

from deepinfer_plugins.sglang_ext.v0_5_23.patches import PATCHES

# "module:name" or "module:Class.name" -> parameters it must have.
SEAMS: dict[str, tuple[str, ...]] = {
    **{patch.target: patch.parameters for patch in PATCHES},
    "sglang.srt.mem_cache.allocation_sizing:get_alloc_reserve_per_decode": (),
    "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook": ("name",),
    "sglang.srt.arg_groups.overrides:declare_resolution": ("server_args", "source"),
    "sglang.srt.arg_groups.choices:ATTENTION_BACKEND_CHOICES": (),
    "sglang.srt.model_executor.model_runner_components.cuda_graph_setup:GraphCapture": (),
    "sglang.srt.model_executor.cuda_graph_config:Backend.FULL": (),
    "sglang.srt.model_executor.cuda_graph_config:with_phase": ("config", "phase"),
    "sglang.srt.model_executor.cuda_graph_config:PhaseConfig": (),
    "sglang.srt.layers.attention.attention_registry:register_attention_backend": ("name",),
    "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata": (
        "forward_batch",
    ),
    "sglang.srt.layers.logits_processor:LogitsProcessor.forward": (
        "input_ids",
        "hidden_states",
        "lm_head",
        "logits_metadata",
    ),
    "sglang.srt.layers.logits_processor:should_apply_lm_head_quant_method": ("lm_head", "quant_method"),
    "sglang.srt.mem_cache.base_swa_memory_pool:BaseSWAKVPool.register_mapping": (
        "full_to_swa_index_mapping",
    ),
    "sglang.srt.mem_cache.base_swa_memory_pool:BaseSWAKVPool.translate_loc_from_full_to_swa": ("kv_indices",),
    "sglang.srt.layers.logprob_processor:compute_spec_logprobs": ("batch", "predict", "chain_stride"),
    "sglang.srt.managers.utils:GenerationBatchResult": (),
    "sglang.srt.mem_cache.allocation:get_last_loc_torch": (),
    "sglang.srt.model_executor.forward_context:get_attn_backend": (),
    "sglang.srt.speculative.base_spec_worker:BaseSpecWorker.on_verify_complete_cpu": (
        "num_correct_drafts_per_req",
        "batch_size",
    ),
    "sglang.srt.speculative.draft_worker_common:make_draft_input_v2": ("bonus_tokens", "new_seq_lens"),
    "sglang.srt.speculative.spec_utils:GrammarTree.from_linear_chain": ("verify_ids_2d",),
    "sglang.srt.speculative.spec_utils:build_grammar_vocab_mask": (
        "reqs",
        "tree",
        "sampling_info",
        "barrier",
    ),
    "sglang.srt.model_executor.pool_configurator:MemoryPoolConfigurator.calculate_pool_sizes": (
        "available_bytes",
        "page_size",
    ),
    "sglang.srt.model_executor.pool_configurator:MemoryPoolConfigurator.calculate_pool_sizes_from_max_tokens": (
        "max_total_num_tokens",
        "page_size",
    ),
    "sglang.srt.model_executor.pool_configurator:compute_swa_request_cap": (
        "page_size",
        "window",
        "attn_dp_size",
    ),
    "sglang.srt.model_loader.weight_utils:download_weights_from_hf": ("model_name_or_path", "allow_patterns"),
}


@functools.cache
def _source(module: str) -> ast.Module | None:
    """The module's source, parsed; None if there is no such module. Imports nothing, SGLang's own packages included:
    the platform entry point runs while those are half imported."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*rest).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def _find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for statement in body:
        if (
            isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and statement.name == name
        ):
            return statement
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in statement.targets
        ):
            return statement
        # A name that the module took from another and looks up in its own namespace.
        if isinstance(statement, ast.ImportFrom) and name in [a.asname or a.name for a in statement.names]:
            return statement
        for inner in ("body", "orelse"):
            # Definitions under an `if` or `try` at the top count too; those inside functions don't.
            if isinstance(statement, ast.If | ast.Try) and (found := _find(getattr(statement, inner), name)):
                return found
    return None


def why_missing(seam: str, parameters: tuple[str, ...]) -> str:
    """Why a seam is not as this package expects it; empty if it is."""
    module, _, path = seam.partition(":")
    tree = _source(module)
    if tree is None:
        return f"SGLang has no module {module} ({path} is needed)"
    found: ast.stmt | None = None
    body = tree.body
    for name in path.split("."):
        found = _find(body, name)
        if found is None:
            return f"SGLang has no {seam}; it was renamed or removed"
        body = getattr(found, "body", [])
    if parameters and isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = found.args
        has = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        absent = [parameter for parameter in parameters if parameter not in has]
        if absent:
            return f"SGLang's {seam} has no parameter {', '.join(absent)}; it has {', '.join(sorted(has))}"
    return ""


def missing() -> list[str]:
    """What of :data:`SEAMS` this SGLang lacks, a reason each."""
    return [why for seam, parameters in SEAMS.items() if (why := why_missing(seam, parameters))]
