"""The tokens an engine generates, recorded, so that engines, chips and days can be compared.

Sixteen prompts of 1 to 700 tokens, 64 greedy tokens each, all at once and then some alone. ``--verify`` checks
every token against the whole-model reference on the CPU; ``--equal FILE`` compares with the record of another run.

Usage: python benchmarks/tokens.py --engine vllm --model DIR [--verify] [--equal OTHER.json] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTHS = (1, 2, 3, 17, 31, 63, 64, 65, 100, 127, 128, 129, 200, 333, 512, 700)
NEW_TOKENS = 64
ALONE = (0, 5, 9, 13, 15)

Generate = Callable[[list[list[int]]], list[list[int]]]


def prompts(vocab_size: int) -> list[list[int]]:
    """Random ordinary tokens, the same for every engine."""
    rng = random.Random(20261130)
    return [[rng.randrange(20, vocab_size - 24) for _ in range(length)] for length in LENGTHS]


def vllm(model: str, options: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(model=model, **options)
    parameters = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def generate(batch: list[list[int]]) -> list[list[int]]:
        inputs = [TokensPrompt(prompt_token_ids=tokens) for tokens in batch]
        return [
            list(done.outputs[0].token_ids) for done in engine.generate(inputs, parameters, use_tqdm=False)
        ]

    return generate


def sglang(model: str, options: dict[str, Any]) -> Generate:
    import sglang as engine_module

    engine = engine_module.Engine(model_path=model, **options)
    parameters = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}

    def generate(batch: list[list[int]]) -> list[list[int]]:
        return [
            list(done["output_ids"]) for done in engine.generate(input_ids=batch, sampling_params=parameters)
        ]

    return generate


def verify(model: str, asked: list[list[int]], got: list[list[int]]) -> list[int | None]:
    """For each prompt, the first generated token that the reference would not have chosen; None if there is none."""
    from deepinfer_plugins.model.checkpoint import Checkpoint
    from deepinfer_plugins.model.oracle import Oracle, compressed_vocab

    checkpoint = Checkpoint.open(model)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    oracle = Oracle(checkpoint.config, tensors, compressed_vocab(Path(model) / "tokenizer.json"))
    return [oracle.verify(prompt, tokens) for prompt, tokens in zip(asked, got, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["vllm", "sglang"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--options", type=json.loads, default={}, help="keyword arguments of the engine, as JSON"
    )
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--equal", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from deepinfer_plugins.model.config import ModelConfig

    asked = prompts(ModelConfig.from_folder(arguments.model).vocab_size)
    started = time.perf_counter()
    generate = {"vllm": vllm, "sglang": sglang}[arguments.engine](arguments.model, arguments.options)
    up = time.perf_counter() - started
    generate([asked[0]])
    started = time.perf_counter()
    together = generate(asked)
    seconds = time.perf_counter() - started
    alone = {index: generate([asked[index]])[0] for index in ALONE}
    again = generate(asked)

    import torch

    result: dict[str, Any] = {
        "engine": arguments.engine,
        "version": importlib.metadata.version(arguments.engine),
        "chip": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"torch": torch.__version__},
        "commit": arguments.commit,
        "start_s": up,
        "batch_s": seconds,
        "tokens_per_s": len(asked) * NEW_TOKENS / seconds,
        "alone_equal": all(together[index] == tokens for index, tokens in alone.items()),
        "cached_prefix_equal": again == together,
        "tokens": together,
    }
    if arguments.verify:
        wrong = verify(arguments.model, asked, together)
        result["first_difference_from_reference"] = wrong
        result["equals_reference"] = all(place is None for place in wrong)
    if arguments.equal:
        other = json.loads(arguments.equal.read_text())
        result["equal_to"] = {key: other[key] for key in ("engine", "version", "chip")}
        result["equal"] = other["tokens"] == together
    print(json.dumps({key: value for key, value in result.items() if key != "tokens"}, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result) + "\n")
    return (
        0
        if all(
            result.get(key, True)
            for key in ("alone_equal", "cached_prefix_equal", "equals_reference", "equal")
        )
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
