"""What SGLang's two plugin loaders get from us, in each situation a process can be in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_plugins.sglang_ext.v0_5_23 import seams

Environment = Callable[..., dict[str, str]]


def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def answer(code: str, environment: dict[str, str]) -> Any:
    """What ``code`` printed last, as JSON."""
    done = run(code, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


# What every process of the engine does: resolve the platform, load the plugins, look up the model.
LOAD = """
import json, logging
logging.basicConfig(level="WARNING")
import sglang.srt.platforms as platforms
platform = type(platforms.current_platform)
from sglang.srt.plugins import load_plugins
load_plugins()
from deepinfer_plugins.core.report import report
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
model = ModelRegistry.models.get("DeepseekV4ForCausalLM")
print(json.dumps({
    "platform": platform.__module__ + ":" + platform.__name__,
    "model": model and model.__module__,
    "backends": ATTENTION_BACKEND_CHOICES.count("deepinfer"),
    "report": report().as_dict(),
}))
"""
BREAK = """
from deepinfer_plugins.sglang_ext.v0_5_23 import seams
seams.SEAMS["sglang.srt.server_args:Renamed.away"] = ()
"""


def test_entry_points_import_neither_torch_nor_sglang(engine_environment: Environment) -> None:
    code = (
        "import json, sys\nfrom deepinfer_plugins.sglang_ext import entrypoints\nplatform = entrypoints.platform()\n"
        "print(json.dumps([platform, sorted({'torch', 'sglang'} & set(sys.modules))]))"
    )
    platform, imported = answer(code, engine_environment(CUDA_VISIBLE_DEVICES=""))
    assert platform == "deepinfer_plugins.sglang_ext.platforms:CpuPlatform"
    assert imported == []


def test_normal_and_again(engine_environment: Environment) -> None:
    again = LOAD.replace(
        "load_plugins()\n",
        "load_plugins()\n"
        "from deepinfer_plugins.sglang_ext import entrypoints\n"
        "from sglang.srt.arg_groups import resolution_hooks\n"
        "before = {name: list(hooks) for name, hooks in resolution_hooks._HOOKS.items()}\n"
        "entrypoints.register(); entrypoints.platform(); entrypoints.register()\n"
        "assert before == resolution_hooks._HOOKS\n",
    )
    found = answer(again, engine_environment(CUDA_VISIBLE_DEVICES=""))
    assert found["platform"] == "deepinfer_plugins.sglang_ext.platforms:CpuPlatform"
    assert found["model"] == "deepinfer_plugins.sglang_ext.models.deepseek_v4"
    assert found["backends"] == 1
    assert found["report"]["active"] and found["report"]["problems"] == []
    assert found["report"]["registered"]["models"] == {
        "DeepseekV4ForCausalLM": "deepinfer_plugins.sglang_ext.models.deepseek_v4:DeepseekV4ForCausalLM"
    }


def test_not_among_the_allowed_plugins(engine_environment: Environment) -> None:
    """SGLang then asks us for no platform either. An empty variable, though, allows every plugin."""
    found = answer(LOAD, engine_environment(SGLANG_PLUGINS="another", SGLANG_EXTERNAL_MODEL_PACKAGE="json"))
    assert found["report"]["engine"] == "" and not found["report"]["active"]
    assert found["platform"].startswith("sglang.")


# Without SGLang imported, what our entry points do by themselves.
ALONE = """
import json, os
from deepinfer_plugins.core.report import report
from deepinfer_plugins.sglang_ext import entrypoints
platform = entrypoints.platform()
entrypoints.register()
print(json.dumps([platform, report().as_dict(), os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE")]))
"""


def test_native_model_is_left_alone(engine_environment: Environment) -> None:
    platform, found, package = answer(ALONE, engine_environment(DEEPINFER_PLUGINS_MODEL="native"))
    assert platform is None and package is None
    assert not found["active"] and found["problems"] == []


def test_renamed_seam_is_declined_with_its_name(engine_environment: Environment) -> None:
    platform, found, package = answer(BREAK + ALONE, engine_environment(DEEPINFER_PLUGINS_STRICT="0"))
    assert package is None
    assert platform is None and not found["active"] and found["registered"]["hooks"] == {}
    assert found["problems"] == [
        "SGLang has no sglang.srt.server_args:Renamed.away; it was renamed or removed"
    ]


def test_strict_makes_a_renamed_seam_an_exit(engine_environment: Environment) -> None:
    """SGLang swallows what a plugin raises, but not this."""
    load = "from sglang.srt.plugins import load_plugins\nload_plugins()\nprint('went on')"
    done = run(BREAK + load, engine_environment())
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "Renamed.away" in done.stderr and "DEEPINFER_PLUGINS_STRICT" in done.stderr


def test_every_seam_is_where_it_was() -> None:
    assert seams.missing() == []


@pytest.mark.parametrize(
    ("seam", "parameters", "why"),
    [
        ("sglang.srt.no_such_module:name", (), "no module"),
        ("sglang.srt.layers.logits_processor:LogitsProcessor.backward", (), "renamed or removed"),
        ("sglang.srt.layers.logits_processor:LogitsProcessor.forward", ("logits",), "no parameter logits"),
    ],
)
def test_a_changed_seam_is_named(seam: str, parameters: tuple[str, ...], why: str) -> None:
    assert why in seams.why_missing(seam, parameters)
