"""What is changed inside vLLM 0.33.0, and what is registered with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from deepinfer_plugins.core.patch import Patch, wrap
from deepinfer_plugins.core.settings import SettingError, Settings
from deepinfer_plugins.vllm_ext.v0_33 import defaults

# vLLM's name -> ours. A package, since vLLM caches what it knows of a class by the hash of the files beside it.
_PACKAGE = "deepinfer_plugins.vllm_ext.v0_33.deepseek_v41"
MODELS = {name: f"{_PACKAGE}:{name}" for name in ("DeepseekV41ForCausalLM", "DSparkV41DraftModel")}

LOCAL_FOLDER = Patch(
    target="vllm.engine.arg_utils:EngineArgs.create_model_config",
    why="DEEPINFER_HF_MODEL_DIR names the folder that the model's Hugging Face id stands for",
    upstream="none",
    remove_when="never: the setting is DeepInfer's",
)

OFFLINE = Patch(
    target="vllm.engine.arg_utils:get_model_path",
    why="offline and not in the cache, Hugging Face's message names neither the model nor HF_HUB_OFFLINE",
    upstream="none",
    remove_when="vLLM names both",
    parameters=("model", "revision"),
)

INVARIANT_OPERATORS = Patch(
    target="vllm.model_executor.determinism.batch_invariant:enable_batch_invariant_mode",
    why="it replaces torch's bmm, softmax and mean by kernels without float64; our operators are invariant anyway",
    upstream="none",
    remove_when="a model can say that it needs no replacements",
)

SPECULATOR = Patch(
    target="vllm.v1.worker.gpu.model_runner:init_speculator",
    why="vLLM's DSpark runs a draft model of its own; ours is a part of the target and draws with the target's noise",
    upstream="vllm-project/vllm#36219",
    remove_when="speculators can be registered",
    parameters=("vllm_config", "device", "req_states"),
)

NO_HIDDEN_STATES = Patch(
    target="vllm.v1.worker.gpu.model_runner:requires_aux_hidden_states",
    why="vLLM would ask the target for the hidden states of some layers; our forward makes the draft's keys of them",
    upstream="none",
    remove_when="a speculator can say what it needs of the target",
    parameters=("spec_config",),
)

ANY_GRAPHS = Patch(
    target="vllm.config.vllm:VllmConfig._validate_adaptive_verification",
    why="vLLM schedules verification only with full CUDA graphs, whose sizes it times; ours does without",
    upstream="none",
    remove_when="vLLM asks the manager",
)

BUDGET = Patch(
    target="vllm.v1.worker.gpu.model_runner:maybe_create_adaptive_verification_manager",
    why="vLLM's manager would see the confidence of a draft before it decides on that draft, and wants CUDA graphs",
    upstream="vllm-project/vllm#36219",
    remove_when="the manager can be registered",
    parameters=(
        "enable_adaptive_verification",
        "req_states",
        "query_start_loc",
        "max_total_logits",
        "vllm_config",
    ),
)

GRAPH_MODE = Patch(
    target="vllm.v1.worker.gpu.model_runner:resolve_adaptive_cudagraph_mode",
    why="it fails without full CUDA graphs, and gives decodes graphs of their own, which our model needs not",
    upstream="none",
    remove_when="vLLM asks the manager",
    parameters=("mode",),
)

DEPTH = Patch(
    target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
    why="DEEPINFER_USE_NEXTN_DECODE asks for drafts where no flag does",
    upstream="none",
    remove_when="never: the setting is DeepInfer's",
    parameters=("target_model_config", "target_parallel_config"),
)

ALL_PARAMETERS = Patch(
    target="vllm.sampling_params:SamplingParams._validate_spec_decode",
    why="vLLM verifies drafts without min_p and logit_bias and so refuses them; we verify with every parameter",
    upstream="none",
    remove_when="vLLM supports both under speculation",
    parameters=("speculative_config",),
)

SEED_CHOSEN = Patch(
    target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    why="the worker would draw the seed of a request that has none: nobody learns it, and a preemption changes it",
    upstream="none",
    remove_when="vLLM reports the seed that it drew",
)

SEED_KEPT = Patch(
    target="vllm.v1.engine.output_processor:RequestState.from_new_request",
    why="the front end forgets a request's seed, which is to be reported",
    upstream="none",
    remove_when="vLLM reports the seed that it drew",
    parameters=("request",),
)

SEED_REPORTED = Patch(
    target="vllm.v1.engine.output_processor:RequestState._new_completion_output",
    why="a sample is to name its seed",
    upstream="none",
    remove_when="vLLM reports the seed that it drew",
)

SEED_NAMED = Patch(
    target=(
        "vllm.entrypoints.openai.completion.serving:"
        "OpenAIServingCompletion.request_output_to_completion_response"
    ),
    why="an answer over HTTP is to name the seeds of its samples",
    upstream="none",
    remove_when="vLLM reports the seed that it drew",
    parameters=("final_res_batch",),
)

SEED_NAMED_IN_CHATS = Patch(
    target="vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
    why="the same of a chat",
    upstream="none",
    remove_when="vLLM reports the seed that it drew",
    parameters=("request", "result_generator"),
)

SEED_NAMED_IN_STREAMS = Patch(
    target="vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.completion_stream_generator",
    why="the same of a stream",
    upstream="none",
    remove_when="vLLM reports the seed that it drew",
    parameters=("request", "engine_inputs", "result_generator"),
)

SEED_NAMED_IN_STREAMED_CHATS = Patch(
    target="vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator",
    why="the same of a chat's stream",
    upstream="none",
    remove_when="vLLM reports the seed that it drew",
    parameters=("request", "result_generator"),
)

VERIFIED = Patch(
    target="vllm.v1.worker.gpu.model_runner:AsyncOutput",
    why="how many drafts of each request were verified is known on the device only, when verification is scheduled",
    upstream="none",
    remove_when="vLLM counts verified drafts",
)

VERIFIED_COUNTED = Patch(
    target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    why="vLLM counts a draft that the schedule left out as if it had been rejected",
    upstream="none",
    remove_when="vLLM counts verified drafts",
    parameters=("scheduler_output", "model_runner_output"),
)

VERIFIED_EXPORTED = Patch(
    target="vllm.v1.metrics.loggers:PrometheusStatLogger._spec_decoding_cls",
    why="its metrics know drafted and accepted tokens, not verified ones",
    upstream="none",
    remove_when="vLLM counts verified drafts",
)

# Made when vLLM loads its plugins; when it configures our model; and when a worker starts for that.
PATCHES: tuple[Patch, ...] = (LOCAL_FOLDER, OFFLINE, INVARIANT_OPERATORS, DEPTH)
ENGINE_PATCHES: tuple[Patch, ...] = (
    ANY_GRAPHS,
    ALL_PARAMETERS,
    SEED_CHOSEN,
    SEED_KEPT,
    SEED_REPORTED,
    SEED_NAMED,
    SEED_NAMED_IN_CHATS,
    SEED_NAMED_IN_STREAMS,
    SEED_NAMED_IN_STREAMED_CHATS,
    VERIFIED_COUNTED,
    VERIFIED_EXPORTED,
)
WORKER_PATCHES: tuple[Patch, ...] = (SPECULATOR, NO_HIDDEN_STATES, BUDGET, GRAPH_MODE, VERIFIED)

_FOLDER = "DEEPINFER_HF_MODEL_DIR"
_RELEASE = "deepseek-v4.1-flash"


def apply(settings: Settings) -> None:
    """Apply what the settings need. Applying again does nothing."""
    wrap(OFFLINE, _with_reason)
    wrap(INVARIANT_OPERATORS, _for_other_models)
    if settings.hf_model_dir is not None:
        wrap(LOCAL_FOLDER, _with_folder)
    if settings.draft_tokens is not None:
        wrap(DEPTH, _with_depth)


def apply_in_engine() -> None:
    """Apply what the engine around our model needs. Applying again does nothing."""
    from deepinfer_plugins.vllm_ext.v0_33 import metrics, requests

    wrap(ANY_GRAPHS, _unless_ours)
    wrap(ALL_PARAMETERS, _with_other_drafts)
    wrap(SEED_CHOSEN, requests.choosing)
    wrap(SEED_KEPT, requests.keeping)
    wrap(SEED_REPORTED, requests.reporting)
    wrap(SEED_NAMED, requests.naming)
    wrap(SEED_NAMED_IN_CHATS, requests.naming_in_chats)
    wrap(SEED_NAMED_IN_STREAMS, requests.naming_in_streams)
    wrap(SEED_NAMED_IN_STREAMED_CHATS, requests.naming_in_streamed_chats)
    wrap(VERIFIED_COUNTED, metrics.counting)
    wrap(VERIFIED_EXPORTED, metrics.exporting)


def apply_in_worker() -> None:
    """Apply what the runner of our model needs. Applying again does nothing."""
    from deepinfer_plugins.vllm_ext.v0_33 import metrics

    wrap(SPECULATOR, _own_speculator)
    wrap(NO_HIDDEN_STATES, _none_for_our_draft)
    wrap(BUDGET, _own_budget)
    wrap(GRAPH_MODE, _any_graphs)
    wrap(VERIFIED, metrics.verifying)


def _own_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41.speculator import Speculator

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        made = Speculator if defaults.runs_our_model(vllm_config) else original
        return made(vllm_config, device, req_states)

    return init_speculator


def _none_for_our_draft(original: Callable[..., Any]) -> Callable[..., Any]:
    def requires_aux_hidden_states(spec_config: Any) -> bool:
        return not defaults.has_our_draft(spec_config) and bool(original(spec_config))

    return requires_aux_hidden_states


def _own_budget(original: Callable[..., Any]) -> Callable[..., Any]:
    from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41 import budget

    def maybe_create_adaptive_verification_manager(
        *,
        enable_adaptive_verification: bool,
        req_states: Any,
        query_start_loc: Any,
        max_total_logits: int,
        vllm_config: Any,
        **others: Any,
    ) -> Any:
        if enable_adaptive_verification and defaults.runs_our_model(vllm_config):
            return budget.make(req_states, query_start_loc, max_total_logits)
        return original(
            enable_adaptive_verification=enable_adaptive_verification,
            req_states=req_states,
            query_start_loc=query_start_loc,
            max_total_logits=max_total_logits,
            vllm_config=vllm_config,
            **others,
        )

    return maybe_create_adaptive_verification_manager


def _any_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    def resolve_adaptive_cudagraph_mode(mode: Any, **others: Any) -> Any:
        # Only a worker of our model is patched.
        return mode

    return resolve_adaptive_cudagraph_mode


def _unless_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    def _validate_adaptive_verification(self: Any) -> None:
        if not defaults.runs_our_model(self):
            original(self)

    return _validate_adaptive_verification


def _with_depth(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_speculative_config(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        depth = Settings.from_env().draft_tokens
        if depth is not None and defaults.ARCHITECTURE in target_model_config.architectures:
            _ask_for_drafts(self, depth)
        return original(self, target_model_config, target_parallel_config)

    return create_speculative_config


def _ask_for_drafts(arguments: Any, depth: int) -> None:
    """Put ``DEEPINFER_USE_NEXTN_DECODE`` into vLLM's arguments.

    Raises:
        SettingError: If these ask for another number.
    """
    asked = dict(arguments.speculative_config or {})
    given = asked.get("num_speculative_tokens", asked.get("num-speculative-tokens", arguments.spec_tokens))
    speculates = bool(asked) or (arguments.spec_method, arguments.spec_model, given) != (None, None, None)
    if given is None and speculates:
        # Without a number, vLLM takes the checkpoint's.
        given = "the checkpoint's number of" if depth == 0 else depth
    if given is not None and given != depth:
        raise SettingError(
            f"--speculative-config asks for {given} drafts and DEEPINFER_USE_NEXTN_DECODE for {depth}; "
            "set them alike or unset one"
        )
    if depth and arguments.spec_tokens is None:
        method = {} if arguments.spec_method else {"method": "dspark"}
        arguments.speculative_config = {**method, **asked, "num_speculative_tokens": depth}


def _with_other_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if speculative_config is None or not defaults.has_our_draft(speculative_config):
            original(self, speculative_config)

    return _validate_spec_decode


def _with_reason(original: Callable[..., Any]) -> Callable[..., Any]:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def get_model_path(model: Any, revision: str | None = None) -> Any:
        if resolve(str(model), os.environ.get(_FOLDER, "")) != str(model):
            # Nothing to look for: the folder takes its place when vLLM makes its model configuration.
            return model
        try:
            return original(model, revision)
        except LocalEntryNotFoundError as error:
            raise ValueError(
                f"{model} is not in the Hugging Face cache and HF_HUB_OFFLINE is set: unset it to download, or give "
                f"the checkpoint's folder as the model or in {_FOLDER}"
            ) from error

    return get_model_path


def _for_other_models(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.config import get_current_vllm_config_or_none

    def enable_batch_invariant_mode() -> None:
        # vLLM calls it while a worker starts, with that worker's configuration in force.
        config = get_current_vllm_config_or_none()
        if config is None or not defaults.runs_our_model(config):
            original()

    return enable_batch_invariant_mode


def _with_folder(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_model_config(self: Any) -> Any:
        asked = self.model
        self.model = resolve(asked, os.environ.get(_FOLDER, ""))
        if self.model != asked:
            self.served_model_name = self.served_model_name or asked
            if self.tokenizer in (None, asked):
                self.tokenizer = self.model
        return original(self)

    return create_model_config


def resolve(model: str, folder: str) -> str:
    """The folder to load when vLLM was asked for ``model`` and ``DEEPINFER_HF_MODEL_DIR`` is ``folder`` (empty: unset).

    Raises:
        SettingError: If the two name different folders, or ``folder`` is none.
    """
    if not folder:
        return model
    if os.path.isdir(model):
        if os.path.realpath(model) != os.path.realpath(folder):
            raise SettingError(
                f"--model {model} and DEEPINFER_HF_MODEL_DIR={folder} name different folders; unset one of them"
            )
        return model
    if not model.rpartition("/")[2].lower().startswith(_RELEASE):
        # Another model: the setting is not about it.
        return model
    if not os.path.isdir(folder):
        raise SettingError(
            f"DEEPINFER_HF_MODEL_DIR={folder}: there is no such folder; set it to the checkpoint's"
        )
    return folder
