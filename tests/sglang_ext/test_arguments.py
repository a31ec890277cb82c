"""What SGLang's arguments become for our model, and which are refused with what words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# One process resolves every case: importing SGLang is what takes the time.
RESOLVE = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import ServerArgs
FIELDS = ("speculative_algorithm", "speculative_num_draft_tokens",
          "model_path", "tokenizer_path", "device", "attention_backend", "page_size", "sampling_backend",
          "max_running_requests", "language_model_only",
          "enable_decoder_swa_bounded_replay", "disable_overlap_schedule", "disable_radix_cache")
found = {}
for name, given in json.loads(sys.argv[1]).items():
    variables = given.pop("environ", {})
    os.environ.update(variables)
    try:
        arguments = ServerArgs(**given)
        arguments.resolve_once()
        view = resolved_view(arguments)
        found[name] = {field: getattr(view, field) for field in FIELDS}
        graphs = view.cuda_graph_config
        found[name]["graphs"] = [str(graphs.decode.backend), str(graphs.prefill.backend)]
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
    for name in variables:
        del os.environ[name]
print(json.dumps(found))
"""
RELEASE = "deepseek-ai/DeepSeek-V4.1-Flash-1017"
REFUSED = {
    "chunk of half a page": ({"chunked_prefill_size": 32}, "--chunked-prefill-size 32"),
    "chunk of a page and a half": ({"page_size": 2, "chunked_prefill_size": 63}, "--chunked-prefill-size 63"),
    "two ranks": ({"tp_size": 2}, "--tp-size 2"),
    "another draft": ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM"),
    "nine drafts": (
        {"speculative_algorithm": "DSPARK", "speculative_dspark_block_size": 9},
        "--speculative-dspark-block-size 9: it must be from 1 to 8",
    ),
    "drafts and none": (
        {"speculative_algorithm": "DSPARK", "environ": {"DEEPINFER_USE_NEXTN_DECODE": "0"}},
        "--speculative-algorithm DSPARK and DEEPINFER_USE_NEXTN_DECODE=0",
    ),
    "four drafts and three": (
        {"speculative_num_draft_tokens": 5, "environ": {"DEEPINFER_USE_NEXTN_DECODE": "3"}},
        "--speculative-num-draft-tokens, less one, asks for 4 and DEEPINFER_USE_NEXTN_DECODE for 3",
    ),
    "another folder's draft": (
        {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": "/"},
        "--speculative-draft-model-path /",
    ),
    "blocks": (
        {
            "speculative_algorithm": "DSPARK",
            "speculative_use_block_verification": True,
        },
        "--speculative-use-block-verification",
    ),
    "a schedule and none": (
        {
            "speculative_algorithm": "DSPARK",
            "environ": {"DEEPINFER_ENABLE_MTP_VARLEN": "1", "SGLANG_RAGGED_VERIFY_MODE": "static"},
        },
        "SGLANG_RAGGED_VERIFY_MODE asks for False and DEEPINFER_ENABLE_MTP_VARLEN for True",
    ),
    "capped acceptance": (
        {"speculative_algorithm": "DSPARK", "environ": {"SGLANG_RAGGED_VERIFY_MODE": "cap-accept"}},
        "SGLANG_RAGGED_VERIFY_MODE=cap-accept",
    ),
    "another backend": ({"attention_backend": "torch_native"}, "--attention-backend torch_native"),
    "another dtype": ({"dtype": "float16"}, "--dtype float16"),
    "another cache": ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16"),
    "another model": ({"json_model_override_args": '{"index_topk": 4}'}, "--json-model-override-args"),
    "random weights": ({"load_format": "dummy"}, "--load-format dummy"),
    "another folder": (
        {"environ": {"DEEPINFER_HF_MODEL_DIR": "/"}},
        "DEEPINFER_HF_MODEL_DIR=/ name different folders",
    ),
    "an id for no folder": (
        {"model_path": RELEASE, "environ": {"DEEPINFER_HF_MODEL_DIR": "/no/such"}},
        "DEEPINFER_HF_MODEL_DIR=/no/such: there is no such folder",
    ),
    "an id that is not cached": ({"model_path": RELEASE}, f"{RELEASE} is not in the Hugging Face cache"),
}


@pytest.fixture(scope="module")
def resolved(checkpoint: Path, engine_environment: Any) -> dict[str, Any]:
    by_id = {"DEEPINFER_HF_MODEL_DIR": str(checkpoint)}
    cases: dict[str, dict[str, Any]] = {
        "defaults": {},
        "asked": {"page_size": 1, "max_running_requests": 3, "disable_overlap_schedule": True},
        "five drafts": {"speculative_algorithm": "DSPARK", "speculative_dspark_block_size": 5},
        "five drafts by variable": {"environ": {"DEEPINFER_USE_NEXTN_DECODE": "5"}},
        "no drafts by variable": {"environ": {"DEEPINFER_USE_NEXTN_DECODE": "0"}},
        "by id": {"model_path": RELEASE, "environ": by_id},
        "by the id of a copy": {
            "model_path": "mirror/DeepSeek-V4.1-Flash",
            "environ": {"DEEPINFER_HF_MODEL_DIR": str(checkpoint)},
        },
        **{name: given for name, (given, _) in REFUSED.items()},
    }
    whole = {name: {"model_path": str(checkpoint), **given} for name, given in cases.items()}
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(whole)],
        env=engine_environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_defaults(resolved: dict[str, Any], checkpoint: Path) -> None:
    assert resolved["defaults"] == {
        "speculative_algorithm": None,
        "speculative_num_draft_tokens": None,
        "model_path": str(checkpoint),
        "tokenizer_path": str(checkpoint),
        "device": "cpu",
        "attention_backend": "deepinfer",
        "page_size": 64,
        "sampling_backend": "pytorch",
        "max_running_requests": 32,
        "language_model_only": True,
        "enable_decoder_swa_bounded_replay": False,
        "disable_overlap_schedule": False,
        "disable_radix_cache": False,
        "graphs": ["disabled", "disabled"],
    }


def test_what_the_user_asks_for_stays(resolved: dict[str, Any]) -> None:
    asked = resolved["asked"]
    assert (
        asked["page_size"] == 1 and asked["max_running_requests"] == 3 and asked["disable_overlap_schedule"]
    )


def test_folder_for_an_id(resolved: dict[str, Any]) -> None:
    assert resolved["by id"] == resolved["by the id of a copy"] == resolved["defaults"]


def test_drafts(resolved: dict[str, Any]) -> None:
    """By SGLang's flags or DeepInfer's variable; nothing else changes, the device least of all."""
    drafting = {"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": 6}
    assert resolved["five drafts"] == {**resolved["defaults"], **drafting}
    assert resolved["five drafts by variable"] == resolved["five drafts"]
    assert resolved["no drafts by variable"] == resolved["defaults"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(resolved: dict[str, Any], name: str) -> None:
    """With the flag as the user wrote it."""
    assert isinstance(resolved[name], str), resolved[name]
    assert REFUSED[name][1] in resolved[name]
