"""What was asked for of drafting, by SGLang's flags and by DeepInfer's variables, as one answer.

Read twice: while SGLang resolves its arguments, and by the worker in the scheduler's process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer_plugins.core.settings import SettingError, Settings, prefer

ALGORITHM = "DSPARK"
MAX_DEPTH = 8
_RAGGED = "SGLANG_RAGGED_VERIFY_MODE"


def asked_fields(asked: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Fields of SGLang's arguments that the environment asks for.

    Args:
        asked: By field, what the user gave.
        settings: The environment.

    Raises:
        SettingError: If a flag asks for something else; the message names both.
    """
    depth, algorithm = settings.draft_tokens, asked["speculative_algorithm"]
    if depth is None:
        return {}
    variable = f"DEEPINFER_USE_NEXTN_DECODE={depth}"
    wanted = ALGORITHM if depth else None
    if algorithm is not None and algorithm.upper() != wanted:
        raise SettingError(
            f"--speculative-algorithm {algorithm} and {variable} ask for different things; set them alike or unset one"
        )
    if not depth:
        return {}
    window = asked["speculative_num_draft_tokens"]
    prefer(
        "drafts per request",
        depth,
        ("--speculative-dspark-block-size", asked["speculative_dspark_block_size"]),
        ("--speculative-num-draft-tokens, less one,", None if window is None else window - 1),
        ("DEEPINFER_USE_NEXTN_DECODE", depth),
    )
    return {"speculative_algorithm": ALGORITHM, "speculative_dspark_block_size": depth}


def check(cfg: Any, asked: Mapping[str, Any]) -> None:
    """Refuse what does not fit our drafting.

    Args:
        cfg: The configuration as resolved so far, with drafting on.
        asked: By field, what the user gave.

    Raises:
        ValueError: With the flags that are in the way.
    """
    draft = asked["speculative_draft_model_path"]
    refusals = [
        what
        for unsupported, what in (
            (
                draft not in (None, asked["model_path"]) and not _same_folder(draft, cfg.model_path),
                f"--speculative-draft-model-path {draft}: the checkpoint has its own draft layers",
            ),
            (
                cfg.speculative_use_block_verification,
                "--speculative-use-block-verification: see DEEPINFER_PLUGINS_VERIFY",
            ),
            (cfg.speculative_adaptive, "--speculative-adaptive: see DEEPINFER_ENABLE_MTP_VARLEN"),
            (
                cfg.enable_custom_logit_processor,
                "--enable-custom-logit-processor: such a processor can't follow drafts",
            ),
        )
        if unsupported
    ]
    if refusals:
        raise ValueError(
            f"deepinfer_plugins does not draft with {'; '.join(refusals)}. Leave that out, or --speculative-algorithm."
        )
    is_scheduled(Settings.from_env())


def check_depth(window: int) -> None:
    """Refuse what is too deep.

    Args:
        window: As SGLang counts: the last token and its drafts.

    Raises:
        ValueError: With the flag.
    """
    if not 1 <= window - 1 <= MAX_DEPTH:
        raise ValueError(f"--speculative-dspark-block-size {window - 1}: it must be from 1 to {MAX_DEPTH}")


def is_scheduled(settings: Settings, environ: Mapping[str, str] | None = None) -> bool:
    """Whether confidences decide how many drafts are verified.

    Raises:
        SettingError: If SGLang's variable and DeepInfer's ask for different things, or for what is not there.
    """
    value = (os.environ if environ is None else environ).get(_RAGGED)
    if value not in (None, "static", "compact"):
        raise SettingError(
            f"{_RAGGED}={value}: it would save no rows, and is not supported for this model; supported are static, "
            "to verify every draft, and compact, to verify as many as pay"
        )
    return prefer(
        "confidence-scheduled verification",
        False,
        (_RAGGED, None if value is None else value == "compact"),
        ("DEEPINFER_ENABLE_MTP_VARLEN", settings.varlen),
    )


def _same_folder(one: str, other: str) -> bool:
    return Path(one).is_dir() and Path(one).resolve() == Path(other).resolve()
