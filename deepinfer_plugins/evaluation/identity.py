"""Whether an engine answers the same however it is run: requests, answers, and where two answers part."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
        error: Why there is no answer; None if there is one.
    """

    tokens: list[int]
    logprobs: list[float]
    error: str | None


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
    """

    name: str
    requests: int
    equal: int
    first_difference: Difference | None

    @property
    def ok(self) -> bool:
        return self.first_difference is None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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


def compare(name: str, expected: Sequence[Answer], found: Sequence[Answer], logprobs: bool = True) -> Check:
    """Hold answers against the expected ones.

    Args:
        name: How ``found`` came about.
        expected: The reference.
        found: As many, in the same order.
        logprobs: Whether log-probabilities must be equal too, to the last bit.
    """
    if len(expected) != len(found):
        raise ValueError(f"{name}: {len(found)} answers for {len(expected)} requests")
    differences = [
        difference
        for index, (one, other) in enumerate(zip(expected, found, strict=True))
        if (difference := _difference(index, one, other, logprobs)) is not None
    ]
    return Check(name, len(expected), len(expected) - len(differences), next(iter(differences), None))


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
