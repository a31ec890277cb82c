"""What is registered, when nothing is, and what is said then. ``test_doctor.py`` asks the engine itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugins.core import patch
from deepinfer_plugins.core.report import report
from deepinfer_plugins.core.settings import SettingError
from deepinfer_plugins.vllm_ext import entrypoints, versions
from deepinfer_plugins.vllm_ext.v0_33 import patches, seams

ARCHITECTURE = "DeepseekV41ForCausalLM"


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run some Python in a fresh process with our variables and no others of ours."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**environ, **variables}, timeout=300)


PLAIN = """
from deepinfer_plugins.core.report import report
from deepinfer_plugins.vllm_ext import entrypoints
print(entrypoints.platform())
entrypoints.register()
print(report().active)
"""

RENAMED = """
import sys
from deepinfer_plugins.core.report import report
from deepinfer_plugins.vllm_ext import entrypoints
from deepinfer_plugins.vllm_ext.v0_33 import seams
target = "vllm.v1.worker.gpu.states:RequestState.every_token_id"
seams.missing.__defaults__ = ((*seams.SEAMS, seams.Seam(target, "test")),)
print("platform", entrypoints.platform())
entrypoints.register()
entrypoints.register()
print("active", report().active, "vllm" in sys.modules, report().registered)
"""


def test_importing_and_declining_loads_neither_torch_nor_vllm() -> None:
    done = run(
        "import sys, deepinfer_plugins.vllm_ext.entrypoints; print({'torch', 'vllm'} & {*sys.modules})"
    )
    assert done.stdout.strip() == "set()", done.stderr


def test_a_renamed_target_registers_nothing_and_says_so_once() -> None:
    done = run(RENAMED)
    assert done.returncode == 0, done.stderr
    nothing = {"models": {}, "platforms": {}, "hooks": {}}
    assert done.stdout.splitlines() == ["platform None", f"active False False {nothing}"]
    assert done.stderr.count("RequestState.every_token_id") == 1


def test_strict_turns_that_into_an_exit() -> None:
    done = run(RENAMED, DEEPINFER_PLUGINS_STRICT="1")
    assert done.returncode == 1 and done.stdout == ""
    assert "RequestState.every_token_id" in done.stderr and "STRICT" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("DEEPINFER_PLUGINS_MODEL", "ours", "DEEPINFER_PLUGINS_MODEL='ours'"),
        (
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
            "compact",
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=compact",
        ),
        ("DEEPINFER_ACCELERATOR", "ascend", "DEEPINFER_ACCELERATOR=ascend"),
    ],
)
def test_settings_that_cannot_be_met(variable: str, value: str, said: str) -> None:
    done = run(PLAIN, **{variable: value})
    assert done.stdout.split() == ["None", "False"] and said in done.stderr, done.stderr


def test_native_leaves_the_engine_alone() -> None:
    done = run(PLAIN, DEEPINFER_PLUGINS_MODEL="native")
    assert done.stdout.split() == ["None", "False"] and done.stderr == ""


def test_registering_again_changes_nothing() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    entrypoints.register()
    once = dict(report().registered["models"])
    entrypoints.register()
    assert report().registered["models"] == once == patches.MODELS
    assert report().active and ModelRegistry.models[ARCHITECTURE].class_name == ARCHITECTURE
    assert f"{ModelRegistry.models[ARCHITECTURE].module_name}:{ARCHITECTURE}" == patches.MODELS[ARCHITECTURE]


def test_the_platform_is_ours_and_still_a_cpu() -> None:
    from vllm.platforms import current_platform

    assert type(current_platform).__module__.startswith("deepinfer_plugins.vllm_ext.")
    assert current_platform.is_cpu() or current_platform.is_cuda()


def test_every_seam_is_there() -> None:
    assert seams.missing() == []


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("vllm.v1.worker.gpu.no_such_module:thing", ()),
        ("vllm.v1.attention.backend:AttentionBackend.supported_layouts", ()),
        ("vllm.v1.kv_cache_interface:KVCacheSpec.copy_with_new_block_size", ("num_tokens",)),
    ],
)
def test_a_missing_seam_is_named(target: str, parameters: tuple[str, ...]) -> None:
    (why,) = seams.missing([seams.Seam(target, "hold the sky up", parameters)])
    assert target in why and "hold the sky up" in why and all(name in why for name in parameters)


def test_patches_point_at_something_and_say_why() -> None:
    for each in (*patches.PATCHES, *patches.ENGINE_PATCHES, *patches.WORKER_PATCHES):
        assert patch.check(each) == ""
        assert each.why and each.upstream and each.remove_when


def test_versions() -> None:
    assert versions.folder("0.33.0") == versions.folder("0.33.0+empty")
    with pytest.raises(versions.UnsupportedVersion, match="0.34.1.*0.33.0"):
        versions.folder("0.34.1")


def test_hf_model_dir_stands_in_for_the_release_only(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert patches.resolve("deepseek-ai/DeepSeek-V4.1-Flash-1017", folder) == folder
    assert patches.resolve("meta-llama/Llama-3.1-8B", folder) == "meta-llama/Llama-3.1-8B"
    assert patches.resolve(folder, folder) == patches.resolve(folder, "") == folder
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(SettingError, match="different folders"):
        patches.resolve(str(other), folder)
    with pytest.raises(SettingError, match="no such folder"):
        patches.resolve("deepseek-ai/DeepSeek-V4.1-Flash-1017", str(tmp_path / "absent"))


def test_hf_model_dir_reaches_the_engine(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    name = "deepseek-ai/DeepSeek-V4.1-Flash-1017"
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(small.folder))
    entrypoints.register()
    try:
        assert patches.LOCAL_FOLDER in patch.ledger()
        model = EngineArgs(model=name).create_model_config()
    finally:
        patch.revert(patches.LOCAL_FOLDER)
    assert (model.model, model.tokenizer, model.served_model_name) == (str(small.folder),) * 2 + (name,)
    assert model.tokenizer_mode == "deepseek_v41"


def test_offline_without_a_cached_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    code = "from vllm import LLM; LLM('deepseek-ai/DeepSeek-V4.1-Flash-1017')"
    done = run(code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode != 0
    assert "deepseek-ai/DeepSeek-V4.1-Flash-1017" in done.stderr and "HF_HUB_OFFLINE" in done.stderr


def configuration(**parallel: int) -> Any:
    """As much of vLLM's configuration as the defaults read and set."""
    from types import SimpleNamespace

    from vllm.config import CUDAGraphMode

    names = ("tensor", "pipeline", "data", "prefill_context", "decode_context")
    sizes = {f"{name}_parallel_size": parallel.get(name, 1) for name in names}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes, worker_cls="theirs"),
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        model_config=SimpleNamespace(
            dtype="torch.bfloat16", hf_overrides={}, return_sampling_mask=False, enable_trace_replay=False
        ),
        watermark_config=None,
        weight_transfer_config=None,
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        use_v2_model_runner=True,
    )


def test_what_is_not_there_yet_is_refused_by_its_flag() -> None:
    from vllm.config import CUDAGraphMode

    from deepinfer_plugins.vllm_ext.v0_33 import defaults

    for name in ("tensor", "pipeline", "data", "prefill_context", "decode_context"):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}-parallel-size 2"):
            defaults.apply(configuration(**{name: 2}))
    fine = configuration()
    defaults.apply(fine)
    assert fine.compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    for _ in range(2):
        defaults.set_worker(fine, "theirs", "ours")
        assert fine.parallel_config.worker_cls == "ours"
    fine.parallel_config.worker_cls = "somebody.Worker"
    with pytest.raises(ValueError, match="--worker-cls somebody.Worker"):
        defaults.set_worker(fine, "theirs", "ours")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"method": "ngram", "architectures": ["Other"]}, "method ngram.*method dspark"),
        ({"num_speculative_tokens": 9}, "num_speculative_tokens 9.*1 to 8"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method block.*DEEPINFER_PLUGINS_VERIFY"),
    ],
)
def test_speculation_that_is_not_ours_is_refused(asked: dict[str, Any], said: str) -> None:
    from types import SimpleNamespace

    from deepinfer_plugins.vllm_ext.v0_33 import defaults

    drafting = configuration()
    plain = {"method": "dspark", "num_speculative_tokens": 5, "rejection_sample_method": "standard"}
    architectures = asked.pop("architectures", ["DSparkV41DraftModel"])
    drafting.speculative_config = SimpleNamespace(
        draft_model_config=SimpleNamespace(architectures=architectures), **{**plain, **asked}
    )
    with pytest.raises(ValueError, match=said):
        defaults.apply(drafting)


REFUSED = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
for options in json.loads(sys.argv[1]):
    try:
        EngineArgs(model=sys.argv[2], **options).create_engine_config()
        print("accepted")
    except Exception as error:
        print(str(error).replace(chr(10), " "))
"""


def test_what_the_model_would_not_notice_is_refused(small: Any) -> None:
    """By vLLM itself, on the way that every start takes."""
    asked = {
        "--hf-overrides": {"hf_overrides": {"index_topk": 4}},
        "--dtype float16": {"dtype": "float16"},
        "--load-format dummy": {"load_format": "dummy"},
        "--kv-cache-dtype bfloat16": {"kv_cache_dtype": "bfloat16"},
    }
    done = run(REFUSED, json.dumps([{}, *asked.values()]), str(small.folder))
    accepted, *said = done.stdout.strip().splitlines()[-1 - len(asked) :]
    assert accepted == "accepted", done.stderr
    for flag, line in zip(asked, said, strict=True):
        assert flag in line and "DEEPINFER_PLUGINS_MODEL=native" in line, line
    done = run(REFUSED, json.dumps([{}]), str(small.folder), VLLM_USE_V2_MODEL_RUNNER="0")
    assert "V1 model runner" in done.stdout, done.stderr


NVIDIA = """
import sys, types
# vLLM's class loads a compiled extension that an installation for a CPU lacks.
sys.modules.setdefault("vllm._C_stable_libtorch", types.ModuleType("stand-in"))
from deepinfer_plugins.vllm_ext.v0_33.nvidia import DeepInferCudaPlatform
print(DeepInferCudaPlatform().is_cuda())
"""


def test_the_nvidia_platform_is_cuda_to_vllm() -> None:
    done = run(NVIDIA)
    assert done.stdout.strip().endswith("True"), done.stderr
