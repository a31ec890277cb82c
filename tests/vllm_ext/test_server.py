"""``vllm serve`` on the default checkpoint, over loopback, with vLLM's engine in a process of its own."""

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Half a minute on an idle machine.
START_TIMEOUT_S = 500
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@dataclass
class Server:
    """A running server and the name of the model it serves."""

    url: str
    model: str

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        data = json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer, but the last, which says that it ends."""
        data = json.dumps({"model": self.model, "stream": True, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=240) as answer:
            events = answer.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def complete(self, prompt: list[int], new_tokens: int) -> list[int]:
        status, answer = self.post(
            "/v1/completions",
            prompt=prompt,
            max_tokens=new_tokens,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
        )
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def server(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """No option but the port; in the batch-invariant mode."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "OMP_NUM_THREADS": "1",
        "DEEPINFER_BATCH_INVARIANT": "1",
    }
    command = [Path(sys.executable).parent / "vllm", "serve", small.folder, "--host", "127.0.0.1"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*map(str, command), "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                alive = process.poll() is None and time.monotonic() < deadline
                assert alive, f"the server did not come up:\n{log.read_text()[-4000:]}"
                time.sleep(0.3)
        yield Server(url, str(small.folder))
    finally:
        # Its engine too: it is of the server's group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_completions(server: Server, small: Any, prompts: list[list[int]]) -> None:
    chosen = prompts[3:9]
    with ThreadPoolExecutor(len(chosen)) as pool:
        for prompt, tokens in zip(chosen, pool.map(lambda prompt: server.complete(prompt, 16), chosen)):
            small.check(prompt, tokens, "vllm serve")


def test_chat_goes_through_the_release_encoding(server: Server, small: Any) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    status, answer = server.post(
        "/v1/chat/completions",
        messages=messages,
        max_tokens=8,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    assert status == 200, answer
    small.check(answer["prompt_token_ids"], answer["choices"][0]["token_ids"], "chat")
    status, encoded = server.post("/tokenize", messages=messages)
    assert status == 200 and encoded["tokens"] == answer["prompt_token_ids"]


ASKED = [
    ("/v1/completions", {"prompt": [5, 6, 7]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello there"}]}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_streams_name_the_seeds_that_were_chosen(server: Server, path: str, body: dict[str, Any]) -> None:
    more = {"max_tokens": 6, "temperature": 1, "ignore_eos": True, "return_token_ids": True}
    seeds: dict[int, int] = {}
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for event in server.stream(path, **body, **more, n=2):
        for choice in event["choices"]:
            assert choice["index"] not in seeds or "seed" not in choice
            seeds |= {choice["index"]: choice["seed"]} if "seed" in choice else {}
            tokens[choice["index"]] += choice.get("token_ids") or []
    assert set(seeds) == {0, 1} and seeds[0] != seeds[1] and tokens[0] != tokens[1]
    for index, seed in seeds.items():
        status, again = server.post(path, **body, **more, seed=seed)
        assert status == 200 and again["choices"][0]["token_ids"] == tokens[index], again


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_answers_name_the_seeds_that_were_chosen(server: Server, path: str, body: dict[str, Any]) -> None:
    more = {"max_tokens": 6, "temperature": 1, "ignore_eos": True, "return_token_ids": True}
    status, answer = server.post(path, **body, **more, n=2)
    assert status == 200, answer
    first, second = ((choice["seed"], choice["token_ids"]) for choice in answer["choices"])
    assert first[0] != second[0] and first[1] != second[1]
    status, again = server.post(path, **body, **more, seed=second[0])
    assert status == 200, again
    assert (again["choices"][0]["seed"], again["choices"][0]["token_ids"]) == second


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": [5, 70000]}, "70000"),
        ("/v1/completions", {"prompt": [5] * 5000}, "4096"),
        ("/v1/completions", {"prompt": [5], "temperature": -1}, "temperature"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "not a multimodal model",
        ),
    ],
)
def test_bad_requests_fail_alone(
    server: Server, small: Any, path: str, body: dict[str, Any], said: str
) -> None:
    good = [5, 6, 7]
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(server.complete, good, 8)
        status, answer = server.post(path, **body)
        assert status == 400 and said in answer["error"]["message"], answer
        small.check(good, other.result(), "beside a bad request")
