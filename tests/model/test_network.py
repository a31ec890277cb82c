"""The running model against the oracle, and against itself under every schedule an engine may choose."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from .paged import PagedEngine, Request

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.checkpoint import Checkpoint, Placement
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.loading import load
from deepinfer_plugins.model.make_checkpoint import make_checkpoint
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.model.oracle import Oracle
from deepinfer_plugins.model.step import Caches, Step

# Around the window (16), a compressed pair, a page, and where selection and candidates begin to leave entries out.
LENGTHS = (1, 2, 5, 15, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, 333, 700)
NEW_TOKENS = 64
PAGES = {"window": 16, "compressed": 64, "index_key": 64, "compressor": 16, "draft": 16}
ODD_PAGES = {"window": 6, "compressed": 5, "index_key": 7, "compressor": 3, "draft": 6}
MAX_POSITIONS = 1024


@dataclass(frozen=True)
class Case:
    """A random checkpoint, both models of it, and prompts."""

    config: ModelConfig
    folder: Path
    model: DeepseekV41
    oracle: Oracle
    prompts: tuple[tuple[int, ...], ...]


def build(folder: Path, placement: Placement | None = None, **options: object) -> DeepseekV41:
    checkpoint = Checkpoint.open(folder)
    model = DeepseekV41(
        checkpoint.config,
        load_ops(Want(Arch.CPU)),
        device=torch.device("cpu"),
        max_positions=MAX_POSITIONS,
        vocabulary=CompressedVocabulary.from_folder(folder, checkpoint.config.vocab_size),
        placement=placement,
        draft=True,
        **options,  # type: ignore[arg-type]
    )
    load(model, checkpoint)
    return model


def make_case(folder: Path, shape: str) -> Case:
    make_checkpoint(folder, shape)
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    vocabulary = CompressedVocabulary.from_folder(folder, config.vocab_size)
    oracle = Oracle(config, {name: checkpoint.read(name) for name in checkpoint.names}, vocabulary.map)
    rng = random.Random(41)
    prompts = tuple(tuple(rng.randrange(3, config.vocab_size) for _ in range(length)) for length in LENGTHS)
    return Case(config, folder, build(folder), oracle, prompts)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("tiny") / "checkpoint", "tiny")


@pytest.fixture(scope="module")
def alone(tiny: Case) -> list[Request]:
    """Every prompt by itself, prefilled in one step, then decoded: what all other schedules must reproduce."""
    requests = []
    for prompt in tiny.prompts:
        engine = PagedEngine(tiny.model, PAGES)
        requests.append(engine.add(prompt))
        engine.generate(requests[-1:], NEW_TOKENS, chunk=MAX_POSITIONS)
    return requests


def assert_same_request(got: Request, want: Request, label: str) -> None:
    assert got.tokens == want.tokens, f"{label}: other tokens"
    for position, state in got.hidden.items():
        assert_same_bits(state, want.hidden[position], f"{label}, position {position}")


def states(request: Request, start: int = 0) -> torch.Tensor:
    return torch.stack([request.hidden[position] for position in range(start, request.computed)])


def assert_one_ulp(got: torch.Tensor, want: torch.Tensor, label: str) -> None:
    """Both are roundings to fp32 of sums that differ by 1e-13 at most: equal, or neighbours."""
    near = (got == want) | (torch.nextafter(got, want) == want)
    assert near.all(), f"{label}: {(~near).sum()} of {near.numel()} logits are more than one ulp away"


# -- Against the oracle --


@pytest.mark.parametrize("index", range(len(LENGTHS)), ids=[str(length) for length in LENGTHS])
def test_generates_what_the_oracle_generates(tiny: Case, alone: list[Request], index: int) -> None:
    request, length = alone[index], LENGTHS[index]
    want = tiny.oracle.logits(request.tokens[:-1])
    assert request.tokens[length:] == want[length - 1 :].argmax(-1).tolist()
    assert_one_ulp(tiny.model.logits(states(request)), want, f"prompt of {length}")
