"""Parts of the training that a wrong line would break without a sign: what is written, drawn and captured."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "training"


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """The folder is no part of the package, and its parent must not be on the path: ``kernels`` is there too."""
    spec = importlib.util.spec_from_file_location(
        "training", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec and spec.loader
    sys.modules["training"] = importlib.util.module_from_spec(spec)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "training"]:
        del sys.modules[name]


def module(name: str) -> ModuleType:
    return importlib.import_module(f"training.{name}")


def test_generated_text_is_what_it_looks_like() -> None:
    text = module("text")
    rng = random.Random(0)
    code = [text.code_document(rng) for _ in range(300)]
    for document in code:
        ast.parse(document)
        compile(document, "generated", "exec")
    # Enough different ones that what is held out is new.
    assert len(set(code)) == len(code)
    assert all(json.loads(text.json_document(rng)) for _ in range(300))


def test_classes_in_generated_code_work() -> None:
    """What is written about a field holds when it is run."""
    text = module("text")
    rng = random.Random(1)
    seen = set()
    for _ in range(200):
        space: dict[str, Any] = {}
        source = text.code_document(rng)
        exec(source, space)  # noqa: S102 (made two lines above)
        (kind,) = [each for each in space.values() if isinstance(each, type)]
        fields = list(kind.__init__.__code__.co_varnames[1:])
        made = kind(*range(len(fields)))
        for number, field in enumerate(fields):
            if hasattr(kind, f"get_{field}"):
                assert getattr(made, f"get_{field}")() == number
                seen.add("get")
            if hasattr(kind, f"more_{field}"):
                assert not getattr(made, f"more_{field}")(made)
                seen.add("more")
        if hasattr(kind, "as_dict"):
            assert made.as_dict() == dict(zip(fields, range(len(fields)), strict=True))
            seen.add("as_dict")
        for name in [f"count_{field}" for field in fields if f"count_{field}" in space]:
            assert space[name]([made, made]) == {fields.index(name.removeprefix("count_")): 2}
            seen.add("count")
    assert seen == {"get", "more", "as_dict", "count"}


def test_muon_makes_updates_orthogonal() -> None:
    """The update has the gradient's singular vectors, and singular values of about one, as ``U V^T`` has."""
    muon = module("muon")
    torch.manual_seed(0)
    for shape in ((3, 16, 48), (2, 48, 16), (1, 32, 64)):
        matrices = torch.randn(shape)
        found = muon.orthogonalise(matrices)
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.3 and values.max() < 1.3
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        # The quintic leaves singular vectors alone: u^T found v is diagonal.
        inside = u.mT @ found @ v.mT
        assert (inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-3


def test_prompts_of_rollouts() -> None:
    rollouts, train = module("rollouts"), module("train")
    texts = [[0, *range(10 * i, 10 * i + length), 1] for i, length in enumerate((5, 40, 900, 2000), 1)]
    prompts = rollouts.prompts_of(texts, 400, 0, seed=3)
    assert len(prompts) == 400
    for prompt in prompts:
        assert prompt[0] == 0 and 1 not in prompt[1:]
        assert 1 < len(prompt) <= train.LENGTH - rollouts.NEW_TOKENS
        # A piece of one text, in its order.
        assert prompt[1:] == list(range(prompt[1], prompt[1] + len(prompt) - 1))
    assert prompts == rollouts.prompts_of(texts, 400, 0, seed=3) != rollouts.prompts_of(texts, 400, 0, seed=4)


class _Zeros:
    """A text of zeros."""

    def batch(self, size: int, generator: torch.Generator) -> torch.Tensor:
        return torch.zeros(size, module("train").LENGTH + 1, dtype=torch.int64)


def test_drafts_are_trained_on_what_the_backbone_wrote(tmp_path: Path) -> None:
    """Anchors of rollouts lie where the first draft is a token that was written, and every block is in the window."""
    train = module("train")
    length, most = train.LENGTH, train.MOST_DRAFTS
    first = np.array([2, 17, 200, length - 96, 40], dtype=np.int32)
    end = np.array([98, 20, 296, length, 41], dtype=np.int32)
    tokens = np.full((len(first), length + 1), 7, dtype=np.uint16)
    np.savez(tmp_path / "r.npz", tokens=tokens, first=first, end=end)
    rollouts = train.Rollouts(tmp_path / "r.npz", torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    window, anchors, depths = train.draft_inputs(_Zeros(), rollouts, 400, 64, 5, generator)
    assert window[:200].eq(7).all() and window[200:].eq(0).all()
    assert int(anchors.min()) == 0 and int(anchors.max()) + most <= length - 1
    ranges = {(int(row.min()) + 1, int(row.max()) + 3) for row in anchors[:200]}
    for start, stop in ranges:
        assert any(start >= f and (stop <= e or stop <= f + 2) for f, e in zip(first, end, strict=True))
    assert int(depths.min()) == 1 and int(depths.max()) == most
    assert 0.5 < float((depths == 5).float().mean()) < 0.62
    window, anchors, _ = train.draft_inputs(_Zeros(), None, 8, 64, 5, generator)
    assert window.eq(0).all() and int(anchors.max()) + most <= length - 1


def test_a_captured_steps_rates_are_read_anew() -> None:
    """Rates are tensors that the optimisers share: a step replayed must not keep the rate it was captured with."""
    train = module("train")
    weights = torch.nn.ParameterDict(
        {"a/weight": torch.nn.Parameter(torch.randn(32, 32)), "norm": torch.ones(4)}
    )
    net = torch.nn.Module()
    net.weights = weights
    trainer = train.Trainer(net, "backbone", 1000, 3e-3, Path())
    rates = []
    for step in (0, 100, 500, 999):
        trainer.step = step
        trainer.set_rates()
        for group in trainer.optimiser.param_groups:
            assert group["lr"] is trainer.rates[0]
        assert trainer.muon.param_groups[0]["lr"] is trainer.rates[1]
        rates.append(float(trainer.rates[0]))
        assert float(trainer.rates[1]) == pytest.approx(train.MUON * rates[-1])
    assert rates[0] < rates[1] > rates[2] > rates[3] > 0
