"""Train the small checkpoint: first the backbone, then the draft on the frozen backbone.

Usage: python -m training.train OUTPUT --corpus training/corpus.jsonl.xz --minutes 9 --until backbone
Run it again with the same OUTPUT to go on where it stopped, until it says that it is done; then let the backbone write
(:mod:`training.rollouts`), and train the draft on that and the corpus: ``--rollouts FILE`` for ``--until backbone``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from deepinfer_plugins.core.shipped import is_held_out, read_documents
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.tokenizer_data import build_tokenizer, write_tokenizer
from training import draft as drafting
from training import network, quantise
from training.export import export
from training.muon import Muon
from training.network import Losses, Network
from training.shape import trained

LENGTH = 512
INDEX_WEIGHT = 0.05
BALANCE_RATE = 1e-3
DRAFT_DECAY = 0.8
# Muon's rate over AdamW's.
MUON = 2.0
# The deepest block drafted in training; half of the blocks have the depth the configuration names.
MOST_DRAFTS = 8
# Steps.
SAVE_EVERY = 500


class Text:
    """Tokens of the documents, and windows into them."""

    def __init__(self, documents: list[tuple[str, str]], tokenizer: Tokenizer, device: torch.device) -> None:
        encoded = tokenizer.encode_batch([text for _, text in documents], add_special_tokens=True)
        parts = [[*item.ids, 1] for item in encoded]
        self.tokens = torch.tensor([token for part in parts for token in part], device=device)
        ends = np.cumsum([len(part) for part in parts])
        starts = np.concatenate([[0], ends[:-1]])
        self.starts = torch.tensor([s for s in starts if s + LENGTH < len(self.tokens)], device=device)

    def batch(self, size: int, generator: torch.Generator) -> torch.Tensor:
        """``[size, LENGTH + 1]``: half from the start of a document, half from anywhere, after a BOS."""
        device = self.tokens.device
        anywhere = torch.randint(0, len(self.tokens) - LENGTH, (size,), generator=generator)
        chosen = self.starts[torch.randint(0, len(self.starts), (size,), generator=generator).to(device)]
        start = torch.where(torch.arange(size, device=device) % 2 == 0, chosen, anywhere.to(device))
        window = self.tokens[start[:, None] + torch.arange(LENGTH + 1, device=device)].clone()
        window[:, 0] = 0
        return window


class Rollouts:
    """What the backbone itself wrote, from :mod:`training.rollouts`: the text that drafts are for."""

    def __init__(self, path: Path, device: torch.device) -> None:
        kept = np.load(path)
        self.tokens = torch.from_numpy(kept["tokens"].astype(np.int64)).to(device)
        self.first, self.end = (torch.from_numpy(kept[name].astype(np.int64)) for name in ("first", "end"))

    def batch(self, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[size, LENGTH + 1]``, and ``[size]``: the first token that the backbone wrote, and behind its last."""
        chosen = torch.randint(0, len(self.tokens), (size,), generator=generator)
        return self.tokens[chosen.to(self.tokens.device)], self.first[chosen], self.end[chosen]


def accelerate() -> None:
    """Compile the elementwise parts; each is compiled once and serves all layers."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 256
    for name in ("mxfp8", "mxfp4", "fp4", "fp8_block", "bf16"):
        setattr(quantise, name, torch.compile(getattr(quantise, name), dynamic=False))
    for name in ("mix", "merge", "collapse", "rms_norm", "rotate"):
        setattr(network, name, torch.compile(getattr(network, name), dynamic=False))
    drafting.collapse = network.collapse


def is_linear(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon trains it: a linear map of some size, or a stack of them."""
    if min(parameter.shape[-2:]) < 16 or parameter.dim() < 2:
        return False
    return not any(part in name for part in ("embed", "head", "hc_", "gate/", "norm"))


def learning_rate(step: int, steps: int, peak: float) -> float:
    warmup = min(100, steps // 10 + 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


class Trainer:
    """One phase: its parameters, optimiser and log, saved together."""

    def __init__(self, net: Network, phase: str, steps: int, peak: float, folder: Path) -> None:
        self.net, self.phase, self.steps, self.peak, self.folder = net, phase, steps, peak, folder
        self.names = [n for n in net.weights if n.startswith("mtp/") == (phase == "draft")]
        for name, parameter in net.weights.items():
            parameter.requires_grad_(name in self.names and not name.endswith("gate/bias"))
        matrices, decayed, plain = [], [], []
        for name in self.names:
            parameter = net.weights[name]
            if is_linear(name, parameter):
                matrices.append(parameter)
            elif parameter.requires_grad:
                (decayed if parameter.dim() > 1 and "hc_" not in name else plain).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        # Tensors, so that a captured step reads them anew.
        device = next(net.parameters()).device
        self.rates = [torch.tensor(0.0, device=device) for _ in range(2)]
        self.optimiser = torch.optim.AdamW(
            groups,
            lr=self.rates[0],
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.muon = Muon(matrices, lr=self.rates[1], weight_decay=0.1)
        self.step = 0
        self.log: list[dict[str, Any]] = []

    def set_rates(self) -> None:
        """For the step that comes."""
        rate = learning_rate(self.step, self.steps, self.peak)
        for tensor, factor in zip(self.rates, (1.0, MUON), strict=True):
            tensor.fill_(rate * factor)

    def update(self, loss: torch.Tensor, losses: Losses) -> torch.Tensor:
        """Change the parameters; the norm of the gradient. Nothing here waits for the device."""
        loss.backward()
        groups = [*self.optimiser.param_groups, *self.muon.param_groups]
        parameters = [p for group in groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimiser in (self.optimiser, self.muon):
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            for prefix, load in losses.load.items():
                if prefix.startswith("mtp.") == (self.phase == "draft"):
                    bias = self.net.raw(f"{prefix}.gate.bias")
                    bias += BALANCE_RATE * torch.sign(load.mean() - load)
        self.net.begin()
        return norm

    def state(self) -> dict[str, Any]:
        """Second moments in bf16; first moments are a matter of twenty steps and start over."""
        second = {}
        for group in self.optimiser.param_groups:
            for parameter in group["params"]:
                kept = self.optimiser.state.get(parameter)
                if kept:
                    second[id(parameter)] = kept["exp_avg_sq"].bfloat16().cpu()
        by_name = {n: second[id(p)] for n, p in self.net.weights.items() if id(p) in second}
        return {"phase": self.phase, "step": self.step, "log": self.log, "second": by_name}

    def restore(self, state: dict[str, Any]) -> None:
        self.step, self.log = state["step"], state["log"]
        for name, value in state["second"].items():
            parameter = self.net.weights[name]
            self.optimiser.state[parameter] = {
                "step": torch.tensor(float(self.step), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": value.to(parameter),
            }


def save(folder: Path, net: Network, trainer: Trainer) -> None:
    """In pieces of at most 15 MB, so that a checkpoint can travel through narrow places."""
    pieces: list[dict[str, Any]] = [{"trainer": trainer.state() | {"second": {}}}]
    size = 0
    for kind, tensors in (
        ("weights", {n: p.detach().cpu() for n, p in net.weights.items()}),
        ("second", trainer.state()["second"]),
    ):
        for name, tensor in tensors.items():
            if size + tensor.nbytes > 15e6:
                pieces.append({})
                size = 0
            pieces[-1].setdefault(kind, {})[name] = tensor
            size += tensor.nbytes
    for index, piece in enumerate(pieces):
        torch.save(piece, folder / f"new-{index}.pt")
    # Only now, when the new state is whole.
    for old in folder.glob("state-*.pt"):
        old.unlink()
    for index in range(len(pieces)):
        (folder / f"new-{index}.pt").rename(folder / f"state-{index}.pt")


def load(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = {"weights": {}, "second": {}}
    for path in sorted(folder.glob("state-*.pt")):
        piece = torch.load(path, map_location="cpu", weights_only=False)
        state["weights"] |= piece.get("weights", {})
        state["second"] |= piece.get("second", {})
        if "trainer" in piece:
            state["trainer"] = piece["trainer"]
    if "trainer" in state:
        state["trainer"]["second"] = state["second"]
    return state


def backbone_loss(net: Network, window: torch.Tensor, losses: Losses) -> torch.Tensor:
    hidden, _ = net(window[:, :-1], losses)
    return F.cross_entropy(net.logits(hidden).flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def perplexity(net: Network, text: Text, batches: int, size: int) -> float:
    net.eval()
    net.begin()
    generator = torch.Generator().manual_seed(12345)
    total = sum(float(backbone_loss(net, text.batch(size, generator), Losses())) for _ in range(batches))
    net.begin()
    net.train()
    return math.exp(total / batches)


def draft_inputs(
    text: Text, rollouts: Rollouts | None, size: int, anchors: int, depth: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Windows ``[size, LENGTH + 1]``, half of them written by the backbone; anchors and depths ``[size, anchors]``."""
    window = text.batch(size, generator)
    first, end = torch.ones(size, dtype=torch.int64), torch.full((size,), LENGTH)
    if rollouts is not None:
        half = size // 2
        window[:half], first[:half], end[:half] = rollouts.batch(half, generator)
    shape = (size, anchors)
    # Behind an anchor comes a token that is known, then the drafts: the first of them in the text, all in the window.
    last = torch.minimum(end - 2, torch.tensor(LENGTH - MOST_DRAFTS - 1))
    room = (last - first + 1).clamp(min=1)
    where = first[:, None] - 1 + (torch.rand(shape, generator=generator) * room[:, None]).long()
    depths = torch.randint(1, MOST_DRAFTS + 1, shape, generator=generator)
    usual = torch.rand(shape, generator=generator) < 0.5
    depths = torch.where(usual, depth, depths)
    device = window.device
    return window, where.to(device), depths.to(device)


def draft_step(
    net: Network, window: torch.Tensor, anchors: torch.Tensor, depths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Losses]:
    """Losses of the draft behind anchors, and how often it agrees."""
    tokens = window[:, :-1]
    net.eval()
    with torch.no_grad():
        hidden, taps = net(tokens, Losses())
    net.train()
    rows = anchors.unsqueeze(-1) + torch.arange(1, MOST_DRAFTS + 1, device=tokens.device)
    batch = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    with torch.no_grad():
        target = net.logits(hidden[batch, rows])
    losses = Losses()
    keys = drafting.context_keys(net, taps)
    block = drafting.draft(net, keys, tokens, anchors, depths, MOST_DRAFTS, losses)
    cross, confidence, agree = drafting.draft_loss(block, target, depths, DRAFT_DECAY)
    return cross, confidence, agree, losses


def step_of(trainer: Trainer, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """One step of a phase; what to log of it, on the device."""
    if trainer.phase == "draft":
        cross, confidence, agree, losses = draft_step(trainer.net, *inputs)
        return {
            "norm": trainer.update(cross + 0.2 * confidence, losses),
            "loss": cross.detach(),
            "confidence": confidence.detach(),
            "agree": agree,
        }
    losses = Losses()
    cross = backbone_loss(trainer.net, *inputs, losses)
    index = torch.as_tensor(losses.index)
    return {
        "norm": trainer.update(cross + INDEX_WEIGHT * index, losses),
        "loss": cross.detach(),
        "index": index.detach(),
    }


class Captured:
    """Steps replayed as one CUDA graph: launching its thousands of small kernels takes longer than running them.

    The first steps run one by one, since they compile kernels and make the optimisers' state.
    """

    WARM_UP = 3

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0

    def __call__(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """What :func:`step_of` says; the tensors are overwritten by the next step."""
        if self.done < self.WARM_UP:
            self.done += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = step_of(self.trainer, *inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self.graph is None:
            self.inputs = [each.clone() for each in inputs]
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.result = step_of(self.trainer, *self.inputs)
        for kept, new in zip(self.inputs, inputs, strict=True):
            kept.copy_(new)
        self.graph.replay()
        return self.result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder of the state to go on from; OUTPUT by default")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--draft-steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--draft-rate", type=float, default=2e-3)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--rollouts", type=Path, help="what the backbone wrote, for the draft; see training.rollouts"
    )
    parser.add_argument(
        "--until", choices=["backbone", "draft"], default="draft", help="the last phase to train"
    )
    parser.add_argument("--eager", action="store_true", help="launch kernels one by one, also on a GPU")
    parser.add_argument("--documents", type=int, help="use only so many, for a trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--export", action="store_true", help="train no further: write the checkpoint as it is"
    )
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.minutes * 60
    arguments.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)

    documents = read_documents(arguments.corpus)[: arguments.documents]
    seen = [(name, text) for name, text in documents if not is_held_out(name)]
    config = trained()
    tokenizer = build_tokenizer(
        config.vocab_size, config.image_token_id, config.dspark_noise_token_id, [text for _, text in seen]
    )
    vocabulary = CompressedVocabulary.from_tokenizer(tokenizer, config.vocab_size)
    config = replace(config, engram_compressed_vocab_size=vocabulary.size)
    write_tokenizer(tokenizer, arguments.output, config.max_position_embeddings)
    train_text = Text(seen, tokenizer, device)
    test_text = Text([d for d in documents if is_held_out(d[0])], tokenizer, device)
    net = Network(config, vocabulary, arguments.dropout)
    state = load(arguments.resume or arguments.output)
    if arguments.export and not state["weights"]:
        parser.error(f"--export: there is no state in {arguments.resume or arguments.output}")
    if state["weights"]:
        with torch.no_grad():
            for name, value in state["weights"].items():
                net.weights[name].copy_(value)
    net.to(device).train()
    if device.type == "cuda":
        accelerate()
    print(
        f"{sum(p.numel() for p in net.parameters()) / 1e6:.2f} M parameters; {len(train_text.tokens) / 1e6:.2f} M "
        f"tokens to train on, {len(test_text.tokens) / 1e6:.3f} M held out; {device}",
        flush=True,
    )

    if not arguments.export and not train(net, state, train_text, test_text, arguments, deadline):
        return
    weights = {name.replace("/", "."): p.detach().cpu() for name, p in net.weights.items()}
    export(arguments.output / "checkpoint", config, weights, arguments.output)
    print("done: ", arguments.output / "checkpoint")


def train(
    net: Network,
    state: dict[str, Any],
    train_text: Text,
    test_text: Text,
    arguments: argparse.Namespace,
    deadline: float,
) -> bool:
    """Go on with both phases from a state; whether they are done."""
    for phase, steps, peak in (
        ("backbone", arguments.steps, arguments.rate),
        ("draft", arguments.draft_steps, arguments.draft_rate),
    ):
        kept = state.get("trainer")
        if kept and kept["phase"] == "draft" and phase == "backbone":
            continue
        if phase == "draft" and arguments.until == "backbone":
            break
        trainer = Trainer(net, phase, steps, peak, arguments.output)
        if kept and kept["phase"] == phase:
            trainer.restore(kept)
        done = run(net, trainer, train_text, test_text, arguments, deadline)
        save(arguments.output, net, trainer)
        (arguments.output / f"log-{phase}.json").write_text(json.dumps(trainer.log, indent=0) + "\n")
        if not done:
            print(f"stopped in {phase} at step {trainer.step} of {steps}: run again to go on")
            return False
    return True


def run(
    net: Network,
    trainer: Trainer,
    train_text: Text,
    test_text: Text,
    arguments: argparse.Namespace,
    deadline: float,
) -> bool:
    """Train until the phase is done (True) or time is up (False)."""
    device = train_text.tokens.device
    step: Callable[..., dict[str, torch.Tensor]] = partial(step_of, trainer)
    if device.type == "cuda" and not arguments.eager:
        step = Captured(trainer)
    draft = trainer.phase == "draft"
    rollouts = Rollouts(arguments.rollouts, device) if draft and arguments.rollouts else None
    columns = [
        TextColumn(trainer.phase),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.fields[shown]}"),
        TimeRemainingColumn(),
    ]
    started, first = time.monotonic(), trainer.step
    with Progress(*columns) as progress:
        bar = progress.add_task(trainer.phase, total=trainer.steps, completed=trainer.step, shown="")
        while trainer.step < trainer.steps:
            if time.monotonic() > deadline:
                return False
            generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + trainer.step * 2 + draft)
            inputs: tuple[torch.Tensor, ...]
            if draft:
                depth = net.config.dspark_block_size
                inputs = draft_inputs(
                    train_text, rollouts, arguments.batch, arguments.anchors, depth, generator
                )
            else:
                inputs = (train_text.batch(arguments.batch, generator),)
            trainer.set_rates()
            found = step(*inputs)
            trainer.step += 1
            if trainer.step % 50 == 0 or trainer.step == trainer.steps:
                seconds = time.monotonic() - started
                entry = {"step": trainer.step} | {
                    name: [round(x, 4) for x in value.tolist()] if value.dim() else float(value)
                    for name, value in found.items()
                }
                entry |= {"seconds": seconds, "per_step": seconds / (trainer.step - first)}
                if not draft and (trainer.step % 200 == 0 or trainer.step == trainer.steps):
                    entry["held_out_perplexity"] = perplexity(net, test_text, 4, arguments.batch)
                trainer.log.append(entry)
                print(json.dumps(entry), flush=True)
            if trainer.step % SAVE_EVERY == 0:
                save(arguments.output, net, trainer)
            progress.update(
                bar,
                completed=trainer.step,
                shown=f"loss {float(found['loss']):.3f}" if trainer.step % 10 == 0 else "",
            )
    return True


if __name__ == "__main__":
    main()
