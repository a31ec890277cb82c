"""From vLLM's configuration to a checked checkpoint, and from that to the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepinfer_plugins.core.settings import Settings
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.checkpoint import Checkpoint
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.platforms import detect
from deepinfer_plugins.vllm_ext.v0_33 import api

if TYPE_CHECKING:
    from deepinfer_plugins.model.network import DeepseekV41

# Everything that the model reads: the tensors with their index, the configuration, the tokenizer (for n-grams).
_FILES = ["*.safetensors", "*.json"]


def find(vllm_config: api.VllmConfig) -> Checkpoint:
    """The checkpoint that vLLM was asked for, with its headers read and checked.

    A local folder is taken as it is; a Hugging Face id is fetched (or found in the cache) as vLLM does it.

    Raises:
        CheckpointError, ConfigError: With every problem found. No memory is allocated by then.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    folder = Path(model.model)
    if not folder.is_dir():
        folder = Path(api.download_weights_from_hf(model.model, load.download_dir, _FILES, model.revision))
    return Checkpoint.open(folder)


def build(checkpoint: Checkpoint, vllm_config: api.VllmConfig) -> DeepseekV41:
    """The model with its operators chosen and its weights not yet loaded."""
    from deepinfer_plugins.model.network import DeepseekV41

    name = "VLLM_BATCH_INVARIANT"
    flag = (name, bool(api.envs.VLLM_BATCH_INVARIANT) if api.envs.is_set(name) else None)
    depth = vllm_config.num_speculative_tokens
    return DeepseekV41(
        checkpoint.config,
        load_ops(detect.want(Settings.from_env(), flag=flag)),
        device=torch.device(vllm_config.device_config.device),
        # The last drafts of the longest request reach past its end.
        max_positions=vllm_config.model_config.max_model_len + depth,
        vocabulary=CompressedVocabulary.from_folder(checkpoint.folder, checkpoint.config.vocab_size),
        draft=depth > 0,
    )


def load(model: DeepseekV41, checkpoint: Checkpoint, progress: bool = False) -> None:
    """Stream the checkpoint's tensors into the model, with a bar over the bytes if ``progress``."""
    from deepinfer_plugins.model import loading

    loading.load(model, checkpoint, progress)
