"""What a user asked for through the environment, typed and checked.

DeepInfer's documented variables keep their names and meanings. Ours start with ``DEEPINFER_PLUGINS_``.
A variable whose feature this version does not have is never ignored in silence: see
:attr:`Settings.problems` and :attr:`Settings.refusals`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

T = TypeVar("T")

PREFIX = "DEEPINFER_PLUGINS_"
STRICT = "DEEPINFER_PLUGINS_STRICT"
MODEL = "DEEPINFER_PLUGINS_MODEL"
VERIFY = "DEEPINFER_PLUGINS_VERIFY"
VERIFY_BUDGET = "DEEPINFER_PLUGINS_VERIFY_BUDGET"
COST_CURVE = "DEEPINFER_PLUGINS_COST_CURVE"
ACCEPTANCE_LOG = "DEEPINFER_PLUGINS_ACCEPTANCE_LOG"
# Of every operator that has one of the name; read by the kernels' registry.
PROVIDER = "DEEPINFER_PLUGINS_PROVIDER"
# The other variables with our prefix name a provider of one operator.
_OURS = (STRICT, MODEL, VERIFY, VERIFY_BUDGET, COST_CURVE, ACCEPTANCE_LOG, PROVIDER)

# Documented by DeepInfer, and nothing here reads them yet. Those of the first group alter what is
# generated, so starting without them would break a promise; the second only alters how fast.
_UNSUPPORTED_RESULT = ("DECODE_TOKEN_BLACKLIST", "ENGRAM_PAD_TOKEN", "SAMPLER_FORCE_TOPK")
_UNSUPPORTED_SPEED = (
    "COMPUTE_SUM_SMALLER_PROBS",
    "CUDAGRAPH_BATCH_SIZE_INTERVAL",
    "DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL",
    "DFLASH_ENFORCE_EAGER",
    "DISABLE_SYNC_GUARD",
    "ENABLE_MEMORY_TRACING",
    "ENFORCE_EAGER",
    "ENGRAM_FORCE_GPU_STORAGE",
    "EXPERT_COUNT_WINDOW_SIZE",
    "EXPERT_REARRANGEMENT_STEP_INTERVAL",
    "FORCE_IMBALANCE_RATIO",
    "FORCE_LOAD_BALANCE",
    "GC_INTERVAL_STEP",
    "GLOO_TIMEOUT",
    "INDEX_ATTN_MEMORY_LIMIT",
    "JIT_CACHE_DIR",
    "LOGGING_INTERVAL_STEP",
    "MAX_BACKTRACKING_TOKENS",
    "MOE_LB_STAT_INTERVAL",
    "NCCL_MEMORY_SAMPLE_INTERVAL_STEPS",
    "NCCL_NUM_SMS",
    "NUM_STATE_SLOTS_RATIO",
    "OVERRIDE_NUM_EXTRA_EXPERTS",
    "PREFILL_ANY_ATTEMPT_INTERVAL",
    "PREFILL_ATTEMPT_INTERVAL",
    "PREFILL_MAX_SUM_SEQLEN_K",
    "PREFILL_STORE_EXTRA_STATE",
    "PREFILL_STORE_EXTRA_STATE_SIZE",
    "PROFILE_TORCH_CUDA_MEMORY",
    "REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE",
    "REARRANGE_P2P_GROUPS",
    "RINGBUFFER_WARNING_INTERVAL",
    "SHOW_EPLB_DETAIL",
    "SO_BUILDER_CPUS",
    "USERBUFFER_COMM_SMS",
    "XGRAMMAR_CACHE_LIMIT_BYTES",
    "XGRAMMAR_DEBUG",
    "XGRAMMAR_DISABLE_CACHE",
    "XGRAMMAR_TIMEOUT",
    "ZERO_OVERHEAD_SCHEDULING",
)


class SettingError(ValueError):
    """A variable has a value that it can't have, or two places ask for different things."""


def _flag(name: str, value: str) -> bool:
    if value in ("", "0", "false", "False"):
        return False
    if value in ("1", "true", "True"):
        return True
    raise SettingError(
        f"{name}={value!r}: supported are 0, false, False or nothing (off) and 1, true, True (on)"
    )


def _one_of(*supported: str) -> Callable[[str, str], str]:
    def read(name: str, value: str) -> str:
        if value not in supported:
            raise SettingError(f"{name}={value!r}: supported are {', '.join(supported)}")
        return value

    return read


def _count(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise SettingError(f"{name}={value!r}: supported are whole numbers from 0 on")
    return int(value)


def _temperatures(name: str, value: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0.0 < number < float("inf") for number in numbers):
        raise SettingError(
            f"{name}={value!r}: supported are one positive number, or one per draft between commas"
        )
    return numbers


def _budget(name: str, value: str) -> str:
    kind, colon, seed = value.partition(":")
    if value not in ("auto", "all", "none") and not (kind == "random" and seed.isascii() and seed.isdigit()):
        raise SettingError(
            f"{name}={value!r}: supported are auto, all, none and random:<seed>, the seed a whole number"
        )
    return value


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting of the environment; None where nothing was asked for.

    Args:
        accelerator: ``DEEPINFER_ACCELERATOR``: ``"nvidia"``, ``"ascend"``, or ours,
            ``"cpu"``; None: as detected.
        hf_model_dir: ``DEEPINFER_HF_MODEL_DIR``: the checkpoint's folder.
        batch_invariant: ``DEEPINFER_BATCH_INVARIANT``.
        draft_tokens: ``DEEPINFER_USE_NEXTN_DECODE``: drafts per request; 0 for no drafting.
        varlen: ``DEEPINFER_ENABLE_MTP_VARLEN``: confidence-scheduled verification.
        confidence_temperatures: ``DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE``.
        truncation: ``DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE``: ``"off"``, ``"mask"`` or ``"compact"``.
        keep_tokens: ``DEEPINFER_YOCO_PREFILL_KEEP_TOKENS``.
        strict: ``DEEPINFER_PLUGINS_STRICT``: exit rather than let the engine run without us.
        model: ``DEEPINFER_PLUGINS_MODEL``: ``"auto"``, or ``"native"`` to leave the engine's own model.
        verify: ``DEEPINFER_PLUGINS_VERIFY``: ``"auto"``, ``"coupling"`` or ``"rejection"``.
        verify_budget: ``DEEPINFER_PLUGINS_VERIFY_BUDGET``: how many drafts a step verifies when verification is
            scheduled: ``"auto"``, ``"all"``, ``"none"`` or, for tests, ``"random:<seed>"``.
        cost_curve: ``DEEPINFER_PLUGINS_COST_CURVE``: a file with the time of a step by its rows, not to be measured.
        curve_cache: ``DEEPINFER_DECODE_PERF_CACHE_DIR``: where measured cost curves are kept between starts.
        curve_cache_ttl_s: ``DEEPINFER_DECODE_PERF_CACHE_TTL_SEC``: and how long, in seconds.
        acceptance_log: ``DEEPINFER_PLUGINS_ACCEPTANCE_LOG``: a file to write confidences and what became of drafts to.
        providers: ``DEEPINFER_PLUGINS_<OP>``, by operator in lower case.
        problems: Asked for, and without effect in this version; the results are the same.
        refusals: Asked for, not available, and the results would differ: reasons not to start.
    """

    accelerator: str | None = None
    hf_model_dir: str | None = None
    batch_invariant: bool | None = None
    draft_tokens: int | None = None
    varlen: bool | None = None
    confidence_temperatures: tuple[float, ...] | None = None
    truncation: str | None = None
    keep_tokens: int | None = None
    strict: bool = False
    model: str = "auto"
    verify: str = "auto"
    verify_budget: str = "auto"
    cost_curve: str | None = None
    curve_cache: str | None = None
    curve_cache_ttl_s: int = 3600
    acceptance_log: str | None = None
    providers: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the environment.

        Raises:
            SettingError: If a value is not supported; the message names variable, value and support.
        """
        environ = os.environ if environ is None else environ

        def read(name: str, parse: Callable[[str, str], T]) -> T | None:
            return parse(name, environ[name]) if name in environ else None

        ttl = read("DEEPINFER_DECODE_PERF_CACHE_TTL_SEC", _count)
        settings = cls(
            accelerator=read("DEEPINFER_ACCELERATOR", _one_of("nvidia", "ascend", "cpu")),
            hf_model_dir=environ.get("DEEPINFER_HF_MODEL_DIR") or None,
            batch_invariant=read("DEEPINFER_BATCH_INVARIANT", _flag),
            draft_tokens=read("DEEPINFER_USE_NEXTN_DECODE", _count),
            varlen=read("DEEPINFER_ENABLE_MTP_VARLEN", _flag),
            confidence_temperatures=read("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", _temperatures),
            truncation=read("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", _one_of("off", "mask", "compact")),
            keep_tokens=read("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", _count),
            strict=bool(read(STRICT, _flag)),
            model=read(MODEL, _one_of("auto", "native")) or "auto",
            verify=read(VERIFY, _one_of("auto", "coupling", "rejection")) or "auto",
            verify_budget=read(VERIFY_BUDGET, _budget) or "auto",
            cost_curve=environ.get(COST_CURVE) or None,
            curve_cache=environ.get("DEEPINFER_DECODE_PERF_CACHE_DIR") or None,
            curve_cache_ttl_s=3600 if ttl is None else ttl,
            acceptance_log=environ.get(ACCEPTANCE_LOG) or None,
            providers={
                name.removeprefix(PREFIX).lower(): value
                for name, value in environ.items()
                if name.startswith(PREFIX) and name not in _OURS and value
            },
        )
        problems, refusals = _not_built(settings, environ)
        return replace(settings, problems=problems, refusals=refusals)

    def unknown(self, operators: Iterable[str]) -> list[str]:
        """Problems: variables of ours that name neither a setting nor one of ``operators``."""
        known = {f"{PREFIX}{op.upper()}" for op in operators} | set(_OURS)
        found = []
        for op, value in self.providers.items():
            variable = f"{PREFIX}{op.upper()}"
            if variable not in known:
                near = difflib.get_close_matches(variable, sorted(known), n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
                found.append(f"{variable}={value}: no such setting; {hint}")
        return found


def _not_built(settings: Settings, environ: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is asked for and not in this version: without effect on results, and with."""
    problems, refusals = [], []
    unsupported = "set but not supported by this version"
    if settings.truncation in ("mask", "compact"):
        refusals.append(
            f"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE={settings.truncation}: {unsupported}, "
            "and it changes results; unset it or set it to off"
        )
    elif settings.keep_tokens:
        problems.append(
            f"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS={settings.keep_tokens}: {unsupported}; nothing is truncated"
        )
    for name in (f"DEEPINFER_{suffix}" for suffix in _UNSUPPORTED_RESULT):
        if environ.get(name):
            refusals.append(f"{name}={environ[name]}: {unsupported}, and it changes results; unset it")
    for name in (f"DEEPINFER_{suffix}" for suffix in _UNSUPPORTED_SPEED):
        if name in environ:
            problems.append(f"{name}={environ[name]}: {unsupported}; it has no effect")
    return tuple(problems), tuple(refusals)


def is_strict(environ: Mapping[str, str] | None = None) -> bool:
    """``DEEPINFER_PLUGINS_STRICT`` alone, for when the rest of the environment is in error.

    A value that can't be read counts as on: whoever set it wanted to hear of errors.
    """
    environ = os.environ if environ is None else environ
    return environ.get(STRICT, "") not in ("", "0", "false", "False")


def prefer(what: str, default: T, *asked: tuple[str, T | None]) -> T:
    """The value that was asked for, from places in order of precedence.

    Args:
        what: The thing set, for the message.
        default: If nobody asked.
        asked: ``(place, value)``, e.g. ``("--enable-x", True), ("additional_config.x", None),
            ("DEEPINFER_X", None)``; None where the place says nothing.

    Raises:
        SettingError: If two places ask for different values; the message names both.
    """
    said = [(place, value) for place, value in asked if value is not None]
    if not said:
        return default
    first_place, first = said[0]
    for place, value in said[1:]:
        if value != first:
            raise SettingError(
                f"{what}: {first_place} asks for {first!r} and {place} for {value!r}; "
                "set them alike or unset one"
            )
    return first
