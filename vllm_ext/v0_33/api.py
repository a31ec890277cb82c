"""Names of vLLM 0.33.0 that the model's adapter is written against, imported once.

A release that moves one of them needs a change here and in ``seams.py``, nowhere else.
"""

from vllm import __version__ as VERSION
from vllm import envs
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

__all__ = [
    "VERSION",
    "AdaptiveVerificationManager",
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionLayerBase",
    "AttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "DefaultModelState",
    "DraftModelSpeculator",
    "GPUModelRunner",
    "InputBatch",
    "KVCacheGroupSpec",
    "KVCacheLayout",
    "KVCacheSpec",
    "LogitsContext",
    "MLAAttentionSpec",
    "MultipleOf",
    "NewRequestData",
    "RequestState",
    "Sampler",
    "SamplerOutput",
    "SlidingWindowMLASpec",
    "UniformTypeKVCacheSpecs",
    "VllmConfig",
    "compute_topk_scores",
    "current_platform",
    "download_weights_from_hf",
    "envs",
    "get_forward_context",
    "get_num_nans",
    "get_num_sampled_and_rejected",
]
