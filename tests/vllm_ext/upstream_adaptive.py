"""vLLM's own tests of adaptive verification, on our manager in place of its own. Run by hand, on vLLM's source:

    pip download --no-deps --no-binary :all: vllm==0.33.0     # and unpack it
    VLLM_SOURCE=vllm-0.33.0 .venv/vllm/bin/python -P -m pytest tests/vllm_ext/upstream_adaptive.py

They build a manager from confidences and costs; here that is ``Budget``, which has recorded those confidences. Left
out, and why: ``test_resolve_adaptive_cudagraph_mode`` and ``test_manager_checks_target_varlen_cudagraph_bound`` are
about the function which makes vLLM's manager, and that one is not called;
``test_profiled_batches_seed_cost_curves_via_consumer`` is about times of batches that ours does not ask for.

The other file is about masks of drafts under a grammar. It asks for a model on a hub and for drafts from n-grams; here
it gets the checkpoint that ships and its draft.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoTokenizer
from vllm.config import ParallelConfig, SpeculativeConfig

from deepinfer_plugins.core.shipped import default_checkpoint
from deepinfer_plugins.features.cost_curve import CostCurve, CostModel
from deepinfer_plugins.features.schedule import VerificationSchedule
from deepinfer_plugins.vllm_ext.v0_33.deepseek_v41.budget import Budget


def _theirs(name: str) -> ModuleType:
    folder = os.environ.get("VLLM_SOURCE")
    if folder is None:
        pytest.skip("VLLM_SOURCE names no folder with vLLM's source", allow_module_level=True)
    spec = importlib.util.spec_from_file_location(name, Path(folder, "tests/v1/spec_decode", f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_manager(confidences: npt.NDArray[np.float32], verify_cost_ms: npt.NDArray[np.float64]) -> Any:
    """Ours, at the step after the one in which these confidences could first be used.

    Args:
        confidences: ``[requests, depth]``.
        verify_cost_ms: Of a step with so many rows.
    """
    num_requests, depth = confidences.shape
    # A step without rows is never asked for, and ours has no time for it.
    rows = tuple(range(1, len(verify_cost_ms)))
    curve = CostCurve(rows, tuple(float(verify_cost_ms[size]) for size in rows), padded=False)
    schedule = VerificationSchedule(num_requests, depth, CostModel(curve))
    slots = np.arange(num_requests)
    for _ in range(2):
        plan = schedule.plan(slots, np.zeros(num_requests, dtype=np.int64))
        schedule.record(slots, confidences, plan.step)
    req_states: Any = SimpleNamespace(
        req_id_to_index={"low": 0, "high": 1},
        num_computed_tokens_np=np.ones(num_requests, dtype=np.int32),
        prefill_len=SimpleNamespace(np=np.ones(num_requests, dtype=np.int32)),
        max_num_reqs=num_requests,
        device=torch.device("cpu"),
    )
    made: Any = Budget(req_states, torch.zeros(num_requests + 1, dtype=torch.int32), 1 << 30, schedule)
    # One of the tests reads it.
    made.num_speculative_steps = depth
    return made


def open_tokenizer(name: str) -> Any:
    """One that puts no token before a text, as theirs does not."""
    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    tokenizer.encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    return tokenizer


_adaptive = _theirs("test_adaptive_verification")
_adaptive.make_manager = make_manager
test_budget = _adaptive.test_budget_stops_where_marginal_drafts_stop_paying_for_themselves
test_compact_batch = _adaptive.test_compact_batch_preserves_totals_and_bounds
test_one_chunk_of_logits = _adaptive.test_budget_caps_at_one_rejection_sampler_chunk
test_no_budget = _adaptive.test_zero_budget_rebuilds_cpu_cu_num_logits

_grammars = _theirs("test_mtp_structured_output")
_grammars.TOKENIZER = str(default_checkpoint())
_grammars.AutoTokenizer = SimpleNamespace(from_pretrained=open_tokenizer)
_model_config = functools.partial(_grammars.ModelConfig, model=str(default_checkpoint()))
_grammars.ModelConfig = _model_config
_grammars.SpeculativeConfig = lambda model, num_speculative_tokens: SpeculativeConfig(
    method="dspark",
    num_speculative_tokens=num_speculative_tokens,
    target_model_config=_model_config(),
    target_parallel_config=ParallelConfig(),
)
test_accept_tokens = _grammars.test_xgrammar_accept_tokens_stops_at_termination
test_validate_tokens = _grammars.test_xgrammar_validate_tokens_stops_at_termination
test_masks = _grammars.test_bitmask_engine_reasoner_ends_midwindow_with_padding
