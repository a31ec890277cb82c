"""A server, a checkpoint, the whole-model reference for it and prompts, for every test of the room."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="these tests run in SGLang's environment")

import torch  # noqa: E402

from deepinfer_plugins.evaluation.engine import Generated, ReferenceEngine  # noqa: E402
from deepinfer_plugins.features.sampling import SamplingParams  # noqa: E402
from deepinfer_plugins.model.checkpoint import Checkpoint  # noqa: E402
from deepinfer_plugins.model.config import ModelConfig  # noqa: E402
from deepinfer_plugins.model.make_checkpoint import make_checkpoint  # noqa: E402
from deepinfer_plugins.model.oracle import Oracle, compressed_vocab  # noqa: E402

# SGLang's parameters, and what they are in no engine's words. A bias that leaves a few tokens to choose from makes
# them repeat, and drafts be accepted. They are the letters a to d.
FEW = {82: 12.0, 83: 11.0, 84: 12.5, 85: 11.5}
CASES: tuple[tuple[dict[str, Any], SamplingParams], ...] = (
    ({"temperature": 0}, SamplingParams(seed=0, temperature=0)),
    ({"sampling_seed": 7}, SamplingParams(seed=7)),
    ({"sampling_seed": -1, "temperature": 0.7}, SamplingParams(seed=2**64 - 1, temperature=0.7)),
    (
        {"sampling_seed": 11, "temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.05},
        SamplingParams(seed=11, temperature=0.7, top_p=0.95, top_k=40, min_p=0.05),
    ),
    (
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "logit_bias": FEW},
        SamplingParams(seed=0, temperature=0, repetition_penalty=1.3, frequency_penalty=0.7, logit_bias=FEW),
    ),
    (
        {"sampling_seed": 2**40, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": FEW},
        SamplingParams(seed=2**40, presence_penalty=0.5, frequency_penalty=0.2, logit_bias=FEW),
    ),
    ({"temperature": 0, "logit_bias": FEW}, SamplingParams(seed=0, temperature=0, logit_bias=FEW)),
    ({"sampling_seed": 5, "logit_bias": FEW}, SamplingParams(seed=5, logit_bias=FEW)),
    # The end of sequence would be the most probable token; it is barred from three of four positions.
    (
        {"sampling_seed": 6, "logit_bias": {1: 20.0}, "min_new_tokens": 9},
        SamplingParams(seed=6, logit_bias={1: 20.0}, min_tokens=9, suppressed=(1,)),
    ),
)
COUNT = 12

# Half a minute on an idle machine.
START_TIMEOUT_S = 600


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, without what would slow the engine down or change its plugins."""
    hidden = ("PYTHONDONTWRITEBYTECODE", "SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_EXTERNAL_MODEL_PACKAGE")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "DEEPINFER_PLUGINS_STRICT": "1",
        **variables,
    }


class Refused(Exception):
    """The server's answer was an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


@dataclass(frozen=True)
class Server:
    """A running server.

    Args:
        url: Where it listens.
        log: The file its output goes to.
        start_s: Seconds until it answered.
    """

    url: str
    log: Path
    start_s: float

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 240) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode()) from error
        return json.loads(text) if text.startswith((b"{", b"[")) else text.decode()

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The events of a streamed answer, but the last, which says that it ends."""
        data = json.dumps({**body, "stream": True}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=240) as answer:
            events = answer.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ignore_eos: bool = True, **more: Any
    ) -> list[dict[str, Any]]:
        """Greedy generation of all prompts at once; the answers of ``/generate``, in order."""
        return self.post(
            "/generate",
            {
                "input_ids": [list(prompt) for prompt in prompts],
                "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": ignore_eos},
                **more,
            },
        )

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[Mapping[str, Any]],
        count: int = COUNT,
        **more: Any,
    ) -> list[dict[str, Any]]:
        """Generation with parameters for each prompt, all at once; ``count`` tokens where they do not say."""
        given = [{"max_new_tokens": count, "ignore_eos": True, **some} for some in params]
        return self.post(
            "/generate", {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": given, **more}
        )

    def tokens(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        return [answer["output_ids"] for answer in self.generate(prompts, new_tokens)]

    def flush(self) -> None:
        """Forget every cached prefix."""
        deadline = time.monotonic() + 20
        while True:
            try:
                self.post("/flush_cache", {})
                return
            except Refused:
                # A request that has just been answered may still be in the scheduler's last batch.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


@contextmanager
def serving(checkpoint: Path, log: Path, *arguments: str, **variables: str) -> Iterator[Server]:
    """``python -m sglang.launch_server`` on a checkpoint.

    Args:
        checkpoint: The folder.
        log: Where its output goes.
        arguments: More of its command line.
        variables: More of its environment.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)]
    # An idle scheduler would keep a core busy that other tests need.
    command += ["--host", "127.0.0.1", "--sleep-on-idle"]
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(**variables),
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5)
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() - started > START_TIMEOUT_S:
                        raise AssertionError(
                            f"the server did not come up:\n{log.read_text()[-4000:]}"
                        ) from None
                    time.sleep(0.3)
            yield Server(url, log, time.monotonic() - started)
        finally:
            # Its scheduler and detokenizer too: they are of its group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


NEW_TOKENS = 64
LENGTHS = (1, 2, 3, 5, 17, 31, 63, 64, 65, 127, 128, 130, 255, 301, 500, 700)


@dataclass
class Reference:
    """What the oracle says: greedy tokens, asked once for each prompt."""

    oracle: Oracle
    config: ModelConfig
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def check(self, prompt: Sequence[int], generated: list[int], label: str) -> None:
        """Fail unless the oracle would have generated the same."""
        known = self._known.get(tuple(prompt), [])
        if known[: len(generated)] == generated:
            return
        first = self.oracle.verify(list(prompt), generated)
        assert first is None, (
            f"{label}: prompt of {len(prompt)} tokens: token {first} is {generated[first]}, not the oracle's choice"
        )
        if len(generated) > len(known):
            self._known[tuple(prompt)] = generated


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, "tiny")
    return folder


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    opened = Checkpoint.open(checkpoint)
    tensors = {name: opened.read(name) for name in opened.names}
    return Reference(
        Oracle(opened.config, tensors, compressed_vocab(checkpoint / "tokenizer.json")), opened.config
    )


@pytest.fixture(scope="session")
def prompts(reference: Reference) -> list[list[int]]:
    """Sixteen, of 1 to 700 tokens, none a prefix of another."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(10, 1000, (n,), generator=generator).tolist() for n in LENGTHS]


Serving = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def serve(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Serving:
    """Start a server on the checkpoint: ``serve(*arguments, **variables)``."""

    def start(*arguments: str, model: Path = checkpoint, **variables: str) -> AbstractContextManager[Server]:
        return serving(model, tmp_path_factory.mktemp("server") / "log", *arguments, **variables)

    return start


@pytest.fixture(scope="session")
def server(serve: Serving) -> Iterator[Server]:
    """As a user starts it, but for the chunk size. Caches hold NaN until they are written."""
    with serve("--chunked-prefill-size", "128", DEEPINFER_TEST_POISON_CACHES="1") as running:
        yield running


@dataclass
class Sampled:
    """What the model's own loop, without an engine, makes of prompts and parameters; asked once for each."""

    loop: ReferenceEngine
    _known: dict[tuple[Any, ...], list[Generated]] = field(default_factory=dict)

    def __call__(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], count: int, depth: int = 0
    ) -> list[Generated]:
        key = (tuple(map(tuple, prompts)), repr(params), count, depth)
        if key not in self._known:
            self._known[key] = self.loop.generate(prompts, count, depth, params)
        return self._known[key]


@pytest.fixture(scope="session")
def sampled(checkpoint: Path) -> Sampled:
    return Sampled(ReferenceEngine(checkpoint, max_requests=16))


Cases = tuple[tuple[dict[str, Any], SamplingParams], ...]


@pytest.fixture(scope="session")
def cases() -> Cases:
    """Ways of sampling: as SGLang's parameters, and in no engine's words."""
    return CASES


@pytest.fixture(scope="session")
def few() -> dict[int, float]:
    """A bias that leaves few tokens to choose from."""
    return FEW


@pytest.fixture(scope="session")
def engine_environment() -> Callable[..., dict[str, str]]:
    return environment
