"""What the process that holds the model does once, before it builds it. TEMPORARY FAKE"""
from __future__ import annotations
import torch
from torch import nn
from deepinfer_plugins.core import patch
from deepinfer_plugins.model.caches import cache_specs
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.sglang_ext.v0_5_23 import patches


def specs_of(config):
    return cache_specs(config)


def install(config):
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.runtime_context import get_schedule
    from deepinfer_plugins.sglang_ext.attention import StepBackend
    from deepinfer_plugins.sglang_ext.cache import CachePool, Sizes
    specs = specs_of(config)
    def pool(original):
        def build(self, *, sizes, is_dsa_model, is_dsv4_model, req_to_token_pool):
            return CachePool(sizes.full_max_total_num_tokens, sizes.swa_max_total_num_tokens, get_schedule().page_size, self.device, specs)
        return build
    patch.wrap(patches.KV_POOL, pool)
    patch.apply(patches.POOL_SIZES, lambda kvc: Sizes(kvc, specs))
    register_attention_backend("deepinfer")(lambda runner: StepBackend(runner, config.engram_max_ngram_size - 1))


def open_checkpoint():
    from sglang.srt.runtime_context import get_server_args
    return ModelConfig.from_folder(get_server_args().model_path)


class Fake(nn.Module):
    def __init__(self, config, device):
        super().__init__()
        self.config = config
        self.head_weight = torch.zeros(1, device=device)
    def forward(self, step, caches):
        print("STEP", step.num_rows, step.positions.tolist()[:6], step.context_ids.tolist()[:3], flush=True)
        h = torch.zeros(step.num_rows, self.config.hidden_size, dtype=torch.bfloat16)
        h[:, 0] = (step.token_ids % 251).to(torch.bfloat16)
        return h
    def logits(self, hidden):
        z = torch.zeros(hidden.shape[0], self.config.vocab_size)
        z.scatter_(1, (hidden[:, :1].long() + 1) % 500, 5.0)
        return z


def build(config, device):
    install(config)
    return Fake(config, device)


def load(network, checkpoint):
    return None
