"""The promise without an engine: the whole model, with each set of providers, run in many ways.

The same requests in random orders of arrival, numbers running at once, sizes of a prompt's chunks and depths of
speculation: tokens and the bits of their log-probabilities must be those of the first run.

Usage: PYTHONPATH=. python benchmarks/invariance.py --out F [--providers torch triton] [--requests 64] [--runs 8]
       PYTHONPATH=. python benchmarks/invariance.py --cost --out F [--rows 1 64 512]

``--cost`` measures what the promise costs in decoding instead; see ``mode_cost.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import mode_cost  # noqa: E402

from deepinfer_plugins.core import shipped
from deepinfer_plugins.core.settings import PROVIDER
from deepinfer_plugins.core.target import Want
from deepinfer_plugins.evaluation.engine import Generated, ReferenceEngine
from deepinfer_plugins.features.sampling import SamplingParams
from deepinfer_plugins.kernels.catalogue import choices
from deepinfer_plugins.platforms.detect import detect

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
)


def requests(folder: Path, count: int, longest: int) -> list[list[int]]:
    """Beginnings of held-out documents, of 1 to ``longest`` tokens."""
    # Not needed, and not always there, where costs are measured.
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    held = [each for each in shipped.read_documents(shipped.corpus()) if shipped.is_held_out(each.name)]
    rng = random.Random(0)
    prompts = []
    for document in rng.sample(held, count):
        ids = [0, *tokenizer.encode(document.text[: 4 * longest], add_special_tokens=False).ids]
        prompts.append(ids[: rng.randint(1, longest)])
    return prompts


def differences(found: list[Generated], want: list[Generated]) -> list[int]:
    """Requests whose tokens or log-probabilities are others."""
    return [
        index
        for index, (one, other) in enumerate(zip(found, want, strict=True))
        if one.token_ids != other.token_ids or one.log_probs != other.log_probs
    ]


def run(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    os.environ[PROVIDER] = name
    chip = detect().chip
    chosen = {op: choice.provider.name for op, choice in choices(Want(chip.arch)).items()}
    folder = arguments.model or shipped.default_checkpoint()
    prompts = requests(folder, arguments.requests, arguments.longest)
    sampling = [
        SamplingParams(seed=index * 7919, verify="coupling", **KINDS[index % len(KINDS)])
        for index in range(len(prompts))
    ]
    rng = random.Random(1)
    first: list[Generated] | None = None
    record: list[dict[str, Any]] = []
    # The first way is what the others are held against; then one request at a time, the rest at random.
    ways = [(16, 512, 0), (1, 512, 0)] + [
        (rng.choice([2, 8, 32, 64]), rng.choice([7, 64, 512]), rng.choice([0, 1, 5, 8]))
        for _ in range(arguments.runs)
    ]
    for number, (at_once, chunk, depth) in enumerate(ways):
        order = list(range(len(prompts)))
        if number > 1:
            rng.shuffle(order)
        asked = order[: arguments.alone] if at_once == 1 else order
        engine = ReferenceEngine(folder, chip, max_requests=at_once, prompt_rows=chunk)
        started = time.monotonic()
        done = engine.generate(
            [prompts[i] for i in asked],
            arguments.tokens,
            depth,
            [sampling[i] for i in asked],
            log_probs=True,
        )
        seconds = time.monotonic() - started
        new = sum(len(each.token_ids) for each in done)
        if first is None:
            first = done
        different = [asked[i] for i in differences(done, [first[i] for i in asked])]
        drafts = [each for one in done for each in one.verifications if each.whole]
        record.append(
            {
                "at_once": at_once,
                "chunk": chunk,
                "depth": depth,
                "requests": len(asked),
                "tokens": new,
                "tokens_per_second": round(new / seconds, 1),
                "mean_length": round(1 + sum(d.accepted for d in drafts) / len(drafts), 3)
                if drafts
                else None,
                "different": different,
            }
        )
        print(json.dumps({"providers": name} | record[-1]), flush=True)
    return {"providers": chosen, "runs": record, "equal": not any(each["different"] for each in record)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--providers", nargs="+", default=["torch"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--alone", type=int, default=8, help="of them, also one at a time")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--longest", type=int, default=200)
    parser.add_argument("--runs", type=int, default=8)
    cost = parser.add_argument_group("what the promise costs")
    cost.add_argument("--cost", action="store_true")
    cost.add_argument("--rows", type=int, nargs="+", default=[1, 64, 512], help="of a decode step")
    cost.add_argument("--context", type=int, default=1024, help="tokens before each row")
    cost.add_argument("--experts", type=int, default=384, help="of each layer at the release's shapes")
    cost.add_argument("--preset", default="release", help="sizes of operators and layers")
    cost.add_argument("--commit", default="unknown")
    arguments = parser.parse_args(argv)
    if arguments.cost:
        mode_cost.measure(arguments)
        return
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    record = {"chip": chip, "torch": torch.__version__}
    with torch.inference_mode():
        record |= {name: run(arguments, name) for name in arguments.providers}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
