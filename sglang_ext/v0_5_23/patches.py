"""What we replace inside SGLang 0.5.23, and why."""

from __future__ import annotations

from deepinfer_plugins.core.patch import Patch

KV_POOL = Patch(
    target="sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._build_token_to_kv_pool",
    why=(
        "the pool of a DeepSeek-V4 architecture is built from CUDA-only classes with a layout that has no ratio 1 "
        "or 2 outside them, and a platform can only bring pools of the kinds mha, mla and dsa"
    ),
    upstream="none",
    remove_when="a platform's get_kv_pool_cls is asked for the kind dsv4",
    parameters=("self", "sizes", "is_dsv4_model", "req_to_token_pool"),
)
POOL_SIZES = Patch(
    target="sglang.srt.model_executor.pool_configurator:create_memory_pool_configurator",
    why="it sizes a DeepSeek-V4 architecture by the native pool's bytes and wants pages of a multiple of 128",
    upstream="none",
    remove_when="a KV pool class can bring its own MemoryPoolConfigurator",
    parameters=("kvc",),
)
PROMPT = Patch(
    target="sglang.srt.managers.scheduler:validate_input_length",
    why=(
        "SGLang checks the length of a prompt but not its ids: an empty prompt, or an id outside the vocabulary, would "
        "take the scheduler down and with it every other request, and so would embeddings in place of tokens"
    ),
    upstream="none",
    remove_when="SGLang refuses a prompt whose ids are not in [0, vocab_size)",
    parameters=("req", "max_req_input_len", "allow_auto_truncate"),
)

ADMIT = Patch(
    target="sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
    why=(
        "our sampler keeps each request's parameters and tokens on the device, and here a batch and its requests "
        "are at hand, on the stream that the batch runs on"
    ),
    upstream="none",
    remove_when="a sampler of register_sampler_backend is told which requests come and which rows are theirs",
    parameters=("self", "batch"),
)
SAMPLE = Patch(
    target="sglang.srt.model_executor.model_runner:ModelRunner.sample",
    why=(
        "SGLang heeds a request's seed in its deterministic mode only, and adds penalties and filters in another order "
        "and precision than vLLM does; ours makes a token a function of its logits, the request and its position"
    ),
    upstream="none",
    remove_when="a sampler of register_sampler_backend is told which requests come and which rows are theirs",
    parameters=("self", "logits_output", "forward_batch"),
)
SEED_REPORT = Patch(
    target=(
        "sglang.srt.managers.scheduler_components.output_streamer:"
        "SchedulerOutputStreamer.is_request_level_customized_info_key"
    ),
    why="a request's seed is reported once, and SGLang would look for one for every token",
    upstream="none",
    remove_when="SGLang reports the seed that a request was sampled with",
    parameters=("self", "key"),
)
PARAMETERS = Patch(
    target="sglang.srt.sampling.sampling_params:SamplingParams.verify",
    why=(
        "values that SGLang's own tensors cannot hold pass it, and take the scheduler down and with it every other "
        "request: stop tokens outside the vocabulary with min_new_tokens, a top_k or min_new_tokens of more than 32 "
        "bits or that is no whole number, a logit_bias that is no number"
    ),
    upstream="none",
    remove_when="SGLang refuses these",
    parameters=("self", "vocab_size"),
)
PARALLEL_SEEDS = Patch(
    target="sglang.srt.managers.tokenizer_manager:TokenizerManager._send_one_request",
    why="the n samples of a request with a seed would be n times the same",
    upstream="none",
    remove_when="SGLang gives each parallel sample a seed of its own",
    parameters=("self", "tokenized_obj"),
)
SEEDS_NOTED = Patch(
    target="sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request",
    why=(
        "a stream of OpenAI's interface is to name seeds, "
        "and only here it is seen what its choices' answers say of them"
    ),
    upstream="none",
    remove_when="SGLang reports the seed that a request was sampled with",
    parameters=("self", "obj"),
)
SEEDS_IN_COMPLETIONS = Patch(
    target=(
        "sglang.srt.entrypoints.openai.serving_completions:OpenAIServingCompletion._build_completion_response"
    ),
    why="an answer of OpenAI's interface is to name the seeds of its choices, and has no place for them",
    upstream="none",
    remove_when="SGLang reports the seed that a request was sampled with",
    parameters=("self", "request", "ret", "created"),
)
SEEDS_IN_CHATS = Patch(
    target="sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat._build_chat_response",
    why="the same of a chat",
    upstream="none",
    remove_when="SGLang reports the seed that a request was sampled with",
    parameters=("self", "request", "ret", "created"),
)
SEEDS_IN_STREAMS = Patch(
    target=(
        "sglang.srt.entrypoints.openai.serving_completions:"
        "OpenAIServingCompletion._generate_completion_stream"
    ),
    why="the same of a stream",
    upstream="none",
    remove_when="SGLang reports the seed that a request was sampled with",
    parameters=("self", "adapted_request"),
)
SEEDS_IN_STREAMED_CHATS = Patch(
    target="sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat._generate_chat_stream",
    why="the same of a chat's stream",
    upstream="none",
    remove_when="SGLang reports the seed that a request was sampled with",
    parameters=("self", "adapted_request"),
)
STOP_STRINGS = Patch(
    target="sglang.srt.managers.schedule_batch:Req._stop_match_tail_len",
    why=(
        "SGLang looks for a stop string in as many tokens as its own encoding has: one that was generated in more, "
        "smaller ones is found in a step that brings many tokens and missed in others"
    ),
    upstream="none",
    remove_when="whether SGLang finds a stop string does not depend on how many tokens a step brings",
    parameters=("self", "new_accepted_len"),
)
DRAFTING = Patch(
    target="sglang.srt.speculative.spec_info:SpeculativeAlgorithm.create_worker",
    why=(
        "SGLang's DSpark worker runs a second model over pools of its own by CUDA kernels, ignores seeds and can't "
        "trim its windows for this model; a platform may bring another worker only if it is not CUDA's"
    ),
    upstream="https://github.com/sgl-project/sglang/issues/39173",
    remove_when="any platform may name the worker of a speculative algorithm",
    parameters=("self", "server_args"),
)

GRAPHS = Patch(
    target="sglang.srt.model_executor.model_runner_components.cuda_graph_setup:capture_decode_graph",
    why="a graph of SGLang's holds batches of equal requests; ours hold any rows, prompts' and a schedule's too",
    upstream="none",
    remove_when="a platform's get_graph_runner_cls is asked on CUDA",
    parameters=("model_runner",),
)

ROW_WIDTH = Patch(
    target="sglang.srt.mem_cache.kv_cache_configurator:get_req_to_token_extra_context_len",
    why=(
        "with pages of one token, a row of the table of token slots is shorter than what a step with four or more "
        "drafts reserves at the end of the context"
    ),
    upstream="none",
    remove_when="SGLang makes rows for its reserve at every page size",
)

LAST_SLOTS = Patch(
    target="sglang.srt.mem_cache.allocation:get_last_loc",
    why="it runs a Triton kernel wherever the attention backend is none that SGLang knows, also on a CPU",
    upstream="none",
    remove_when="it asks the platform whether there is Triton",
    parameters=("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
)
ASSIGN_SLOTS = Patch(
    target="sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func",
    why="it runs a Triton kernel on every platform but SGLang's own CPU one, also on a CPU",
    upstream="none",
    remove_when="it asks the platform whether there is Triton",
    parameters=("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc"),
)

# Those from PARAMETERS to SEEDS_IN_STREAMED_CHATS are made in the process that takes requests, the others in the
# one that builds the model: from DRAFTING on only if it drafts, the last two on a CPU.
PATCHES: tuple[Patch, ...] = (
    KV_POOL,
    POOL_SIZES,
    PROMPT,
    ADMIT,
    SAMPLE,
    SEED_REPORT,
    PARAMETERS,
    PARALLEL_SEEDS,
    SEEDS_NOTED,
    SEEDS_IN_COMPLETIONS,
    SEEDS_IN_CHATS,
    SEEDS_IN_STREAMS,
    SEEDS_IN_STREAMED_CHATS,
    STOP_STRINGS,
    GRAPHS,
    DRAFTING,
    ROW_WIDTH,
    LAST_SLOTS,
    ASSIGN_SLOTS,
)
