"""What the export loses: perplexity of the training network, and of the checkpoint that was exported from it.

The same held-out tokens go through the network that was trained, in fp32 with straight-through casts, and through the
reference loop on the exported checkpoint.

Usage: python -m training.export_loss STATE CHECKPOINT [--tokens 2048] [--seed 0]
STATE is the folder that ``python -m training.train`` wrote.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer

from deepinfer_plugins.core import shipped
from deepinfer_plugins.evaluation.engine import ReferenceEngine
from deepinfer_plugins.evaluation.text import LENGTH, choose
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.platforms.detect import detect
from training.network import Losses, Network
from training.train import load

# The bar of the issue: how far apart the perplexities may be.
MOST_APART = 0.02


@torch.no_grad()
def trained(state: Path, folder: Path, config: ModelConfig, pieces: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities that the network of ``state`` gives every token but each piece's first."""
    vocabulary = CompressedVocabulary.from_tokenizer(
        Tokenizer.from_file(str(folder / "tokenizer.json")), config.vocab_size
    )
    network = Network(config, vocabulary)
    for name, value in load(state)["weights"].items():
        network.weights[name].copy_(value)
    network.eval()
    found = []
    for piece in pieces:
        tokens = torch.tensor(piece)
        hidden, _ = network(tokens[None, :-1], Losses())
        scores = network.logits(hidden)[0].log_softmax(-1)
        found.append(scores.gather(-1, tokens[1:, None])[:, 0].double())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("state", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.checkpoint
    config = ModelConfig.from_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = shipped.read_documents(shipped.corpus())
    chosen = choose(tokenizer, documents, config.eos_token_id, arguments.tokens, 0, arguments.seed)
    pieces = [piece.tokens for piece in chosen.scored]

    ours = torch.cat(trained(arguments.state, folder, config, pieces))
    engine = ReferenceEngine(folder, detect().chip, LENGTH + 64, max_requests=16)
    scores = engine.log_probabilities(pieces, lambda count: None)
    exported = torch.cat([each.double() for each in scores])
    before, after = (math.exp(-float(each.mean())) for each in (ours, exported))
    answer = {
        "tokens": len(ours),
        "trained": before,
        "exported": after,
        "ratio": after / before,
        "mean_distance": float((ours - exported).abs().mean()),
        "ok": abs(after / before - 1) <= MOST_APART,
    }
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
