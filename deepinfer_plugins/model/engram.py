"""Engram's tables: which rows an n-gram reads, worked out from the configuration and the tokenizer.

Nothing here computes on a device; the model turns these numbers into tensors. Imports no torch.

Source: section 2.3 of the model's fact sheet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tokenizers

    from deepinfer_plugins.model.config import ModelConfig

_SEED_STRIDE = 10007
# With these witnesses Miller-Rabin is exact below 3.3e24.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
# Stands for a space while a text is normalised; the release maps it back to a space wherever it occurs.
_SPACE_MARK = "\ue000"


def is_prime(number: int) -> bool:
    """Whether ``number`` is prime; exact for anything that fits in 64 bits."""
    if number < 2:
        return False
    for witness in _WITNESSES:
        if number % witness == 0:
            return number == witness
    odd = number - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


@cache
def table_primes(
    num_layers: int, max_ngram_size: int, num_heads: int, vocab_size: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Sizes of the hash tables, ``[layer][n - 2][head]``.

    Consecutive primes that are at least ``vocab_size``. Every n of every layer starts the search afresh, but
    a prime is handed out once only, so all of them differ.
    """
    taken: set[int] = set()

    def row() -> tuple[int, ...]:
        primes: list[int] = []
        candidate = vocab_size
        while len(primes) < num_heads:
            if candidate not in taken and is_prime(candidate):
                primes.append(candidate)
                taken.add(candidate)
            candidate += 1
        return tuple(primes)

    return tuple(tuple(row() for _ in range(max_ngram_size - 1)) for _ in range(num_layers))


@dataclass(frozen=True, slots=True)
class EngramTable:
    """One Engram layer's numbers, as plain integers.

    Args:
        multipliers: ``[max_ngram_size]``, odd; entry r multiplies the compressed id r tokens back.
        primes: ``[max_ngram_size - 1][num_heads]``; row n-2 belongs to n-grams.
        offsets: Same shape: the first row of each prime's part of the table.
        num_rows: Rows of the table: the sum of the primes.
    """

    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    num_rows: int


def engram_tables(config: ModelConfig, compressed_vocab_size: int | None = None) -> dict[int, EngramTable]:
    """The table of every Engram layer, by layer id.

    Args:
        config: The model's configuration.
        compressed_vocab_size: Number of distinct compressed ids, which bounds the multipliers;
            ``config.engram_compressed_vocab_size`` if None.
    """
    distinct = config.engram_compressed_vocab_size if compressed_vocab_size is None else compressed_vocab_size
    tables = {}
    for layer, primes in zip(config.engram_layer_ids, config.engram_primes, strict=True):
        flat = [prime for row in primes for prime in row]
        starts = [sum(flat[:column]) for column in range(len(flat))]
        heads = config.engram_n_heads
        tables[layer] = EngramTable(
            multipliers=hash_multipliers(layer, config.engram_max_ngram_size, distinct),
            primes=primes,
            offsets=tuple(tuple(starts[row * heads : (row + 1) * heads]) for row in range(len(primes))),
            num_rows=sum(flat),
        )
    return tables


def hash_multipliers(layer: int, max_ngram_size: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """Odd 63-bit multipliers, small enough that a compressed id times one of them does not overflow int64."""
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    generator = np.random.default_rng(_SEED_STRIDE * layer)
    drawn = generator.integers(0, bound, size=max_ngram_size, dtype=np.int64)
    return tuple(2 * int(value) + 1 for value in drawn)


@dataclass(frozen=True, slots=True, eq=False)
class CompressedVocabulary:
    """Token ids after merging those that read alike.

    Args:
        map: ``[vocab_size]``, int64: compressed id of each token id; -1 for one the tokenizer does not have.
        size: Number of distinct compressed ids.
    """

    map: npt.NDArray[np.int64]
    size: int

    @classmethod
    def from_folder(cls, folder: str | Path, vocab_size: int) -> CompressedVocabulary:
        """Build it from the ``tokenizer.json`` of a checkpoint.

        Raises:
            FileNotFoundError: ``folder`` has no ``tokenizer.json``.
        """
        from tokenizers import Tokenizer

        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing; Engram hashes compressed token ids, which are worked out from it. "
                "Copy the tokenizer files of the release into the checkpoint's folder"
            )
        return cls.from_tokenizer(Tokenizer.from_file(str(path)), vocab_size)

    @classmethod
    def from_tokenizer(cls, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> CompressedVocabulary:
        """Build it from a loaded tokenizer.

        Every token of the tokenizer counts towards :attr:`size`, as in the release, even one with an id of
        ``vocab_size`` or more, which has no place in :attr:`map`.
        """
        from tokenizers import normalizers

        unaccented = normalizers.Sequence(
            [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
        )
        strip = normalizers.Strip()

        def key(token_id: int) -> str:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            if "\ufffd" in text:
                # Part of a character: there is nothing to normalise.
                return str(tokenizer.id_to_token(token_id))
            folded = re.sub(r"[ \t\r\n]+", " ", unaccented.normalize_str(text))
            folded = folded if folded == " " else strip.normalize_str(folded)
            return folded.replace(_SPACE_MARK, " ") or text

        token_ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
        ids: dict[str, int] = {}
        mapped = np.full(vocab_size, -1, dtype=np.int64)
        for token_id in token_ids:
            compressed = ids.setdefault(key(token_id), len(ids))
            if token_id < vocab_size:
                mapped[token_id] = compressed
        return cls(mapped, len(ids))
