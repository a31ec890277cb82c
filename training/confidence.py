"""Fit the confidence head to what becomes of drafts when the model writes: the last step of training.

While the draft is trained, its confidence sees the corpus. What it is asked about later is text that the model
wrote, which is easier to predict, so that the head says too little. Here the model continues the beginnings of
documents that were trained on, and the head (a linear map) is fitted to which drafts were accepted: a logistic
regression, over the drafts whose forerunners were all accepted. No token depends on the head.

Usage: python -m training.confidence CHECKPOINT [--prompts 192]
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from deepinfer_plugins.core import shipped
from deepinfer_plugins.evaluation.engine import ReferenceEngine
from deepinfer_plugins.evaluation.text import PROMPT_LENGTHS, tokenize
from training.export import SHARD

# Strength of the pull towards the head as it was; of the order of what a handful of drafts say.
PULL = 1e-3


def observe(
    engine: ReferenceEngine, prompts: list[list[int]], new_tokens: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head was shown of each draft that was reached, ``[n, width]``, and whether it was accepted."""
    draft = engine.model.draft_model
    assert draft is not None
    shown: list[torch.Tensor] = []
    said: list[torch.Tensor] = []

    def keep(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        shown.append(inputs[0])
        said.append(output[:, 0])

    hook = draft.confidence.register_forward_hook(keep)
    with Progress() as progress:
        task = progress.add_task("writing", total=len(prompts) * new_tokens)
        generated = engine.generate(
            prompts,
            new_tokens,
            depth,
            stop=[engine.config.eos_token_id],
            on_tokens=lambda count: progress.advance(task, count),
        )
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
    """Weights ``[width]`` that make the acceptances most likely, near ``start`` where they say little."""
    weights = start.clone().requires_grad_()
    scale = features.square().mean(0)
    optimiser = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = F.binary_cross_entropy_with_logits(features @ weights, kept)
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
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--new-tokens", type=int, default=96)
    arguments = parser.parse_args()
    engine = ReferenceEngine(arguments.checkpoint, max_requests=16)
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    rng = random.Random(0)
    seen = [each for each in shipped.read_documents(shipped.corpus()) if not shipped.is_held_out(each.name)]
    drawn = rng.sample(seen, 2 * arguments.prompts)
    encoded = tokenize(tokenizer, drawn, engine.config.eos_token_id)
    prompts = [
        ids[: min(rng.choice(PROMPT_LENGTHS), len(ids) // 2)].tolist()
        for ids in encoded
        if len(ids) >= 2 * PROMPT_LENGTHS.start
    ][: arguments.prompts]
    features, kept = observe(engine, prompts, arguments.new_tokens, engine.config.dspark_block_size)
    assert engine.model.draft_model is not None
    name = f"mtp.{engine.config.num_nextn_predict_layers - 1}.confidence_head.proj.weight"
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
