"""Engram's primes, multipliers and compressed vocabulary against other ways to get them."""

from __future__ import annotations

import math
import re
import time
import unicodedata

import pytest
import sympy
from tokenizers import AddedToken, Tokenizer, models

from deepinfer_plugins.model.engram import CompressedVocabulary, engram_tables, is_prime, table_primes
from deepinfer_plugins.model.presets import release, small
from deepinfer_plugins.model.tokenizer_data import build_tokenizer


def test_primes_are_the_next_ones_not_yet_taken() -> None:
    """sympy walks the same order: layers, then n, each n from the start again, skipping what was handed out."""
    config = release()
    taken: list[int] = []
    for layer in config.engram_primes:
        for row in layer:
            current, expected = 16_000_000 - 1, []
            while len(expected) < 8:
                current = sympy.nextprime(current)
                if current not in taken:
                    expected.append(current)
            taken += expected
            assert list(row) == expected
    assert len(set(taken)) == 48


def test_is_prime_agrees_with_sympy() -> None:
    # 3215031751 and 3825123056546413051 fool Miller-Rabin with the first few witnesses.
    numbers = [*range(-3, 2000), 3215031751, 3825123056546413051, 2**61 - 1, (2**31 - 1) ** 2]
    assert [is_prime(number) for number in numbers] == [sympy.isprime(number) for number in numbers]


def test_a_table_smaller_than_its_start_can_be_prime_itself() -> None:
    assert table_primes(1, 3, 2, 7) == (((7, 11), (13, 17)),)


@pytest.mark.parametrize("config", [small(), release()], ids=["small", "release"])
def test_tables(config) -> None:  # type: ignore[no-untyped-def]
    for layer, table in engram_tables(config).items():
        flat = [prime for row in table.primes for prime in row]
        assert table.num_rows == sum(flat)
        offsets = [offset for row in table.offsets for offset in row]
        assert offsets == [sum(flat[:column]) for column in range(len(flat))]
        assert len(table.multipliers) == 4 and all(m % 2 == 1 for m in table.multipliers)
        # A compressed id times a multiplier stays inside int64.
        assert max(table.multipliers) * (config.engram_compressed_vocab_size - 1) < 2**63
        assert max(table.multipliers) > 2**63 / config.engram_compressed_vocab_size / 8, layer


def test_multipliers_differ_by_layer_and_vocabulary() -> None:
    config = release()
    tables = engram_tables(config)
    assert tables[1].multipliers != tables[14].multipliers
    assert engram_tables(config, 99093)[1].multipliers != tables[1].multipliers


def _normalise(text: str) -> str:
    """The rule again, from the standard library. Strings below use nothing on which Unicode versions differ."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(char for char in text if unicodedata.category(char) != "Mn")
    text = "".join(char.lower() for char in text)
    text = re.sub("[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip()


_WORDS = [
    "the", "The", " the", "THE\n", "\tthe  ", "thé", "the\u0301", "ﬁn", "fin", "Ａ", "a", "ÀÉ", "ae", "ß", "SS", "ss",
    " ", "  ", "\n", "\t\n ", "", "1", "①", "ΑΣ", "ας", "ασ", "İ", "i", "大", "ㇰ", "가", "\ue000",
    "a b", "a  b", "a\n\tb",
]  # fmt: skip


def _tokenizer(words: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={}, merges=[]))
    for word in words:
        tokenizer.add_tokens([AddedToken(word, normalized=False)])
    return tokenizer


def test_tokens_that_read_alike_share_an_id() -> None:
    words = [word for word in _WORDS if word]
    vocabulary = CompressedVocabulary.from_tokenizer(_tokenizer(words), len(words) + 3)
    ids: dict[str, int] = {}
    expected = []
    for word in words:
        key = _normalise(word).replace("\ue000", " ") or word
        expected.append(ids.setdefault(key, len(ids)))
    assert vocabulary.map.tolist() == [*expected, -1, -1, -1]
    assert vocabulary.size == len(ids) < len(words) - 10


def test_a_part_of_a_character_is_itself() -> None:
    tokenizer = build_tokenizer(1024, 1008, 1007)
    vocabulary = CompressedVocabulary.from_tokenizer(tokenizer, 1024)
    parts = [i for i in range(1024) if "\ufffd" in tokenizer.decode([i], skip_special_tokens=False)]
    assert len(parts) > 100
    assert len({vocabulary.map[i] for i in parts}) == len(parts)


def test_tokens_past_the_vocabulary_count_but_have_no_place() -> None:
    words = ["one", "two", "three"]
    vocabulary = CompressedVocabulary.from_tokenizer(_tokenizer(words), 2)
    assert vocabulary.map.tolist() == [0, 1]
    assert vocabulary.size == 3


def test_a_vocabulary_of_the_release_size_is_quick() -> None:
    tokenizer = build_tokenizer(129_280, 129_264, 128_799)
    start = time.process_time()
    vocabulary = CompressedVocabulary.from_tokenizer(tokenizer, 129_280)
    assert time.process_time() - start < 20
    assert (vocabulary.map >= 0).all() and math.isclose(vocabulary.size, 129_280, rel_tol=0.01)


def test_tokenizer_missing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing.*Copy the tokenizer files"):
        CompressedVocabulary.from_folder(tmp_path, 1024)
