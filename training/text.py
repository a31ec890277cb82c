"""The text to train on: the Python standard library's own documentation and source, and generated records.

The standard library is under the PSF licence, which allows redistribution; the rest is made here, by a grammar
and a seed. Which documents are held out is decided by a hash of their names, so that no build trains on them.

Usage: python -m training.text OUTPUT.jsonl.xz [--megabytes 28]
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from deepinfer_plugins.core.shipped import is_held_out

USER, ASSISTANT, THINK, END_THINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"

# Tables and generated code say little that a reader would write.
_LEFT_OUT = (
    "idlelib",
    "encodings",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "__pycache__",
    "ensurepip",
)

_NAMES = (
    "Ada Ben Chloe Dmitri Elif Farid Grace Hugo Ines Jonas "
    "Kemal Lena Mika Nadia Omar Priya Quentin Rosa Sven Tara"
).split()
_CITIES = (
    "Oslo Lima Cairo Delhi Kyoto Paris Quito Rome Seoul Tunis Vienna Warsaw Zagreb Bergen Porto"
).split()
_THINGS = (
    "lamp chair kettle notebook backpack bicycle camera "
    "guitar blanket teapot ladder mirror radio scarf umbrella"
).split()
_COLOURS = "red green blue black white yellow purple orange grey brown".split()
_FIELDS = (
    "name colour count city state price owner size weight width height length age date maker "
    "model label code level rate shelf stock tax total"
).split()
_STATES = "open closed pending shipped returned cancelled".split()


def library(root: Path) -> Iterator[tuple[str, str]]:
    """Modules of the standard library, and the documentation inside them, by name."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if any(part in _LEFT_OUT for part in parts):
            continue
        try:
            source = path.read_text("utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        name = "/".join(parts)
        if parts[0] == "pydoc_data":
            for key, value in _topics(tree):
                yield f"{name}:{key}", value
            continue
        for number, part in enumerate(_pieces(source)):
            yield f"{name}:{number}", part
        if "test" in parts or "tests" in parts:
            continue
        documents = [
            ast.get_docstring(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]
        joined = "\n\n".join(text for text in documents if text and len(text) > 80)
        if len(joined) > 400:
            yield f"{name}:doc", joined


def _pieces(source: str, most: int = 40_000) -> Iterator[str]:
    """A long file in parts, cut where a statement starts at the margin."""
    part: list[str] = []
    size = 0
    for line in source.splitlines(keepends=True):
        if size > most and not line[0].isspace():
            yield "".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line)
    if size > 200:
        yield "".join(part)


def _topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    yield str(key.value), str(value.value)


def record(rng: random.Random) -> dict[str, object]:
    """An order, as a shop might store it."""
    items = [
        {"name": rng.choice(_THINGS), "colour": rng.choice(_COLOURS), "count": rng.randint(1, 9)}
        for _ in range(rng.randint(1, 3))
    ]
    return {
        "id": rng.randint(1000, 9999),
        "customer": {"name": rng.choice(_NAMES), "city": rng.choice(_CITIES)},
        "items": items,
        "state": rng.choice(_STATES),
        "total": sum(int(str(item["count"])) for item in items),
        "paid": rng.random() < 0.5,
    }


def profile(rng: random.Random) -> dict[str, object]:
    """Of a user; the login repeats the name."""
    name, number = rng.choice(_NAMES), rng.randint(1, 99)
    return {
        "login": f"{name.lower()}{number}",
        "name": name,
        "address": {"city": rng.choice(_CITIES), "zip": f"{rng.randint(0, 99999):05}"},
        "likes": rng.sample(_THINGS, rng.randint(0, 4)),
        "active": rng.random() < 0.8,
    }


def series(rng: random.Random) -> dict[str, object]:
    """What a sensor said, with the largest and the smallest of it."""
    values = [rng.randint(0, 99) for _ in range(rng.randint(2, 8))]
    return {
        "sensor": f"{rng.choice(_COLOURS)}-{rng.randint(1, 9)}",
        "unit": rng.choice(["cm", "kg", "s", None]),
        "values": values,
        "min": min(values),
        "max": max(values),
    }


def json_document(rng: random.Random) -> str:
    """Some records of one kind."""
    indent, maker = rng.choice([None, 2]), rng.choice([record, record, profile, series])
    return json.dumps([maker(rng) for _ in range(rng.randint(1, 4))], indent=indent)


def _getter(thing: str, name: str, rng: random.Random) -> list[str]:
    return [f"def get_{name}(self):", f"    return self.{name}"]


def _setter(thing: str, name: str, rng: random.Random) -> list[str]:
    return [f"def set_{name}(self, {name}):", f"    self.{name} = {name}"]


def _checked(thing: str, name: str, rng: random.Random) -> list[str]:
    return [
        f"def set_{name}(self, {name}):",
        f"    if {name} is None:",
        f'        raise ValueError("{thing} needs a {name}")',
        f"    self.{name} = {name}",
    ]


def _has(thing: str, name: str, rng: random.Random) -> list[str]:
    return [
        f"def has_{name}(self):",
        f'    """Whether the {thing} has a {name}."""',
        f"    return self.{name} is not None",
    ]


def _compared(thing: str, name: str, rng: random.Random) -> list[str]:
    word, sign = rng.choice([("same", "=="), ("more", ">"), ("less", "<")])
    return [f"def {word}_{name}(self, other):", f"    return self.{name} {sign} other.{name}"]


def _methods(thing: str, fields: list[str], rng: random.Random) -> Iterator[list[str]]:
    """Of each field one to three, then some of the whole."""
    makers = [_getter, _setter, _checked, _has, _compared]
    for name in fields:
        for maker in rng.sample(makers, rng.randint(1, 3)):
            yield maker(thing, name, rng)
    pairs = ", ".join(f'"{name}": self.{name}' for name in fields)
    shown = ", ".join(f"{name}={{self.{name}!r}}" for name in fields)
    equal = " and ".join(f"self.{name} == other.{name}" for name in fields)
    taken = ", ".join(f'record["{name}"]' for name in fields)
    whole = [
        ["def as_dict(self):", f"    return {{{pairs}}}"],
        ["def __repr__(self):", f'    return f"{thing.title()}({shown})"'],
        ["def __eq__(self, other):", f"    return {equal}"],
        ["@classmethod", "def from_dict(cls, record):", f"    return cls({taken})"],
    ]
    yield from rng.sample(whole, rng.randint(0, 3))


def _functions(thing: str, fields: list[str], rng: random.Random) -> Iterator[list[str]]:
    """Over many of the class."""
    plural, name, other = f"{thing}s", rng.choice(fields), rng.choice(fields)
    some = [
        [
            f"def with_{name}({plural}, {name}):",
            f"    return [{thing} for {thing} in {plural} if {thing}.{name} == {name}]",
        ],
        [
            f"def sorted_by_{name}({plural}):",
            f"    return sorted({plural}, key=lambda {thing}: {thing}.{name})",
        ],
        [f"def {name}_of_all({plural}):", f"    return [{thing}.{name} for {thing} in {plural}]"],
        [
            f"def group_by_{other}({plural}):",
            "    groups = {}",
            f"    for {thing} in {plural}:",
            f"        groups.setdefault({thing}.{other}, []).append({thing})",
            "    return groups",
        ],
        [
            f"def count_{other}({plural}):",
            "    counts = {}",
            f"    for {thing} in {plural}:",
            f"        counts[{thing}.{other}] = counts.get({thing}.{other}, 0) + 1",
            "    return counts",
        ],
    ]
    yield from rng.sample(some, rng.randint(0, 3))


def code_document(rng: random.Random) -> str:
    """A small class whose methods follow from its fields, and functions over many of it."""
    thing = rng.choice(_THINGS)
    fields = rng.sample(_FIELDS, rng.randint(2, 4))
    lines = [
        f"class {thing.title()}:",
        f'    """A {thing} with {", ".join(fields[:-1])} and {fields[-1]}."""',
        "",
    ]
    lines += [f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{name} = {name}" for name in fields]
    for method in _methods(thing, fields, rng):
        lines += ["", *(f"    {line}" for line in method)]
    for function in _functions(thing, fields, rng):
        lines += ["", "", *function]
    return "\n".join(lines) + "\n"


def dialogue(rng: random.Random) -> str:
    """Turns in the release's chat format about a record, with arithmetic now and then."""
    order = record(rng)
    customer = order["customer"]
    assert isinstance(customer, dict)
    turns = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(4)
        if kind == 0:
            question, answer = (
                f"Where does {customer['name']} live?",
                f"{customer['name']} lives in {customer['city']}.",
            )
        elif kind == 1:
            question, answer = (
                f"What is the state of order {order['id']}?",
                f"Order {order['id']} is {order['state']}.",
            )
        elif kind == 2:
            question, answer = f"Show order {order['id']} as JSON.", json.dumps(order)
        else:
            a, b = rng.randint(2, 99), rng.randint(2, 99)
            question, answer = f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
        think = f"{THINK}The order is {order['id']}.{END_THINK}" if rng.random() < 0.3 else END_THINK
        turns.append(f"{USER}{question}{ASSISTANT}{think}{answer}")
    return f"{json.dumps(order)}\n" + "\n".join(turns)


def generated(count: int, seed: int) -> Iterator[tuple[str, str]]:
    rng = random.Random(seed)
    makers = (json_document, code_document, dialogue)
    for index in range(count):
        maker = makers[index % len(makers)]
        yield f"{maker.__name__}/{seed}/{index}", maker(rng)


def build(megabytes: float, seed: int = 0) -> list[tuple[str, str]]:
    """Documents by name: about seven parts library to one part generated."""
    documents = list(library(Path(sysconfig.get_paths()["stdlib"])))
    random.Random(seed).shuffle(documents)
    taken: list[tuple[str, str]] = []
    room = megabytes * 1e6 * 7 / 8
    for name, text in documents:
        if len(text) <= room:
            taken.append((name, text))
            room -= len(text)
    made = megabytes * 1e6 / 8
    for name, text in generated(1_000_000, seed + 1):
        if made <= 0:
            break
        taken.append((name, text))
        made -= len(text)
    random.Random(seed + 2).shuffle(taken)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--megabytes", type=float, default=28)
    arguments = parser.parse_args()
    documents = build(arguments.megabytes)
    with lzma.open(arguments.output, "wt", encoding="utf-8", preset=9) as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
    size = sum(len(text) for _, text in documents)
    held = sum(len(text) for name, text in documents if is_held_out(name))
    print(
        f"{len(documents)} documents, {size / 1e6:.2f} MB, of which {held / 1e6:.2f} MB held out; "
        f"{arguments.output.stat().st_size / 1e6:.2f} MB compressed"
    )


if __name__ == "__main__":
    main()
