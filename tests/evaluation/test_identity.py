"""What ``verify`` asks, how it compares, and what it says when an engine breaks the promise."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from deepinfer_plugins.commands import answer, verify
from deepinfer_plugins.core import shipped
from deepinfer_plugins.evaluation.identity import KINDS, Answer, Request, compare, make_requests

ANSWERS = [
    Answer(tokens=[1, 2, 3], logprobs=[-0.5, -1.0, -0.25], error=None),
    Answer(tokens=[7], logprobs=[-2.0], error=None),
    Answer(tokens=[], logprobs=[], error="no room"),
]


def changed(**how: Any) -> list[Answer]:
    found = copy.deepcopy(ANSWERS)
    found[how.pop("request")].update(**how)  # type: ignore[typeddict-item]
    return found


def test_equal_answers() -> None:
    check = compare("same", ANSWERS, copy.deepcopy(ANSWERS))
    assert check.ok and (check.requests, check.equal) == (3, 3)
    assert compare("none", [], []).ok


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ({"request": 0, "tokens": [1, 9, 3]}, (0, 1, "token", 2, 9)),
        ({"request": 0, "tokens": [1, 2]}, (0, 2, "length", 3, None)),
        ({"request": 1, "tokens": [7, 8], "logprobs": [-2.0, -1.0]}, (1, 1, "length", None, 8)),
        (
            {"request": 0, "logprobs": [-0.5, -1.0, -0.25000000000000006]},
            (0, 2, "logprob", -0.25, -0.25000000000000006),
        ),
        ({"request": 0, "logprobs": []}, (0, 0, "logprob", -0.5, None)),
        ({"request": 2, "error": None}, (2, 0, "error", "no room", None)),
        ({"request": 1, "error": "out of memory"}, (1, 0, "error", None, "out of memory")),
    ],
)
def test_the_first_difference_is_named(how: dict[str, Any], where: tuple[Any, ...]) -> None:
    check = compare("other", ANSWERS, changed(**how))
    assert not check.ok and (check.requests, check.equal) == (3, 2)
    assert check.first_difference is not None
    at = check.first_difference
    assert (at.request, at.position, at.what, at.expected, at.found) == where


def test_log_probabilities_are_not_compared_where_engines_define_them_differently() -> None:
    assert compare("other engine", ANSWERS, changed(request=0, logprobs=[0.0, 0.0, 0.0]), logprobs=False).ok


def test_an_answer_too_few_is_no_agreement() -> None:
    with pytest.raises(ValueError, match="2 answers for 3 requests"):
        compare("short", ANSWERS, ANSWERS[:2])


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    tokenizer = Tokenizer.from_file(str(shipped.default_checkpoint() / "tokenizer.json"))
    documents = [
        shipped.Document(f"d{i}", "def get_name(self):\n    return self.name\n" * 40) for i in range(3)
    ]
    made = make_requests(tokenizer, documents, 63, 24, 160, seed=5)
    assert made == make_requests(tokenizer, documents, 63, 24, 160, seed=5)
    assert made != make_requests(tokenizer, documents, 63, 24, 160, seed=6)
    return made


def test_requests_are_mixed(requests: list[Request]) -> None:
    assert len({request["seed"] for request in requests}) == 63
    lengths = {len(request["prompt"]) for request in requests}
    assert min(lengths) >= 1 and max(lengths) <= 160 and len(lengths) > 15
    assert {request["max_tokens"] for request in requests} <= set(range(6, 25))
    for kind in KINDS:
        assert sum(request["options"] == kind for request in requests) == 9
    assert json.loads(json.dumps(requests)) == requests


class Engine:
    """Answers from the request and nothing else, unless told to look at its batch."""

    version = "0"
    by_batch = False
    closed = 0

    def __init__(self, model: str, drafts: int, max_positions: int, at_once: int) -> None:
        assert max_positions > 0 and at_once > 0

    def answer(self, requests: list[Request]) -> list[Answer]:
        shift = len(requests) if Engine.by_batch else 0
        return [
            Answer(tokens=[request["seed"] % 97 + shift] * request["max_tokens"], logprobs=[], error=None)
            for request in requests
        ]

    def close(self) -> None:
        Engine.closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Engine]:
    """The engine above in place of vLLM, in this process."""
    monkeypatch.setitem(answer._ANSWERERS, "vllm", f"{__name__}:Engine")
    monkeypatch.setattr(Engine, "by_batch", False)
    monkeypatch.setattr(Engine, "closed", 0)

    def here(
        options: verify.Options,
        folder: Path,
        requests: list[Request],
        drafts: int,
        environment: Any,
        runs: Any,
        *rest: Any,
    ) -> tuple[dict[str, list[Answer]], str]:
        plan = {
            "engine": options.engine,
            "model": str(folder),
            "drafts": drafts,
            "max_positions": 9,
            "at_once": 9,
            "requests": requests,
            "runs": runs,
        }
        plan_file, answers_file = tmp_path / "plan", tmp_path / "answers"
        plan_file.write_text(json.dumps(plan))
        answer.main(plan_file, answers_file, io.StringIO())
        found = json.loads(answers_file.read_text())
        return found["runs"], found["version"]

    monkeypatch.setattr(verify, "_answers", here)
    return Engine


def test_an_engine_that_keeps_the_promise(
    fake: type[Engine], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert verify.main(verify.Options("vllm", requests=9, max_tokens=4), as_json=True) == 0
    said = capfd.readouterr().out
    found = json.loads(said[said.index("{\n") :])
    assert found["ok"] and len(found["checks"]) == 7 and fake.closed == 3
    assert all(check["requests"] == check["equal"] == 9 for check in found["checks"])
    other = tmp_path / "other.json"
    other.write_text(json.dumps(found))
    assert verify.main(verify.Options("vllm", requests=9, max_tokens=4, other_engine=other), False) == 0
    assert "the other engine" in capfd.readouterr().out
    assert verify.main(verify.Options("vllm", requests=8, max_tokens=4, other_engine=other), False) == 2
    assert "answers other requests" in capfd.readouterr().err
    found["answers"][3]["tokens"][0] += 1
    other.write_text(json.dumps(found))
    assert verify.main(verify.Options("vllm", requests=9, max_tokens=4, other_engine=other), False) == 1
    assert "request 3, new token 0" in " ".join(capfd.readouterr().out.split())


def test_an_engine_that_breaks_it(
    fake: type[Engine], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake, "by_batch", True)
    assert verify.main(verify.Options("vllm", requests=9, max_tokens=4), as_json=False) == 1
    said = " ".join(capfd.readouterr().out.split())
    assert "no drafts, all together: request 0, new token 0: token" in said and "5 drafts, alone:" not in said


def test_an_engine_that_does_not_start(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert verify.main(verify.Options("vllm", model=str(tmp_path)), as_json=True) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("verify: ")
