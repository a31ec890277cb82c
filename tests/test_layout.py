"""Who may import whom, and what is packed: the table of rooms in the README, held by walking the source."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import deepinfer_plugins

PACKAGE = Path(deepinfer_plugins.__file__).parent
ROOT = PACKAGE.parent
LINKED = ("kernels", "platforms", "vllm_ext", "sglang_ext")

NEUTRAL = {"core", "kernels", "platforms", "model", "features"}
# room -> the other rooms that it may import
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "kernels": {"core"},
    "platforms": {"core", "kernels"},
    "model": {"core", "kernels"},
    "features": {"core", "kernels"},
    "evaluation": NEUTRAL,
    "vllm_ext": NEUTRAL,
    "sglang_ext": NEUTRAL,
    "cli": NEUTRAL | {"evaluation"},
}
# The command line reaches an engine's room by name only, once it knows which engine is installed.
MAY_NAME = MAY_IMPORT | {"cli": NEUTRAL | {"evaluation", "vllm_ext", "sglang_ext"}}
# import name of an engine -> the one room that imports it
ENGINES = {
    "vllm": "vllm_ext",
    "vllm_ascend": "vllm_ext",
    "sglang": "sglang_ext",
    "sgl_kernel": "sglang_ext",
}
GROUPS = {
    "vllm.general_plugins": "deepinfer_plugins.vllm_ext.entrypoints:register",
    "vllm.platform_plugins": "deepinfer_plugins.vllm_ext.entrypoints:platform",
    "sglang.srt.plugins": "deepinfer_plugins.sglang_ext.entrypoints:register",
    "sglang.srt.platforms": "deepinfer_plugins.sglang_ext.entrypoints:platform",
}


def modules() -> dict[str, Path]:
    """Dotted name -> file, for all of the package. Links are followed: the rooms are part of it."""
    found = {}
    for top in [PACKAGE, *(PACKAGE / room for room in LINKED)]:
        for path in top.rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room_of(module: str) -> str:
    """The room of ``deepinfer_plugins.<...>``; ``""`` for the package itself."""
    name = module.split(".")[1] if "." in module else ""
    return "cli" if name in ("cli", "commands", "__main__") else name


def imports(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that the file imports, inside functions too."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, *filter(None, [node.module]), alias.name])


def named(path: Path) -> Iterator[tuple[int, str]]:
    """Line and value of every string that importlib could be given to reach something of ours."""
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"deepinfer_plugins(\.\w+)+(:\w+)?", node.value):
                yield node.lineno, node.value.partition(":")[0]


@pytest.mark.parametrize("room", LINKED)
def test_room_is_linked_and_has_no_init(room: str) -> None:
    link = PACKAGE / room
    assert link.is_symlink() and link.readlink() == Path("..", room), (
        f"deepinfer_plugins/{room} must be a link to ../{room}; a checkout without links packs no rooms"
    )
    assert not (ROOT / room / "__init__.py").exists(), (
        f"{room}/__init__.py would make `import {room}` find this folder from the repository root; "
        "for kernels that hides Hugging Face's package from transformers and SGLang"
    )


def test_every_module_is_in_a_room() -> None:
    outside = {name for name in MODULES if room_of(name) not in {"", *MAY_IMPORT}}
    assert not outside, f"not in a room: {sorted(outside)}; add the room to MAY_IMPORT or move the module"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_imports_only_what_its_room_may(module: str) -> None:
    path, room = MODULES[module], room_of(module)
    wrong = []
    for line, name in imports(module, path):
        top, *_ = name.split(".")
        if top in LINKED:
            wrong.append(
                f"line {line}: write deepinfer_plugins.{name}; plain {top} is somebody else's package"
            )
        if top == "deepinfer_plugins" and room_of(name) in set(MAY_IMPORT) - {room} - MAY_IMPORT.get(
            room, set()
        ):
            wrong.append(f"line {line}: {room or 'the package'} may not import {name}")
        if top in ENGINES and room != ENGINES[top]:
            wrong.append(f"line {line}: {name} is imported in {ENGINES[top]} only")
    for line, name in named(path):
        if room_of(name) in set(MAY_IMPORT) - {room} - MAY_NAME.get(room, set()):
            wrong.append(f"line {line}: {room or 'the package'} may not reach {name}")
    assert not wrong, f"{path.resolve().relative_to(ROOT)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("tests/**/*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_tests_import_an_engine_only_in_its_room(path: Path) -> None:
    room = path.relative_to(ROOT / "tests").parts[0]
    for line, name in imports("tests", path):
        top, *_ = name.split(".")
        assert room == ENGINES.get(top, room), (
            f"line {line}: {name} needs tests/{ENGINES[top]}, or importorskip"
        )


def test_entry_points_are_ours() -> None:
    ours = [e for e in importlib.metadata.distribution("deepinfer-plugins").entry_points if e.group in GROUPS]
    assert {e.group: e.value for e in ours} == GROUPS
    assert {e.name for e in ours} == {"deepinfer"}, (
        "one name for all: SGLang drops the general plugins of a distribution whose platform has another one"
    )
    assert all(callable(e.load()) for e in ours)


def test_entry_points_import_neither_torch_nor_an_engine() -> None:
    """Both engines import them in every process, before they know what they need."""
    entry = sorted({value.partition(":")[0] for value in GROUPS.values()})
    heavy = ("torch", "vllm", "sglang", "transformers", "triton", "numpy")
    code = f"import sys, {', '.join(entry)}; print(*[name for name in {heavy!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert not run.stdout.split(), f"importing {' and '.join(entry)} also imports {run.stdout.strip()}"


def compares_versions(node: ast.AST) -> bool:
    """A comparison with ``x.__version__`` or ``version("x")`` in it, or an import of packaging's versions."""
    if isinstance(node, ast.Compare):
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute | ast.Name):
                name = part.attr if isinstance(part, ast.Attribute) else part.id
                if name == "__version__":
                    return True
            if isinstance(part, ast.Call) and ast.unparse(part.func).split(".")[-1] in ("version", "Version"):
                return True
    if isinstance(node, ast.ImportFrom):
        return node.module in ("packaging", "packaging.version", "packaging.specifiers")
    return isinstance(node, ast.Import) and any(alias.name.startswith("packaging") for alias in node.names)


@pytest.mark.parametrize("module", sorted(name for name in MODULES if not name.endswith(".versions")))
def test_only_versions_py_compares_versions(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    lines = [getattr(node, "lineno", 0) for node in ast.walk(tree) if compares_versions(node)]
    assert not lines, f"{module} compares versions at lines {lines}; ask {{vllm,sglang}}_ext/versions.py"


def test_environments_and_extras_name_one_version() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for engine in ("vllm", "sglang"):
        installed = (ROOT / "requirements" / f"{engine}-gpu.in").read_text().splitlines()
        locked = (ROOT / "requirements" / f"{engine}-gpu.txt").read_text().splitlines()
        assert extras[engine][0] in installed and extras[engine][0] in locked, (
            f"{engine}: edit pyproject.toml and requirements/{engine}-gpu.in together, then run scripts/lock"
        )


def test_wheel_built_from_the_sdist_holds_every_room(tmp_path: Path) -> None:
    def build(target: str, source: Path) -> Path:
        command = [sys.executable, "-P", "-m", "hatchling", "build", "-t", target, "-d", str(tmp_path)]
        subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
        return next(tmp_path.glob("*.tar.gz" if target == "sdist" else "*.whl"))

    with tarfile.open(build("sdist", ROOT)) as sdist:
        sdist.extractall(tmp_path, filter="data")
    unpacked = next(path for path in tmp_path.iterdir() if path.is_dir())
    file = build("wheel", unpacked)
    assert file.stat().st_size < 12e6, f"the wheel has {file.stat().st_size} bytes; it must stay under 12 MB"
    with zipfile.ZipFile(file) as wheel:
        names = set(wheel.namelist())
    data = {str(path.relative_to(ROOT)) for path in (PACKAGE / "data").rglob("*") if path.is_file()}
    assert {
        f"deepinfer_plugins/data/{name}" for name in ("corpus.jsonl.xz", "checkpoint/config.json")
    } <= data
    assert data <= names, f"not packed: {sorted(data - names)}"
    packed = {name for name in names if name.endswith(".py")}
    expected = {str(path.relative_to(ROOT)) for path in MODULES.values()}
    assert packed == expected, f"missing {sorted(expected - packed)}, unexpected {sorted(packed - expected)}"
    assert (unpacked / "tests" / "test_layout.py").exists()
    assert (unpacked / "training" / "corpus.jsonl.xz").exists()


@pytest.mark.parametrize("readme", sorted(ROOT.glob("[!.]*/**/README.md")) + [ROOT / "README.md"], ids=str)
def test_readme_links_to_files_that_exist(readme: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", readme.read_text())
    assert not [link for link in links if not (readme.parent / link).exists()]
