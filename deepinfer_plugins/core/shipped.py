"""The files that come with the package: a small trained checkpoint and the text it was trained and is tested on."""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parents[1] / "data"


class Document(NamedTuple):
    """One text of the corpus, and its name."""

    name: str
    text: str

    @property
    def source(self) -> str:
        """What it was taken from: all that comes of one file (``file``, ``file:part``) shares it."""
        return self.name.split(":")[0]

    @property
    def kind(self) -> str:
        """``library``, or what made it: generated documents are called ``maker/seed/number``."""
        maker, *numbers = self.name.split("/")
        return maker if len(numbers) == 2 and all(map(str.isdigit, numbers)) else "library"


def default_checkpoint() -> Path:
    """The folder of the trained checkpoint, in the release's format: what runs when no model is named."""
    return DATA / "checkpoint"


def corpus() -> Path:
    """The corpus: xz, one JSON array of name and text per line."""
    return DATA / "corpus.jsonl.xz"


def read_documents(path: Path) -> list[Document]:
    """Every document of a corpus, in the file's order."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [Document(*json.loads(line)) for line in file]


def is_held_out(name: str) -> bool:
    """Whether nothing is trained on the document of this name: one source in ten, by a hash.

    Documents of one source are on one side.
    """
    return _hash(name) < 26


def is_for_calibration(name: str) -> bool:
    """Whether a held-out document is what the draft's confidences are fitted to, and so tests nothing: about half."""
    return is_held_out(name) and _hash(name) % 2 == 0


def is_for_test(name: str) -> bool:
    """Whether a document is what a checkpoint is tested on: held out, and nothing is fitted to it."""
    return is_held_out(name) and not is_for_calibration(name)


def _hash(name: str) -> int:
    return hashlib.sha256(Document(name, "").source.encode()).digest()[0]
