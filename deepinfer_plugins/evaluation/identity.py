"""Whether an engine answers the same however it is run: requests, answers, and where two answers part."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from deepinfer_plugins.core.shipped import Document

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "state": {"enum": ["open", "closed", "pending"]},
        "paid": {"type": "boolean"},
    },
    "required": ["id", "state", "paid"],
}

# One kind after the other is asked for; both engines take these names.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"temperature": 0.7, "json_schema": SCHEMA},
    {"temperature": 1.0},
    # Few tokens to choose from: even the drafts of a model that was never trained are then accepted often.
    {"temperature": 1.0, "logit_bias": {"40": 40.0, "41": 40.5, "42": 39.5}},
)


class Request(TypedDict):
    """What is asked, as JSON.

    Args:
        prompt: Token ids.
        max_tokens: New tokens at most.
        seed: Of its noise.
        options: Of sampling, by the names that both engines use, and ``json_schema``.
    """

    prompt: list[int]
    max_tokens: int
    seed: int
    options: dict[str, Any]


class Answer(TypedDict):
    """What an engine made of a request, as JSON.

    Args:
        tokens: Token ids.
        logprobs: As the engine reports them, of each token; empty if it was asked for none.
        error: Why there is no answer; None if there is one, or if it was to be aborted.
        steps: How many tokens each step of the engine brought; their sum is the number of tokens.
        cached: Tokens of the prompt that the engine found in its cache.
    """

    tokens: list[int]
    logprobs: list[float]
    error: str | None
    steps: list[int]
    cached: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer is not the expected one.

    Args:
        request: Which, from 0 on.
        position: Of the token among the new ones, from 0 on.
        what: ``"token"``, ``"logprob"``, ``"length"`` or ``"error"``.
        expected: There, or None where that answer had ended.
        found: Likewise.
    """

    request: int
    position: int
    what: str
    expected: float | str | None
    found: float | str | None


@dataclass(frozen=True, slots=True)
class Check:
    """One way to run the requests, held against the reference way.

    Args:
        name: How they were run.
        requests: How many were compared.
        equal: How many of them had equal tokens and log-probabilities.
        first_difference: Of those that had not; None if all had.
        evidence: How often what the check is about happened, by what that is.
    """

    name: str
    requests: int
    equal: int
    first_difference: Difference | None
    evidence: Mapping[str, int] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """What the check is about and never happened: it then shows nothing."""
        return [what for what, count in self.evidence.items() if count < 1]

    @property
    def ok(self) -> bool:
        return self.first_difference is None and not self.missing

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "missing": self.missing}


def make_requests(
    tokenizer: Tokenizer, documents: Sequence[Document], count: int, max_tokens: int, longest: int, seed: int
) -> list[Request]:
    """Requests of mixed length and sampling, every one with a seed.

    Args:
        tokenizer: The model's.
        documents: Text that prompts begin.
        count: How many.
        max_tokens: New tokens at most; requests differ, down to a quarter of it.
        longest: Tokens of a prompt at most.
        seed: Of everything that is drawn here.
    """
    rng = random.Random(seed)
    requests: list[Request] = []
    for index in range(count):
        document = rng.choice(documents)
        length = max(1, round(longest ** rng.random()))
        # A token has seldom more than eight characters in it.
        ids = tokenizer.encode(document.text[: 8 * length], add_special_tokens=True).ids[:length]
        requests.append(
            Request(
                prompt=ids,
                max_tokens=rng.randint(max(1, max_tokens // 4), max_tokens),
                seed=rng.getrandbits(62),
                options=KINDS[index % len(KINDS)],
            )
        )
    return requests


def compare(
    name: str,
    expected: Sequence[Answer],
    found: Sequence[Answer],
    evidence: Mapping[str, int] | None = None,
    logprobs: bool = True,
) -> Check:
    """Hold answers against the expected ones.

    Args:
        name: How ``found`` came about.
        expected: The reference.
        found: As many, in the same order.
        evidence: See :class:`Check`.
        logprobs: Whether log-probabilities must be equal too, to the last bit.
    """
    if len(expected) != len(found):
        raise ValueError(f"{name}: {len(found)} answers for {len(expected)} requests")
    differences = [
        difference
        for index, (one, other) in enumerate(zip(expected, found, strict=True))
        if (difference := _difference(index, one, other, logprobs)) is not None
    ]
    happened = dict(evidence or {})
    if logprobs:
        happened["log-probabilities"] = sum(len(answer["logprobs"]) for answer in expected)
    first = next(iter(differences), None)
    return Check(name, len(expected), len(expected) - len(differences), first, happened)


def beginning(answer: Answer, length: int) -> Answer:
    """The answer if it had ended after ``length`` tokens."""
    if length >= len(answer["tokens"]):
        return answer
    return {**answer, "tokens": answer["tokens"][:length], "logprobs": answer["logprobs"][:length]}


@dataclass(frozen=True, slots=True)
class Cut:
    """A request that ends inside a window of tokens which one step brought.

    Args:
        index: Of the request that it comes from.
        request: The request with its end.
        start: Tokens before the window.
        end: Tokens of the answer: more than ``start``, and fewer than with all of the window.
    """

    index: int
    request: Request
    start: int
    end: int

    def is_inside(self, answer: Answer) -> bool:
        """Whether the window was the same when the request was run with its end."""
        return len(answer["tokens"]) == self.end and sum(answer["steps"][:-1]) == self.start


def cut_by_length(requests: Sequence[Request], answers: Sequence[Answer]) -> list[Cut]:
    """Requests whose ``max_tokens`` ends them inside the longest window that they had.

    Args:
        requests: As they were asked.
        answers: Theirs, with drafts.
    """
    return _cut(requests, answers, lambda answer, start, end: {"max_tokens": end})


def cut_by_stop(
    requests: Sequence[Request],
    answers: Sequence[Answer],
    decode: Callable[[list[int]], str],
    special: Collection[int] = (),
) -> list[Cut]:
    """Requests which a stop string ends inside the longest window that they had.

    Args:
        requests: As they were asked.
        answers: Theirs, with drafts.
        decode: The text of tokens.
        special: Tokens which leave no text. No end is behind one: SGLang looks for stop strings in their names too, and
            vLLM does not.
    """

    def stop(answer: Answer, start: int, end: int) -> Mapping[str, Any] | None:
        if any(token in special for token in answer["tokens"][:end]):
            return None
        before, text = (decode(answer["tokens"][:length]) for length in (end - 1, end))
        # Half a character is no text yet.
        if text == before or not text.startswith(before) or "\ufffd" in text:
            return None
        # The shortest string that the token completes and nothing before it did.
        lengths = range(1, len(text) + 1)
        shortest = next(length for length in lengths if text.find(text[-length:]) == len(text) - length)
        return {"stop": [text[-shortest:]]}

    return _cut(requests, answers, stop)


def _cut(
    requests: Sequence[Request],
    answers: Sequence[Answer],
    how: Callable[[Answer, int, int], Mapping[str, Any] | None],
) -> list[Cut]:
    """By what ``how`` makes of an answer, a window's start and an end in it: what changes, or None for nothing."""
    cuts = []
    for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        starts = [sum(answer["steps"][:step]) for step in range(len(answer["steps"]))]
        # The last window may itself be cut.
        windows = sorted(zip(answer["steps"], starts, strict=True), key=lambda window: -window[0])
        for size, start in windows:
            end = start + (size + 1) // 2
            if size < 2 or (change := how(answer, start, end)) is None:
                continue
            made = dict(change)
            max_tokens = made.pop("max_tokens", request["max_tokens"])
            changed = Request(
                prompt=request["prompt"],
                max_tokens=max_tokens,
                seed=request["seed"],
                options={**request["options"], **made},
            )
            cuts.append(Cut(index, changed, start, end))
            break
    return cuts


def _difference(request: int, expected: Answer, found: Answer, logprobs: bool) -> Difference | None:
    if expected["error"] != found["error"]:
        return Difference(request, 0, "error", expected["error"], found["error"])
    for position, (one, other) in enumerate(zip(expected["tokens"], found["tokens"], strict=False)):
        if one != other:
            return Difference(request, position, "token", one, other)
    lengths = len(expected["tokens"]), len(found["tokens"])
    if lengths[0] != lengths[1]:
        at = min(lengths)
        return Difference(request, at, "length", _at(expected["tokens"], at), _at(found["tokens"], at))
    if logprobs:
        for position in range(max(len(expected["logprobs"]), len(found["logprobs"]))):
            first, second = _at(expected["logprobs"], position), _at(found["logprobs"], position)
            if first != second:
                return Difference(request, position, "logprob", first, second)
    return None


def _at(values: Sequence[float], index: int) -> float | None:
    return values[index] if index < len(values) else None
