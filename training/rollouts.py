"""Let the backbone write, so that the draft learns to guess what the backbone writes.

Beginnings of documents that are trained on, from anywhere in them, are continued greedily, without drafts, by the
exported checkpoint. The corpus itself surprises the backbone far more often than its own text does, and drafts are
only ever made of the latter.

Usage: python -m training.rollouts CHECKPOINT OUTPUT.npz --corpus training/corpus.jsonl.xz [--count 24576]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepinfer_plugins.core.shipped import is_held_out, read_documents
from deepinfer_plugins.evaluation.engine import ReferenceEngine
from deepinfer_plugins.evaluation.text import PROMPT_LENGTHS, open_tokenizer, tokenize
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.platforms.detect import detect
from training.train import LENGTH

NEW_TOKENS = 96
# Half of the prompts are as short as those that a checkpoint is tested on.
LONGER = range(PROMPT_LENGTHS.stop, LENGTH - NEW_TOKENS)


def prompts_of(texts: list[list[int]], count: int, bos: int, seed: int) -> list[list[int]]:
    """Prompts from the starts of texts and from anywhere, half and half, each behind a start token."""
    rng = random.Random(seed)
    long_enough = [ids for ids in texts if len(ids) > PROMPT_LENGTHS.start]
    lengths = [len(ids) for ids in long_enough]
    prompts = []
    for index in range(count):
        length = rng.choice(PROMPT_LENGTHS if index % 2 else LONGER)
        if index // 2 % 2:
            ids, first = rng.choice(long_enough), 0
        else:
            (ids,) = rng.choices(long_enough, lengths)
            first = rng.randrange(max(1, len(ids) - length))
        # The last token of a document ends it.
        prompts.append([bos, *ids[first:-1][1 if first == 0 else 0 : length]])
    return prompts


def write(checkpoint: Path, prompts: list[list[int]], device: int, at_once: int) -> list[list[int]]:
    """What the backbone makes of each prompt."""
    torch.set_num_threads(1)
    chip = detect().chip
    if chip.torch_device == "cuda":
        torch.cuda.set_device(device)
    engine = ReferenceEngine(checkpoint, chip, LENGTH, max_requests=at_once, prompt_rows=4096)
    with torch.inference_mode():
        done = engine.generate(prompts, NEW_TOKENS, stop=[engine.config.eos_token_id])
    return [each.token_ids for each in done]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--count", type=int, default=24_576)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--at-once", type=int, default=512, help="prompts that a process continues together")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = ModelConfig.from_folder(arguments.checkpoint)
    tokenizer = open_tokenizer(arguments.checkpoint)
    documents = [each for each in read_documents(arguments.corpus) if not is_held_out(each.name)]
    texts = [ids.tolist() for ids in tokenize(tokenizer, documents, config.eos_token_id)]
    prompts = prompts_of(texts, arguments.count, config.bos_token_id, arguments.seed)
    parts = [
        prompts[first : first + arguments.at_once] for first in range(0, len(prompts), arguments.at_once)
    ]
    devices = max(1, torch.cuda.device_count())
    tokens = np.full((len(prompts), LENGTH + 1), config.eos_token_id, dtype=np.uint16)
    first = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
    end = first.copy()
    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn) as pool, Progress(*columns) as progress:
        bar = progress.add_task("", total=len(parts))
        waiting = {
            pool.submit(write, arguments.checkpoint, part, number % devices, arguments.at_once): number
            for number, part in enumerate(parts)
        }
        for one in as_completed(waiting):
            start = waiting[one] * arguments.at_once
            for row, new in enumerate(one.result(), start):
                whole = prompts[row] + new
                tokens[row, : len(whole)] = whole
                end[row] = len(whole)
            progress.advance(bar)
    np.savez_compressed(arguments.output, tokens=tokens, first=first, end=end)
    print(f"{len(prompts)} prompts, {int((end - first).sum())} new tokens: {arguments.output}")


if __name__ == "__main__":
    main()
