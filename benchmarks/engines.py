"""How fast an engine starts, reads prompts and generates with our small model, beside its own Llama.

The rival is the engine's own ``LlamaForCausalLM`` with as many layers of the same width and the same
vocabulary and tokenizer, made here with random weights. It computes far less per token (no experts, no
index, no Engram, one stream instead of four), so its ratio says what the engine itself costs on this machine, and what
remains is ours.

Each model runs in a process of its own, one after the other, so that start-up is measured from nothing:

    .venv/vllm/bin/python benchmarks/engines.py --engine vllm --name cpu-vllm
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS, RIVAL = "ours", "llama"
MODEL_LENGTH = 2048


class EngineName(StrEnum):
    """The engines to choose from."""

    vllm = "vllm"
    sglang = "sglang"


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of each engine.

    Args:
        prompts: Prompts read at once, for the prefill rate.
        prompt_tokens: Length of each.
        batch: Requests generated at once, for the decode rate.
        new_tokens: Tokens generated for each.
        repeats: How often each is measured; medians are compared.
        seed: Of the prompts.
    """

    prompts: int
    prompt_tokens: int
    batch: int
    new_tokens: int
    repeats: int
    seed: int = 0


def write_llama(folder: Path, like: Path) -> None:
    """A random Llama with the width, depth, heads and vocabulary of the checkpoint ``like``."""
    import torch
    from safetensors.torch import save_file

    release = json.loads((like / "config.json").read_text(encoding="utf-8"))
    sizes = {**release, **release.get("text_config", {})}
    hidden, layers, vocab = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["vocab_size"]
    heads, head_dim = sizes["num_attention_heads"], sizes["head_dim"]
    # What a token sees of our experts: those chosen and the shared one.
    intermediate = sizes["moe_intermediate_size"] * (sizes["num_experts_per_tok"] + 1)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "max_position_embeddings": MODEL_LENGTH,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": sizes["bos_token_id"],
        "eos_token_id": sizes["eos_token_id"],
        "torch_dtype": "bfloat16",
    }
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(vocab, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": matrix(vocab, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        tensors[f"{prefix}post_attention_layernorm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{prefix}self_attn.{name}.weight"] = matrix(heads * head_dim, hidden)
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}mlp.{name}.weight"] = matrix(intermediate, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(hidden, intermediate)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(like / name, folder / name)


class VLLM:
    """``vllm.LLM`` in this process."""

    def __init__(self, model: Path, own: bool) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        options: dict[str, Any] = {}
        if own and on_cpu():
            # Built without compiled operators, as on a machine without their wheel, vLLM has one attention left.
            import rival_on_cpu

            options = rival_on_cpu.vllm_options()
        from vllm import LLM

        self._llm = LLM(model=str(model), enable_prefix_caching=False, max_model_len=MODEL_LENGTH, **options)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedily, exactly this many tokens each."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        return [
            list(done.outputs[0].token_ids) for done in self._llm.generate(asked, parameters, use_tqdm=False)
        ]

    def model_class(self) -> str:
        """The class that ran, asked of the model itself."""
        (name,) = self._llm.apply_model(lambda model: f"{type(model).__module__}:{type(model).__name__}")
        return str(name)

    def close(self) -> None:
        """The engine lives in this process and ends with it."""


class SGLang:
    """``sglang.Engine``, whose scheduler is a process of its own."""

    def __init__(self, model: Path, own: bool) -> None:
        if own and on_cpu():
            import rival_on_cpu

            options = rival_on_cpu.sglang_options()
        else:
            options = {}
        import sglang

        self._engine = sglang.Engine(
            model_path=str(model),
            log_level="error",
            disable_radix_cache=True,
            context_length=MODEL_LENGTH,
            **options,
        )
        architecture = json.loads((model / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        # SGLang renames this one while it reads the configuration.
        self._architecture = architecture.replace("DeepseekV41", "DeepseekV4")

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedily, exactly this many tokens each."""
        parameters = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        done = self._engine.generate(input_ids=prompts, sampling_params=parameters)
        return [list(each["output_ids"]) for each in done]

    def model_class(self) -> str:
        """The class that SGLang's registry has under the architecture's name."""
        from sglang.srt.models.registry import ModelRegistry

        found, _ = ModelRegistry.resolve_model_cls([self._architecture])
        return f"{found.__module__}:{found.__name__}"

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()


ENGINES = {EngineName.vllm: VLLM, EngineName.sglang: SGLang}


def on_cpu() -> bool:
    """Whether this process computes on a CPU."""
    from deepinfer_plugins.core.target import Arch
    from deepinfer_plugins.platforms.detect import detect

    return detect(os.environ.get("DEEPINFER_ACCELERATOR")).arch is Arch.CPU


def measure(engine: EngineName, model: Path, own: bool, load: Load, spawned_at: float) -> dict[str, Any]:
    """Everything about one model, in this fresh process.

    Args:
        spawned_at: ``time.time()`` when this process was asked for.

    Returns:
        ``startup_s``: until the engine takes requests. ``prefill_tokens_per_s``, ``decode_tokens_per_s`` (of
        the batch), ``decode_one_tokens_per_s`` (alone): one number per repeat.
    """
    import random

    running = ENGINES[engine](model, own)
    startup = time.time() - spawned_at
    draw = random.Random(load.seed)

    def prompts(count: int, length: int) -> list[list[int]]:
        # Ids in the middle of the small vocabulary: plain tokens, no special ones.
        return [[draw.randrange(300, 900) for _ in range(length)] for _ in range(count)]

    def seconds(asked: list[list[int]], new_tokens: int) -> float:
        started = time.perf_counter()
        tokens = running.generate(asked, new_tokens)
        elapsed = time.perf_counter() - started
        assert [len(ids) for ids in tokens] == [new_tokens] * len(asked), "the engine stopped early"
        return elapsed

    result: dict[str, Any] = {"startup_s": startup, "prefill_tokens_per_s": []}
    rates: dict[int, list[float]] = {load.batch: [], 1: []}
    # Once for what happens the first time only.
    seconds(prompts(load.prompts, load.prompt_tokens), 1)
    seconds(prompts(load.batch, 8), 2)
    for _ in range(load.repeats):
        read = seconds(prompts(load.prompts, load.prompt_tokens), 1)
        result["prefill_tokens_per_s"].append(load.prompts * load.prompt_tokens / read)
        for count, found in rates.items():
            asked = prompts(count, 8)
            # The first token comes out of the prefill; the others are what decoding adds to it.
            added = seconds(asked, 1 + load.new_tokens) - seconds(asked, 1)
            found.append(count * load.new_tokens / added)
    result["decode_tokens_per_s"], result["decode_one_tokens_per_s"] = rates[load.batch], rates[1]
    result["model_class"] = running.model_class()
    running.close()
    return result


def in_a_process(engine: EngineName, model: Path, own: bool, load: Load, folder: Path) -> dict[str, Any]:
    """:func:`measure`, in a process of its own."""
    answer = folder / f"{model.name}.json"
    request = {"model": str(model), "own": own, "load": asdict(load), "answer": str(answer)}
    request["spawned_at"] = time.time()
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--engine",
        engine.value,
        "--child",
        json.dumps(request),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return json.loads(answer.read_text(encoding="utf-8"))


def commit() -> str:
    """The commit measured, marked if files that count differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("-changed" if changed else "")


def versions(engine: EngineName) -> dict[str, str]:
    """Of all that the numbers depend on."""
    names = ("deepinfer-plugins", engine.value, "torch", "triton", "transformers")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


ROWS = {
    "start-up, s": ("startup_s", False),
    "prefill, tokens/s": ("prefill_tokens_per_s", True),
    "decode of a batch, tokens/s": ("decode_tokens_per_s", True),
    "decode of one, tokens/s": ("decode_one_tokens_per_s", True),
}


def middle(value: float | list[float]) -> float:
    """The median of repeats, or the one value there is."""
    return statistics.median(value) if isinstance(value, list) else value


def show(record: dict[str, Any]) -> None:
    """Print the comparison."""
    from rich.console import Console
    from rich.table import Table

    load = record["load"]
    table = Table("", "DeepSeek-V4.1 small (ours)", "Llama (the engine's own)", "ours / Llama")
    for title, (key, spread) in ROWS.items():
        cells, middles = [], []
        for model in (OURS, RIVAL):
            value = record["models"][model][key]
            middles.append(middle(value))
            around = f" ({min(value):.4g} to {max(value):.4g})" if spread and len(value) > 1 else ""
            cells.append(f"{middles[-1]:.4g}{around}")
        table.add_row(title, *cells, f"{middles[0] / middles[1]:.3g}")
    console = Console()
    console.print(f"{record['engine']} {record['versions'][record['engine']]} on {record['chip']}")
    console.print(
        f"prefill: {load['prompts']} prompts of {load['prompt_tokens']} tokens; decode: {load['new_tokens']} tokens, "
        f"batch of {load['batch']} and alone; medians of {load['repeats']}"
    )
    console.print(table)


def main(
    engine: Annotated[EngineName, typer.Option(help="Of this environment.")],
    name: Annotated[str, typer.Option(help="The result goes to benchmarks/results/NAME.json.")] = "",
    prompts: Annotated[int, typer.Option(min=1)] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=MODEL_LENGTH // 2)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    new_tokens: Annotated[int, typer.Option(min=1, max=MODEL_LENGTH // 2)] = 16,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure an engine with our small model and with its own Llama of the same width."""
    if child:
        request = json.loads(child)
        load = Load(**request["load"])
        result = measure(engine, Path(request["model"]), request["own"], load, request["spawned_at"])
        Path(request["answer"]).write_text(json.dumps(result), encoding="utf-8")
        return
    from rich.console import Console

    from deepinfer_plugins.core.settings import Settings
    from deepinfer_plugins.model.make_checkpoint import make_checkpoint
    from deepinfer_plugins.platforms.detect import detect

    # Matrices this small gain nothing from a second thread, and on a CPU waiting for it costs tenfold.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(stderr=True)
    load = Load(prompts, prompt_tokens, batch, new_tokens, repeats)
    record: dict[str, Any] = {
        "engine": engine.value,
        "chip": str(detect(Settings.from_env().accelerator)),
        "cores": os.cpu_count(),
        # Above the number of cores, others were at work too: compare ratios, not rates.
        "load_average_before": os.getloadavg()[0],
        "versions": versions(engine),
        "commit": commit(),
        "load": asdict(load),
        "models": {},
    }
    with tempfile.TemporaryDirectory() as aside:
        folder = Path(aside)
        make_checkpoint(folder / OURS, "small")
        write_llama(folder / RIVAL, folder / OURS)
        for model in (OURS, RIVAL):
            with console.status(f"{engine}: measuring {model}"):
                record["models"][model] = in_a_process(engine, folder / model, model == RIVAL, load, folder)
    show(record)
    path = RESULTS / f"{name or engine.value}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
