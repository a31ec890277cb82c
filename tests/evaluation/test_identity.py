"""What ``verify`` asks, how it compares, and what it says when an engine breaks the promise."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from deepinfer_plugins import cli
from deepinfer_plugins.commands import answer, verify
from deepinfer_plugins.core import shipped
from deepinfer_plugins.evaluation import identity
from deepinfer_plugins.evaluation.identity import (
    KINDS,
    Answer,
    Request,
    beginning,
    compare,
    cut_by_length,
    cut_by_stop,
    make_requests,
)


def given(tokens: list[int], logprobs: list[float], error: str | None = None, **more: Any) -> Answer:
    return Answer(
        tokens=tokens, logprobs=logprobs, error=error, steps=more.get("steps", [1] * len(tokens)), cached=0
    )


ANSWERS = [
    given([1, 2, 3], [-0.5, -1.0, -0.25]),
    given([7], [-2.0]),
    given([], [], "no room"),
]


def changed(**how: Any) -> list[Answer]:
    found = copy.deepcopy(ANSWERS)
    found[how.pop("request")].update(**how)  # type: ignore[typeddict-item]
    return found


def test_equal_answers() -> None:
    check = compare("same", ANSWERS, copy.deepcopy(ANSWERS))
    assert check.ok and (check.requests, check.equal) == (3, 3)
    assert check.evidence == {"log-probabilities": 4}


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


def test_what_never_happened_shows_nothing() -> None:
    check = compare("tight", ANSWERS, copy.deepcopy(ANSWERS), {"preemptions": 0, "drafts accepted": 7})
    assert check.first_difference is None and not check.ok
    assert check.missing == ["preemptions"] == check.as_dict()["missing"]
    assert check.as_dict()["evidence"] == {"preemptions": 0, "drafts accepted": 7, "log-probabilities": 4}
    none = compare("none", [], [])
    assert not none.ok and none.missing == ["log-probabilities"]


def test_the_beginning_of_an_answer() -> None:
    assert beginning(ANSWERS[0], 2)["tokens"] == [1, 2] and beginning(ANSWERS[0], 2)["logprobs"] == [
        -0.5,
        -1.0,
    ]
    assert beginning(ANSWERS[0], 3) == beginning(ANSWERS[0], 9) == ANSWERS[0]


class TestCuts:
    """Ends inside a window of tokens that one step brought."""

    request = Request(prompt=[5], max_tokens=9, seed=1, options={"temperature": 0.0})

    def test_by_length(self) -> None:
        answers = [
            given([*range(8)], [0.0] * 8, steps=[1, 2, 4, 1]),
            given([*range(3)], [0.0] * 3, steps=[1, 1, 1]),
            given([0], [0.0], steps=[1]),
            given([*range(3)], [0.0] * 3, steps=[1, 2]),
        ]
        first, last = cut_by_length([self.request] * 4, answers)
        assert (first.index, first.start, first.end) == (0, 3, 5)
        assert first.request == {**self.request, "max_tokens": 5}
        assert (last.index, last.start, last.end) == (3, 1, 2)
        assert first.is_inside(given([*range(5)], [0.0] * 5, steps=[1, 2, 2]))
        # Another window, though it has the end: a draft at its start was not accepted this time, or one more was.
        assert not first.is_inside(given([*range(5)], [0.0] * 5, steps=[1, 1, 2, 1]))
        assert not first.is_inside(given([*range(5)], [0.0] * 5, steps=[1, 4]))
        assert not first.is_inside(given([*range(6)], [0.0] * 6, steps=[1, 2, 3]))

    def test_by_a_stop_string(self) -> None:
        texts = {0: "ab", 1: "a", 2: "b", 3: "", 4: "\ufffd"}

        def decode(tokens: list[int]) -> str:
            return "".join(texts[token] for token in tokens)

        def cuts(tokens: list[int], steps: list[int], special: Sequence[int] = ()) -> list[Any]:
            answers = [given(tokens, [0.0] * len(tokens), steps=steps)]
            return [
                (cut.end, cut.request["options"]["stop"])
                for cut in cut_by_stop([self.request], answers, decode, special)
            ]

        # "b" was there before; "bb" was not. The longest window where it can be done is taken.
        assert cuts([0, 2, 1, 0], [1, 2, 1]) == [(2, ["bb"])]
        assert cuts([0, 1, 2, 1, 1, 0], [1, 2, 3]) == [(5, ["aa"])]
        # No text and half a character do not end a text.
        assert cuts([0, 3, 1, 0], [1, 2, 1]) == cuts([0, 4, 1, 0], [1, 2, 1]) == []
        # Behind a token that has a name and no text, engines do not agree on what the text is.
        assert cuts([3, 0, 2, 1], [1, 2, 1]) == [(2, ["b"])]
        assert cuts([3, 0, 2, 1], [1, 2, 1], special=[3]) == []
        assert cuts([0, 2, 3, 0], [1, 2, 1], special=[3]) == [(2, ["bb"])]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    tokenizer = Tokenizer.from_file(str(shipped.default_checkpoint() / "tokenizer.json"))
    documents = [
        shipped.Document(f"d{i}", "def get_name(self):\n    return self.name\n" * 40) for i in range(3)
    ]
    made = make_requests(tokenizer, documents, 64, 24, 160, seed=5)
    assert made == make_requests(tokenizer, documents, 64, 24, 160, seed=5)
    assert made != make_requests(tokenizer, documents, 64, 24, 160, seed=6)
    return made


def test_requests_are_mixed(requests: list[Request]) -> None:
    assert len({request["seed"] for request in requests}) == 64
    lengths = {len(request["prompt"]) for request in requests}
    assert min(lengths) >= 1 and max(lengths) <= 160 and len(lengths) > 15
    assert {request["max_tokens"] for request in requests} <= set(range(6, 25))
    for kind in KINDS:
        assert sum(request["options"] == kind for request in requests) == 8
    assert json.loads(json.dumps(requests)) == requests


class Engine:
    """Answers from the request and nothing else, unless told to look at its batch; drafts bring two tokens a step."""

    version = "0"
    by_batch = False
    never: set[str] = set()
    closed = 0

    def __init__(self, model: str, drafts: int, max_positions: int, tight: bool, **options: Any) -> None:
        assert max_positions > 0 and set(options) == {"at_once", "small_pages", "chunk", "engine_options"}
        assert options["engine_options"] == ENGINE_OPTIONS
        self.drafts, self.tight = drafts, tight
        self.cached = 0

    def answer(
        self, requests: Sequence[Request], at_once: int, aborts: Mapping[int, int], done: Callable[[], None]
    ) -> tuple[list[Answer], dict[str, int]]:
        answers = []
        shift = at_once if Engine.by_batch else 0
        for index, request in enumerate(requests):
            # By position, so that the last token of an answer is new there.
            tokens = [(request["seed"] + 7 * i) % 97 + 40 + shift for i in range(request["max_tokens"])]
            if stop := request["options"].get("stop"):
                text = [TOKENIZER.decode(tokens[: i + 1]) for i in range(len(tokens))]
                tokens = tokens[: 1 + next(i for i, so_far in enumerate(text) if stop[0] in so_far)]
            tokens = tokens[: aborts.get(index)]
            width = 2 if self.drafts else 1
            steps = [1, *(min(width, len(tokens) - at) for at in range(1, len(tokens), width))]
            answers.append(
                Answer(
                    tokens=tokens, logprobs=[-0.5] * len(tokens), error=None, steps=steps, cached=self.cached
                )
            )
            done()
        self.cached = 1
        happened = {"aborted": len(aborts), "preemptions": int(self.tight)}
        if self.drafts:
            happened |= {"drafted": 9, "verified": 5, "accepted": 2}
        return answers, {name: 0 if name in Engine.never else count for name, count in happened.items()}

    def forget(self) -> None:
        self.cached = 0

    def close(self) -> None:
        Engine.closed += 1


ENGINE_OPTIONS = {"seed": 3}
TOKENIZER = Tokenizer.from_file(str(shipped.default_checkpoint() / "tokenizer.json"))


class Here:
    """The engine's process, as a thread of this one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        (asked, stdin), (stdout, said) = os.pipe(), os.pipe()
        self.stdin, self.stdout, self.stderr = os.fdopen(stdin, "w"), os.fdopen(stdout), io.StringIO()

        def run() -> None:
            with os.fdopen(asked) as lines, os.fdopen(said, "w") as answers:
                answer.main(lines, answers)

        self._thread = Thread(target=run)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        assert not self._thread.is_alive()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    """The engine above in place of vLLM, in this process."""
    monkeypatch.setitem(answer._ANSWERERS, "vllm", f"{__name__}:Engine")
    monkeypatch.setattr(Engine, "by_batch", False)
    monkeypatch.setattr(Engine, "never", set())
    monkeypatch.setattr(Engine, "closed", 0)
    monkeypatch.setattr(verify.subprocess, "Popen", Here)
    return Engine


ASKED = {
    "requests": 9,
    "max_tokens": 8,
    "concurrency": (1, 4),
    "chunks": (2,),
    "engine_options": ENGINE_OPTIONS,
}


def options(**more: Any) -> verify.Options:
    return verify.Options("vllm", **{**ASKED, **more})


def test_an_engine_that_keeps_the_promise(
    fake: type[Engine], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert verify.main(options(depths=(1, 5, 8), thorough=True), as_json=True) == 0
    said, shown = capfd.readouterr()
    # Each as soon as it is known.
    assert shown.index("5 drafts, small pages, alone: equal") < shown.index("8 drafts, 4 at a time: equal")
    found = json.loads(said[said.index("{\n") :])
    assert found["ok"] and set(found) >= {"engine", "checks", "ok"}
    assert [check["name"] for check in found["checks"]] == [
        "no drafts, 4 at a time",
        "5 drafts, small pages, alone",
        "5 drafts, small pages, 4 at a time",
        "5 drafts, small pages, cached prefixes",
        "5 drafts, small pages, requests aborted beside others",
        "5 drafts, small pages, max_tokens inside a window",
        "5 drafts, small pages, a stop string inside a window",
        "1 drafts, alone",
        "1 drafts, 4 at a time",
        "8 drafts, alone",
        "8 drafts, 4 at a time",
        "5 drafts, random budgets, alone",
        "5 drafts, random budgets, 4 at a time",
        "no drafts, chunks of 2, small cache, 4 at a time",
        "5 drafts, random budgets, chunks of 2, small cache, 4 at a time",
    ]
    for check in found["checks"]:
        assert 0 < check["requests"] == check["equal"] <= 9 and not check["missing"], check
    other = tmp_path / "other.json"
    other.write_text(json.dumps(found))
    assert verify.main(options(other_engine=other), False) == 0
    assert "the other engine" in capfd.readouterr().out
    assert verify.main(options(requests=8, other_engine=other), False) == 2
    assert "answers other requests" in capfd.readouterr().err
    found["answers"][3]["tokens"][0] += 1
    other.write_text(json.dumps(found))
    assert verify.main(options(other_engine=other), False) == 1
    assert "request 3, new token 0" in " ".join(capfd.readouterr().out.split())


def test_an_engine_that_breaks_it(
    fake: type[Engine], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake, "by_batch", True)
    assert verify.main(options(), as_json=False) == 1
    said = " ".join(capfd.readouterr().out.split())
    assert "no drafts, 4 at a time: request 0, new token 0: token" in said
    assert "5 drafts, small pages, alone: request" not in said


def test_a_reference_of_several_at_a_time(fake: type[Engine], capfd: pytest.CaptureFixture[str]) -> None:
    """As many at a time as the reference, in another order, is then a way of its own, and so is each alone."""
    assert verify.main(options(reference_at_once=3, concurrency=(1, 3)), as_json=True) == 0
    said = capfd.readouterr().out
    found = json.loads(said[said.index("{\n") :])
    assert (found["reference_at_once"], found["engine_options"]) == (3, ENGINE_OPTIONS)
    names = [check["name"] for check in found["checks"]]
    assert names[:2] == ["no drafts, alone", "no drafts, 3 at a time"]


def test_a_difference_of_a_cut_request_has_the_request_s_number(
    fake: type[Engine], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first has two tokens, too few for an end inside a window."""

    def make(*arguments: Any) -> list[Request]:
        first, second, *others = make_requests(*arguments)
        return [{**first, "max_tokens": 2}, {**second, "max_tokens": 8}, *others]

    monkeypatch.setattr(identity, "make_requests", make)
    monkeypatch.setattr(fake, "by_batch", True)
    assert verify.main(options(), as_json=False) == 1
    assert "max_tokens inside a window: request 1, new token 0" in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize(
    ("never", "said"),
    [
        ("preemptions", "small cache, 4 at a time: shows nothing, for this never happened: preemptions"),
        ("accepted", "5 drafts, small pages, alone: shows nothing, for this never happened: drafts accepted"),
        ("aborted", "aborted beside others: shows nothing, for this never happened: aborted midway"),
    ],
)
def test_an_engine_in_which_it_never_happens(
    fake: type[Engine],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    never: str,
    said: str,
) -> None:
    monkeypatch.setattr(fake, "never", {never})
    assert verify.main(options(), as_json=False) == 1
    assert said in " ".join(capfd.readouterr().out.split())


def test_an_engine_that_does_not_start(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert verify.main(verify.Options("vllm", model=str(tmp_path)), as_json=True) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("verify: ")


def test_an_engine_that_ends(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """In a process of its own: that there is no such engine is its last word."""
    assert verify.main(verify.Options("none", requests=1), as_json=True) == 2
    said = capfd.readouterr()
    assert said.out == "" and "none ended with status 1" in said.err and "KeyError: 'none'" in said.err


def test_an_engine_that_does_not_end(
    fake: type[Engine], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it has answered counts."""
    killed: list[Here] = []

    class Lasting(Here):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                raise subprocess.TimeoutExpired("engine", timeout)
            return super().wait()

        def kill(self) -> None:
            killed.append(self)

    monkeypatch.setattr(verify.subprocess, "Popen", Lasting)
    assert verify.main(options(), as_json=False) == 0 and len(killed) == 3


def test_lists_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[verify.Options] = []
    monkeypatch.setattr(verify, "main", lambda options, as_json: asked.append(options) or 0)
    run = CliRunner().invoke
    command = ["verify", "--engine", "vllm"]
    assert run(cli.app, command).exit_code == 0
    assert (
        run(cli.app, [*command, "--depths", "8,1..3,2", "--concurrency", "32,1", "--chunks", "7"]).exit_code
        == 0
    )
    assert run(cli.app, [*command, "--thorough", "--requests", "9"]).exit_code == 0
    few, some, all_of_them = asked
    assert few == verify.Options("vllm")
    assert (some.depths, some.concurrency, some.chunks) == ((1, 2, 3, 8), (1, 32), (7,))
    assert (all_of_them.requests, all_of_them.depths) == (9, (1, 2, 3, 4, 5, 6, 7, 8))
    assert all_of_them.concurrency == (1, 8, 32) and all_of_them.thorough and not few.thorough
    assert run(cli.app, [*command, "--engine-options", '{"seed": 1}']).exit_code == 0
    assert asked.pop().engine_options == {"seed": 1}
    for wrong in (
        ["--depths", "9"],
        ["--depths", "1-3"],
        ["--concurrency", "0"],
        ["--chunks", "a"],
        ["--engine-options", "seed=1"],
        ["--engine-options", "[1]"],
    ):
        assert run(cli.app, [*command, *wrong]).exit_code == 2
    assert len(asked) == 3
