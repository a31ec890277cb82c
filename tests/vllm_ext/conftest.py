"""Engines, checkpoints, the whole-model reference for them and prompts, for every test of the room."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="these tests run in vLLM's environment")

# In this process, so that tests can reach into the engine; test_server.py has an engine in its own processes.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["DEEPINFER_PLUGINS_STRICT"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402

from deepinfer_plugins.core import shipped  # noqa: E402
from deepinfer_plugins.model.checkpoint import Checkpoint  # noqa: E402
from deepinfer_plugins.model.make_checkpoint import make_checkpoint  # noqa: E402
from deepinfer_plugins.model.oracle import Oracle, compressed_vocab  # noqa: E402

NEW_TOKENS = 64
LENGTHS = (1, 2, 3, 5, 17, 31, 63, 64, 65, 127, 128, 130, 255, 301, 500, 700)


@dataclass
class Reference:
    """A checkpoint and what the oracle makes of it; each prompt is asked once."""

    folder: Path
    oracle: Oracle
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, shape: str) -> Reference:
        make_checkpoint(folder, shape)
        return cls.at(folder)

    @classmethod
    def at(cls, folder: Path) -> Reference:
        opened = Checkpoint.open(folder)
        tensors = {name: opened.read(name) for name in opened.names}
        return cls(folder, Oracle(opened.config, tensors, compressed_vocab(folder / "tokenizer.json")))

    def check(self, prompt: Sequence[int], generated: Sequence[int], label: str) -> None:
        """Fail unless the oracle would have generated the same."""
        generated = list(generated)
        known = self._known.get(tuple(prompt), [])
        if known[: len(generated)] == generated:
            return
        first = self.oracle.verify(list(prompt), generated)
        assert first is None, (
            f"{label}: prompt of {len(prompt)} tokens: token {first} is {generated[first]}, not the oracle's choice"
        )
        if len(generated) > len(known):
            self._known[tuple(prompt)] = generated


@dataclass
class Engine:
    """A running ``LLM`` and what it is checked against."""

    llm: Any
    reference: Reference

    def outputs(
        self, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS, **more: Any
    ) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **more
        )
        tokens = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(tokens, params, use_tqdm=False)

    def check(self, prompts: Sequence[Sequence[int]], label: str, new_tokens: int = NEW_TOKENS) -> list[Any]:
        """Generate for all prompts at once and hold the tokens against the reference."""
        outputs = self.outputs(prompts, new_tokens)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output.outputs[0].token_ids) == new_tokens
            self.reference.check(prompt, output.outputs[0].token_ids, label)
        return outputs

    def counter(self, name: str) -> int:
        """A counter of vLLM's metrics."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    def block_sizes(self) -> list[int]:
        """Tokens per block, group by group."""
        core = self.llm.llm_engine.engine_core.engine_core
        return [group.kv_cache_spec.block_size for group in core.scheduler.kv_cache_config.kv_cache_groups]


def _poison(model: torch.nn.Module) -> None:
    """NaN in every format that a record has: e4m3, fp32, and a scale of 2**128."""
    for layer in model.caches:
        layer.kv_cache.fill_(0xFF)


@contextmanager
def _running(reference: Reference, poison: bool, options: dict[str, Any]) -> Iterator[Engine]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = {"max_model_len": 1024, "disable_log_stats": False, "kv_cache_memory_bytes": 64 << 20}
    llm = LLM(str(reference.folder), **{**defaults, **options})
    try:
        if poison:
            llm.apply_model(_poison)
        yield Engine(llm, reference)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


Start = Callable[..., AbstractContextManager[Engine]]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The default checkpoint."""
    return Reference.of(tmp_path_factory.mktemp("checkpoint") / "small", "small")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The fewest layers that have every kind of cache and both levels of selection."""
    return Reference.of(tmp_path_factory.mktemp("checkpoint") / "tiny", "tiny")


@pytest.fixture(scope="session")
def trained() -> Reference:
    """The checkpoint that comes with the package."""
    return Reference.at(shipped.default_checkpoint())


@pytest.fixture(scope="session")
def start() -> Start:
    """``start(reference, poison=True, **options)``: an engine, one at a time, its caches full of NaN."""

    def start(reference: Reference, poison: bool = True, **options: Any) -> AbstractContextManager[Engine]:
        return _running(reference, poison, options)

    return start


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Sixteen, of 1 to 700 tokens, none a prefix of another."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(10, 1000, (n,), generator=generator).tolist() for n in LENGTHS]
