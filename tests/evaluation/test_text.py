"""What is scored and what is continued, and the files it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deepinfer_plugins.core.shipped import (
    Document,
    corpus,
    is_for_calibration,
    is_for_test,
    is_held_out,
    read_documents,
)
from deepinfer_plugins.evaluation.text import LENGTH, PROMPT_LENGTHS, choose, open_tokenizer
from deepinfer_plugins.model.tokenizer_data import build_tokenizer

END = 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(400, 399, 398)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """900, each of a word of its own, of 6 tokens to more than 1000."""
    return [Document(f"file{i}.py", f"<{i}> " * (1 + i * i % 211)) for i in range(900)]


def test_nothing_is_trained_on_or_asked_for_twice(tokenizer: Tokenizer, documents: list[Document]) -> None:
    text = choose(tokenizer, documents, END, 2500, 5)
    assert sum(len(piece.tokens) - 1 for piece in text.scored) == 2500 and len(text.prompts) == 5
    held_out = {document.text for document in documents if is_for_test(document.name)}
    used = []
    for piece in [*text.scored, *text.prompts]:
        assert piece.tokens[0] == 0 and len(piece.tokens) <= LENGTH
        start = tokenizer.decode(piece.tokens[1:])
        (source,) = {each.split()[0] for each in held_out if each.split()[0] == start.split()[0]}
        used.append(source)
    assert len(used) == len(set(used))
    for piece in text.prompts:
        assert PROMPT_LENGTHS.start <= len(piece.tokens) < PROMPT_LENGTHS.stop
    assert text == choose(tokenizer, documents, END, 2500, 5) != choose(tokenizer, documents, END, 2500, 5, 1)


def test_short_documents_are_scored_to_their_end(tokenizer: Tokenizer) -> None:
    name = next(f"{i}.py" for i in range(999) if is_for_test(f"{i}.py"))
    text = choose(tokenizer, [Document(name, "one, two")], END, 3, 0)
    full = tokenizer.encode("one, two").ids
    assert text.scored[0].tokens == [*full, END][:4] and not text.prompts


def test_a_copy_of_what_was_trained_on_is_not_held_out(tokenizer: Tokenizer) -> None:
    trained = next(f"{i}.py" for i in range(999) if not is_held_out(f"{i}.py"))
    first, second = [f"{i}.py" for i in range(999) if is_for_test(f"{i}.py")][:2]
    documents = [Document(trained, "one " * 9), Document(first, "one " * 9), Document(second, "two " * 9)]
    (piece,) = choose(tokenizer, documents, END, 5, 0).scored
    assert tokenizer.decode(piece.tokens[1:]).startswith("two")


def test_kinds_in_turn_and_no_source_for_its_kind() -> None:
    """A long file in a hundred parts is not what its kind is judged by."""
    chosen = [name for name in (f"{i}.py" for i in range(4000)) if is_for_test(name)]
    parts = [Document(f"{chosen[0]}:{i}", f"part{i} " * 40) for i in range(100)]
    files = [Document(name, f"file{name} " * 40) for name in chosen[1:11]]
    numbers = [name for name in (f"code/1/{i}" for i in range(4000)) if is_for_test(name)]
    made = [Document(name, f"made{name} " * 40) for name in numbers[:12]]
    prompts = choose(build_tokenizer(400, 399, 398), parts + files + made, END, 0, 30).prompts
    assert [piece.kind for piece in prompts] == ["code", "library"] * 12 + ["library"] * 6
    with pytest.raises(ValueError, match="30 documents"):
        choose(build_tokenizer(400, 399, 398), parts + files + made, END, 0, 31)


def test_more_than_there_is(tokenizer: Tokenizer) -> None:
    name = next(f"{i}.py" for i in range(999) if is_for_test(f"{i}.py"))
    with pytest.raises(ValueError, match="5000 tokens to score.*1 documents"):
        choose(tokenizer, [Document(name, "word " * 60)], END, 5000, 0)
    with pytest.raises(ValueError, match="3 prompts to continue"):
        choose(tokenizer, [Document(name, "word " * 60)], END, 10, 3)


@pytest.mark.parametrize("content", [None, "{,", "[1]"])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer that can be read"):
        open_tokenizer(tmp_path)


def test_kinds() -> None:
    assert Document("json_document/1/3813", "").kind == "json_document"
    assert Document("test/support/os_helper.py", "").kind == "library"
    assert Document("json/decoder.py:doc", "").kind == "library"


def test_corpus() -> None:
    """One source in ten is held out, and with it everything that was taken from the same file."""
    documents = read_documents(corpus())
    names = [document.name for document in documents]
    assert len(names) == len(set(names)) > 5000
    held_out = [name for name in names if is_held_out(name)]
    assert 0.07 < len(held_out) / len(names) < 0.14
    files = {Document(name, "").source for name in held_out}
    assert not [name for name in names if Document(name, "").source in files and not is_held_out(name)]
    fitted = [name for name in held_out if is_for_calibration(name)]
    assert 0.3 < len(fitted) / len(held_out) < 0.6
    assert not {Document(name, "").source for name in fitted} & {
        Document(name, "").source for name in held_out if not is_for_calibration(name)
    }
    assert len({document.kind for document in documents}) == 4
