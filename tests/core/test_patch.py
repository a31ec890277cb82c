"""A patch must refuse a target that is not what it expects, and change nothing but its target."""

import sys
import types
from collections.abc import Iterator

import pytest

from deepinfer_plugins.core import patch as patches
from deepinfer_plugins.core.patch import Patch, PatchTargetMissing


class Base:
    def inherited(self) -> str:
        return "base"


class Engine(Base):
    def step(self, tokens: int, budget: int = 1) -> int:
        """The engine's own."""
        return tokens * budget

    @staticmethod
    def pick(size: int) -> int:
        return size

    @classmethod
    def name(cls) -> str:
        return cls.__name__


def a_patch(target: str, *parameters: str) -> Patch:
    return Patch(
        f"some_engine:{target}",
        why="it is wrong",
        upstream="none",
        remove_when="never",
        parameters=parameters,
    )


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType("some_engine")
    module.Engine = Engine  # type: ignore[attr-defined]
    module.limit = 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_engine", module)
    yield module
    for patch in patches.ledger():
        patches.revert(patch)


def test_replaces_and_reverts() -> None:
    patch = a_patch("Engine.step", "tokens", "budget")
    patches.apply(patch, lambda self, tokens, budget=1: -1)
    assert Engine().step(3) == -1
    assert patches.ledger() == [patch]
    patches.revert(patch)
    assert Engine().step(3, 2) == 6
    assert patches.ledger() == []


def test_wrapper_gets_the_original_and_its_docstring_stays() -> None:
    patches.wrap(
        a_patch("Engine.step"), lambda original: lambda self, tokens, budget=1: original(self, tokens) + 100
    )
    assert Engine().step(3) == 103
    assert Engine.step.__doc__ == "The engine's own."


def test_same_patch_twice_wraps_once() -> None:
    for _ in range(2):
        patches.wrap(
            a_patch("Engine.step"), lambda original: lambda self, tokens: original(self, tokens) + 100
        )
    assert Engine().step(3) == 103


def test_second_patch_of_a_target_is_refused() -> None:
    patches.apply(a_patch("Engine.step"), lambda self, tokens: 0)
    with pytest.raises(ValueError, match="patched already"):
        patches.apply(a_patch("Engine.step", "tokens"), lambda self, tokens: 1)


@pytest.mark.parametrize(("target", "kind"), [("Engine.pick", staticmethod), ("Engine.name", classmethod)])
def test_static_and_class_methods_stay_such(target: str, kind: type) -> None:
    patches.wrap(a_patch(target), lambda original: lambda argument: (argument, original(argument)))
    assert isinstance(vars(Engine)[target.split(".")[1]], kind)
    if kind is staticmethod:
        assert Engine.pick(5) == Engine().pick(5) == (5, 5)
    else:
        assert Engine.name() == (Engine, "Engine")


def test_inherited_method_is_patched_on_the_subclass_only() -> None:
    patch = a_patch("Engine.inherited")
    patches.wrap(patch, lambda original: lambda self: "patched " + original(self))
    assert Engine().inherited() == "patched base"
    assert Base().inherited() == "base"
    patches.revert(patch)
    assert "inherited" not in vars(Engine)


def test_module_value(engine: types.ModuleType) -> None:
    patches.apply(a_patch("limit"), 9)
    assert engine.limit == 9


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        (a_patch("Engine.stepp"), "Engine has no stepp; near it are step"),
        (a_patch("Engin.step"), "some_engine has no Engin; near it are Engine"),
        (a_patch("Engine.step", "tokens", "drafts"), r"no parameter drafts \(it has self, tokens, budget\)"),
        (Patch("no_such_engine.core:f", "why", "none", "never"), "no module no_such_engine"),
        (Patch("some_engine.core:f", "why", "none", "never"), "no module some_engine.core"),
    ],
)
def test_missing_target_is_named_by_check_and_by_apply(patch: Patch, named: str) -> None:
    with pytest.raises(PatchTargetMissing, match=named) as error:
        patches.apply(patch, lambda: None)
    assert patch.target in str(error.value)
    assert "change the patch's target" in str(error.value)
    assert patches.check(patch) == str(error.value)
    assert patches.ledger() == []


def test_check_changes_nothing() -> None:
    before = Engine.step
    assert patches.check(a_patch("Engine.step", "tokens")) == ""
    assert Engine.step is before


def test_check_of_an_applied_patch_looks_at_the_original_signature_only() -> None:
    patch = a_patch("Engine.step", "budget")
    patches.apply(patch, 3)
    assert patches.check(patch) == ""


def test_malformed_target() -> None:
    with pytest.raises(ValueError, match="not of the form"):
        patches.check(Patch("some_engine.Engine.step", "why", "none", "never"))


def test_a_dependency_that_is_missing_is_not_a_missing_target(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_engine.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        patches.check(Patch("broken_engine:f", "why", "none", "never"))


def test_overwritten_by_somebody_else() -> None:
    patch = a_patch("Engine.step")
    patches.apply(patch, lambda self, tokens: 0)
    assert patches.overwritten() == []
    ours = Engine.step
    Engine.step = lambda self, tokens: 1  # type: ignore[method-assign, assignment]
    assert patches.overwritten() == [patch.target]
    Engine.step = ours  # type: ignore[method-assign]
