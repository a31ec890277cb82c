"""Fit the confidence head to what becomes of drafts when the model writes: the last step of training.

While the draft is trained, its confidence sees the corpus: text that the model has learnt, and that it did not write.
Later it is asked about new text that the model writes. Here the model continues documents that nothing was trained
on and nothing is tested on, and the head (a linear map) is fitted to which drafts were accepted: a logistic
regression, over the drafts whose forerunners were all accepted. No token depends on the head.

Usage: python -m training.confidence CHECKPOINT [--processes 16]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from deepinfer_plugins.core import shipped
from deepinfer_plugins.evaluation.engine import ReferenceEngine
from deepinfer_plugins.evaluation.text import LENGTH, PROMPT_LENGTHS, tokenize
from deepinfer_plugins.features.calibration import BINS
from deepinfer_plugins.model.config import ModelConfig
from training.export import SHARD

# Strength of the pull towards the head as it was; of the order of what a handful of drafts say.
PULL = 1e-2
# Strength of the calibration error, and the standard deviation of a soft bin.
TRUTH, WIDTH = 2.0, 0.03
# Prompts that a process continues together.
PART = 8
# Prompts of a document at most, 512 tokens apart.
PIECES = 4


def observe(checkpoint: Path, prompts: list[list[int]], new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head was shown of each draft that was reached, ``[n, width]``, and whether it was accepted."""
    torch.set_num_threads(1)
    engine = ReferenceEngine(checkpoint, max_requests=16)
    draft, depth = engine.model.draft_model, engine.config.dspark_block_size
    assert draft is not None
    shown: list[torch.Tensor] = []
    said: list[torch.Tensor] = []

    def keep(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        shown.append(inputs[0])
        said.append(output[:, 0])

    hook = draft.confidence.register_forward_hook(keep)
    generated = engine.generate(prompts, new_tokens, depth, stop=[engine.config.eos_token_id])
    hook.remove()
    # A block is recognised by what the head said of it.
    blocks = {}
    for first in range(0, len(shown), depth):
        inputs, logits = (torch.stack(each[first : first + depth], 1) for each in (shown, said))
        blocks |= {tuple(row.tolist()): one for row, one in zip(logits, inputs, strict=True)}
    features, kept = [], []
    for record in (each for one in generated for each in one.verifications):
        block = blocks[record.confidence_logits]
        for position in range(min(record.verified, record.accepted + 1)):
            features.append(block[position].double())
            kept.append(position < record.accepted)
    return torch.stack(features), torch.tensor(kept, dtype=torch.float64)


def fit(features: torch.Tensor, kept: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Weights ``[width]`` that make the acceptances likely and confidences true, near ``start`` where they say little.

    Likelihood alone leaves a linear head too sure in the middle and not sure enough at both ends. So the distance of
    confidence and acceptance, in soft bins of confidence, is made small with it.
    """
    weights = start.clone().requires_grad_()
    scale = features.square().mean(0)
    centres = (torch.arange(BINS, dtype=features.dtype) + 0.5) / BINS
    optimiser = torch.optim.LBFGS([weights], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        logits = features @ weights
        said = logits.sigmoid()
        share = torch.softmax(-((said[:, None] - centres) ** 2) / (2 * WIDTH**2), 1)
        off = (share * (said - kept)[:, None]).sum(0)
        # The square root of a square: an absolute value that can be differentiated at zero.
        value = F.binary_cross_entropy_with_logits(logits, kept)
        value = value + TRUTH * (off.square() + 1e-6).sqrt().sum() / len(kept)
        value = value + PULL * (scale * (weights - start).square()).sum()
        value.backward()
        return value

    optimiser.step(loss)
    return weights.detach()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--new-tokens", type=int, default=96)
    arguments = parser.parse_args()
    config = ModelConfig.from_folder(arguments.checkpoint)
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    documents = [
        each for each in shipped.read_documents(shipped.corpus()) if shipped.is_for_calibration(each.name)
    ]
    rng = random.Random(0)
    prompts = []
    for ids in tokenize(tokenizer, documents, config.eos_token_id):
        for first in range(0, len(ids), LENGTH)[:PIECES]:
            piece = ids[first : first + LENGTH].tolist()
            if len(piece) >= 2 * PROMPT_LENGTHS.start:
                piece[0] = config.bos_token_id
                prompts.append(piece[: min(rng.choice(PROMPT_LENGTHS), len(piece) // 2)])
    parts = [prompts[first : first + PART] for first in range(0, len(prompts), PART)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn) as pool:
        waiting = [pool.submit(observe, arguments.checkpoint, part, arguments.new_tokens) for part in parts]
        for _ in track(as_completed(waiting), "writing", total=len(waiting)):
            pass
    features, kept = (torch.cat(each) for each in zip(*(one.result() for one in waiting), strict=True))
    name = f"mtp.{config.num_nextn_predict_layers - 1}.confidence_head.proj.weight"
    path = arguments.checkpoint / SHARD
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    before = tensors[name][0].double()
    after = fit(features, kept, before).bfloat16()
    for what, weights in (("before", before), ("after", after.double())):
        loss = F.binary_cross_entropy_with_logits(features @ weights, kept)
        print(f"{what}: {float(loss):.4f} nats a draft, of {len(kept)}, {float(kept.mean()):.3f} accepted")
    tensors[name] = after[None]
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


if __name__ == "__main__":
    main()
