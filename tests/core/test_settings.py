"""Settings mean what DeepInfer's documentation says, and nothing asked for is ignored in silence."""

import re
import subprocess
import sys

import pytest

from deepinfer_plugins.core.settings import SettingError, Settings, is_strict, prefer


def test_nothing_set() -> None:
    settings = Settings.from_env({"PATH": "/bin", "VLLM_PLUGINS": ""})
    assert settings == Settings()
    assert settings.batch_invariant is None, "not set differs from set to off: an engine flag may decide"


@pytest.mark.parametrize(
    ("text", "value"), [("0", False), ("", False), ("false", False), ("False", False), ("1", True)]
)
def test_booleans_are_read_as_in_deepinfer(text: str, value: bool) -> None:
    assert Settings.from_env({"DEEPINFER_BATCH_INVARIANT": text}).batch_invariant is value


def test_every_documented_variable_is_read() -> None:
    settings = Settings.from_env(
        {
            "DEEPINFER_ACCELERATOR": "ascend",
            "DEEPINFER_HF_MODEL_DIR": "/models/flash",
            "DEEPINFER_BATCH_INVARIANT": "true",
            "DEEPINFER_USE_NEXTN_DECODE": "5",
            "DEEPINFER_ENABLE_MTP_VARLEN": "True",
            "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE": "1.0,0.5",
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "off",
            "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140",
            "DEEPINFER_PLUGINS_STRICT": "1",
            "DEEPINFER_PLUGINS_MODEL": "native",
            "DEEPINFER_PLUGINS_VERIFY": "coupling",
            "DEEPINFER_PLUGINS_VERIFY_BUDGET": "random:7",
            "DEEPINFER_PLUGINS_COST_CURVE": "/curves/mine.json",
            "DEEPINFER_PLUGINS_ACCEPTANCE_LOG": "/logs/acceptance.jsonl",
            "DEEPINFER_DECODE_PERF_CACHE_DIR": "/curves",
            "DEEPINFER_DECODE_PERF_CACHE_TTL_SEC": "60",
            "DEEPINFER_PLUGINS_RMS_NORM": "torch",
        }
    )
    assert (settings.accelerator, settings.hf_model_dir, settings.batch_invariant) == (
        "ascend",
        "/models/flash",
        True,
    )
    assert (settings.draft_tokens, settings.varlen, settings.confidence_temperatures) == (5, True, (1.0, 0.5))
    assert (settings.truncation, settings.keep_tokens) == ("off", 140)
    assert (settings.verify, settings.verify_budget) == ("coupling", "random:7")
    assert (settings.cost_curve, settings.acceptance_log) == (
        "/curves/mine.json",
        "/logs/acceptance.jsonl",
    )
    assert (settings.curve_cache, settings.curve_cache_ttl_s) == ("/curves", 60)
    assert (settings.strict, settings.model, dict(settings.providers)) == (
        True,
        "native",
        {"rms_norm": "torch"},
    )


@pytest.mark.parametrize(
    ("name", "value", "supported"),
    [
        ("DEEPINFER_BATCH_INVARIANT", "no", "true"),
        ("DEEPINFER_BATCH_INVARIANT", "yes", "true"),
        ("DEEPINFER_ACCELERATOR", "amd", "nvidia, ascend, cpu"),
        ("DEEPINFER_USE_NEXTN_DECODE", "-1", "whole numbers"),
        ("DEEPINFER_USE_NEXTN_DECODE", "", "whole numbers"),
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "1.5", "whole numbers"),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,,2", "positive"),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "0", "positive"),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "nan", "positive"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "on", "off, mask, compact"),
        ("DEEPINFER_PLUGINS_STRICT", "2", "true"),
        ("DEEPINFER_PLUGINS_MODEL", "ours", "auto, native"),
        ("DEEPINFER_PLUGINS_VERIFY", "always", "auto, coupling, rejection"),
        ("DEEPINFER_PLUGINS_VERIFY_BUDGET", "some", "auto, all, none and random:<seed>"),
        ("DEEPINFER_PLUGINS_VERIFY_BUDGET", "random", "random:<seed>"),
        ("DEEPINFER_PLUGINS_VERIFY_BUDGET", "random:-1", "random:<seed>"),
        ("DEEPINFER_PLUGINS_VERIFY_BUDGET", "", "random:<seed>"),
        ("DEEPINFER_DECODE_PERF_CACHE_TTL_SEC", "1h", "whole numbers"),
    ],
)
def test_bad_value_names_variable_value_and_support(name: str, value: str, supported: str) -> None:
    with pytest.raises(SettingError, match=f"{name}={re.escape(repr(value))}.*{supported}"):
        Settings.from_env({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "140"),
        ("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "1"),
    ],
)
def test_without_effect_is_a_problem(name: str, value: str) -> None:
    settings = Settings.from_env({name: value})
    assert len(settings.problems) == 1 and name in settings.problems[0]
    assert "not supported by this version" in settings.problems[0]
    assert settings.refusals == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "mask"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "compact"),
        ("DEEPINFER_SAMPLER_FORCE_TOPK", "8"),
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "1..4"),
    ],
)
def test_other_results_are_a_reason_not_to_start(name: str, value: str) -> None:
    settings = Settings.from_env({name: value})
    assert len(settings.refusals) == 1 and f"{name}={value}" in settings.refusals[0]
    assert settings.problems == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEEPINFER_USE_NEXTN_DECODE", "0"),
        ("DEEPINFER_USE_NEXTN_DECODE", "5"),
        ("DEEPINFER_ENABLE_MTP_VARLEN", "1"),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "0.9"),
        ("DEEPINFER_DECODE_PERF_CACHE_DIR", "/curves"),
        ("DEEPINFER_PLUGINS_VERIFY_BUDGET", "none"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "off"),
    ],
)
def test_what_is_supported_is_no_problem(name: str, value: str) -> None:
    settings = Settings.from_env({name: value})
    assert settings.problems == settings.refusals == ()


def test_typo_is_found_and_corrected() -> None:
    settings = Settings.from_env({"DEEPINFER_PLUGINS_STRCT": "1", "DEEPINFER_PLUGINS_RMS_NORM": "torch"})
    (problem,) = settings.unknown(["rms_norm", "rope"])
    assert "DEEPINFER_PLUGINS_STRCT=1" in problem and "did you mean DEEPINFER_PLUGINS_STRICT?" in problem


@pytest.mark.parametrize(("value", "strict"), [("1", True), ("maybe", True), ("0", False), ("", False)])
def test_strict_alone(value: str, strict: bool) -> None:
    assert is_strict({"DEEPINFER_PLUGINS_STRICT": value}) is strict


def test_strict_is_off_by_default() -> None:
    assert not is_strict({})


def test_first_place_that_says_something_decides() -> None:
    assert prefer("x", 1, ("--x", None), ("config.x", None), ("X", None)) == 1
    assert prefer("x", 1, ("--x", None), ("config.x", None), ("X", 3)) == 3
    assert prefer("x", 1, ("--x", None), ("config.x", 0), ("X", 0)) == 0


def test_contradiction_names_both() -> None:
    with pytest.raises(
        SettingError, match=r"batch invariance: --flag asks for False and DEEPINFER_X for True"
    ):
        prefer("batch invariance", False, ("--flag", False), ("config.x", None), ("DEEPINFER_X", True))


@pytest.mark.parametrize("module", ["patch", "report", "settings", "target"])
def test_core_imports_no_torch(module: str) -> None:
    code = f"import sys, deepinfer_plugins.core.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
