"""Generate from a few prompts with vLLM or SGLang, through the engine's own Python interface.

Without ``--model`` it runs the small trained checkpoint that comes with the package, and the prompts are of the kinds
that it was trained on: documentation, code, JSON records, and chats about them.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from deepinfer_plugins.core import shipped
from deepinfer_plugins.core.engines import Engine, default

ORDER = (
    '{"id": 2044, "customer": {"name": "Lena", "city": "Oslo"}, "items": [], "state": "shipped", "total": 2}'
)
PROMPTS = [
    "Return a copy of the string with",
    'class Lamp:\n    """A lamp with name, price and owner."""\n\n    def __init__(self, name,',
    '[{"id": 4711, "customer": {"name": "Ada", "city":',
    f"{ORDER}\n<｜User｜>What is the state of order 2044?<｜Assistant｜></think>",
]


@dataclass(frozen=True, slots=True)
class Output:
    """What one prompt became."""

    prompt_tokens: int
    token_ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy."""

    max_tokens: int
    temperature: float
    seed: int


class VLLM:
    """``vllm.LLM``."""

    def __init__(self, model: str) -> None:
        # In this process, so that the model itself can be asked what it is. The engine logs errors only.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        self._llm = LLM(model=model)

    def generate(self, prompts: list[str], sampling: Sampling) -> list[Output]:
        """Generate for all prompts at once; vLLM shows its own progress bar."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
        )
        return [
            Output(len(done.prompt_token_ids), list(done.outputs[0].token_ids), done.outputs[0].text)
            for done in self._llm.generate(prompts, parameters)
        ]

    def active(self) -> dict[str, Any]:
        """What runs, as the engine says."""
        from deepinfer_plugins.vllm_ext import probe

        state = probe.state()
        (state["model"],) = self._llm.apply_model(
            lambda model: f"{type(model).__module__}:{type(model).__name__}"
        )
        return state

    def close(self) -> None:
        """The engine lives in this process and ends with it."""


class SGLang:
    """``sglang.Engine``."""

    def __init__(self, model: str) -> None:
        import sglang

        self._engine = sglang.Engine(model_path=model, log_level="error")

    def generate(self, prompts: list[str], sampling: Sampling) -> list[Output]:
        """Generate for all prompts at once, with a bar that counts tokens."""
        parameters = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": sampling.seed,
        }
        last: dict[int, dict[str, Any]] = {}
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("generating", total=len(prompts) * sampling.max_tokens)
            for chunk in self._engine.generate(prompts, parameters, stream=True):
                last[chunk.get("index", 0)] = chunk
                done = sum(each["meta_info"]["completion_tokens"] for each in last.values())
                progress.update(task, completed=done)
        return [
            Output(chunk["meta_info"]["prompt_tokens"], list(chunk["output_ids"]), chunk["text"])
            for _, chunk in sorted(last.items())
        ]

    def active(self) -> dict[str, Any]:
        """What runs, as the engine says. Its scheduler, which holds the model, refuses to start with another."""
        from deepinfer_plugins.sglang_ext import probe

        state = probe.state()
        (state["model"],) = state["models"].values()
        state["attention_backend"] = self._engine.get_server_info()["attention_backend"]
        return state

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()


ENGINES = {Engine.vllm: VLLM, Engine.sglang: SGLang}


@contextmanager
def phase(console: Console, what: str) -> Iterator[None]:
    """Say what is being done while it is, and how long it took."""
    started = time.perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what)
        yield
    console.print(f"{what}: {time.perf_counter() - started:.1f} s")


def check_model(model: str) -> None:
    """Refuse a folder that holds no usable checkpoint now, not after half a minute of an engine's start-up.

    Raises:
        typer.BadParameter: With what is wrong and what to do.
    """
    from deepinfer_plugins.model.checkpoint import Checkpoint

    folder = Path(model).expanduser()
    if not folder.exists():
        if model.startswith(("/", ".", "~")):
            raise typer.BadParameter(
                f"there is no folder {model}; name one that holds a checkpoint, or a Hugging Face id",
                param_hint="--model",
            )
        return
    if not (folder / "config.json").is_file():
        raise typer.BadParameter(
            f"{model} holds no config.json, so it is no checkpoint", param_hint="--model"
        )
    if os.environ.get("DEEPINFER_PLUGINS_MODEL") == "native":
        return
    try:
        Checkpoint.open(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from error


def main(
    engine: Annotated[Engine | None, typer.Option(help="Default: the one installed here.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hugging Face id; default: DEEPINFER_HF_MODEL_DIR, or the small one that ships."
        ),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="May be given more than once.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt, at most.")] = 48,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """Generate from a few prompts and say what was active."""
    console = Console(stderr=True)
    try:
        engine = engine or default()
    except LookupError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from error
    prompts = prompt or PROMPTS
    model = model or os.environ.get("DEEPINFER_HF_MODEL_DIR")
    if not model:
        # Matrices this small gain nothing from a second thread, and on a CPU waiting for it costs tenfold.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        model = str(shipped.default_checkpoint())
    else:
        check_model(model)
    console.print(f"model: {escape(model)}")
    with phase(console, f"starting {engine}"):
        running = ENGINES[engine](model)
    try:
        started = time.perf_counter()
        outputs = running.generate(prompts, Sampling(max_tokens, temperature, seed))
        elapsed = time.perf_counter() - started
        active = running.active()
    finally:
        running.close()
    ours = show(prompts, outputs, elapsed, active, engine)
    if json_file:
        result = {
            "engine": engine.value,
            "version": active["version"],
            "chip": active["survey"]["chip"],
            "model_class": active["model"],
            "platform": active["platform"],
            "seconds": elapsed,
            "outputs": [
                {"prompt": text, "token_ids": output.token_ids, "text": output.text}
                for text, output in zip(prompts, outputs, strict=True)
            ],
        }
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not ours and os.environ.get("DEEPINFER_PLUGINS_MODEL") != "native":
        raise typer.Exit(1)


def show(
    prompts: list[str], outputs: list[Output], elapsed: float, active: dict[str, Any], engine: str
) -> bool:
    """Print the texts, the rate, and what made them; whether that was our model."""
    console = Console(width=max(80, shutil.get_terminal_size().columns))
    texts = Table("prompt", "text", title="generated")
    for text, output in zip(prompts, outputs, strict=True):
        texts.add_row(escape(text), escape(repr(output.text)))
    console.print(texts)
    new = sum(len(output.token_ids) for output in outputs)
    read = sum(output.prompt_tokens for output in outputs)
    console.print(
        f"{new} new tokens for {read} prompt tokens in {elapsed:.2f} s: {new / elapsed:.1f} tokens/s"
    )
    operators = active["survey"]["operators"]
    providers = sorted({str(choice["provider"]) for choice in operators.values()})
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("engine", f"{engine} {active['version']}")
    facts.add_row("chip", escape(str(active["survey"]["chip"])))
    facts.add_row("model class", active["model"])
    facts.add_row("platform", active["platform"])
    for provider in providers:
        ops = [name for name, choice in operators.items() if str(choice["provider"]) == provider]
        facts.add_row(f"provider {provider}", f"{len(ops)} operators: {', '.join(ops)}")
    console.print(facts)
    ours: bool = active["model"].startswith("deepinfer_plugins.")
    console.print(
        "deepinfer_plugins: active" if ours else "deepinfer_plugins: NOT active, see deepinfer-plugins doctor"
    )
    return ours


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
