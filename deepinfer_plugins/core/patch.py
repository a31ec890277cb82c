"""The ledger of everything changed inside an engine.

A private name of an engine may be renamed by its next release. A patch therefore says what it
replaces, and looking before it writes turns a rename into an error that names the patch, where
plain ``setattr`` would silently patch nothing.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


class PatchTargetMissing(LookupError):
    """An engine has no such name, or not with the parameters that its replacement expects."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One change inside an engine, as data.

    Args:
        target: ``"module:name"`` or ``"module:Class.name"``. A name that another module took with
            ``from x import y`` is that other module's: target the module that looks it up.
        why: What goes wrong without it, in one sentence.
        upstream: The issue or pull request that would make it unnecessary, or ``"none"``.
        remove_when: The condition that ends it, e.g. ``"vllm >= 0.35"``.
        parameters: Parameter names that the target must have, in any order. Empty: not checked.
    """

    target: str
    why: str
    upstream: str
    remove_when: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Applied:
    patch: Patch
    # What stood in the owner's own namespace; None if the name was inherited.
    original: Any
    replacement: Any


_LEDGER: dict[str, _Applied] = {}


def _owner(patch: Patch) -> tuple[Any, str]:
    """The module or class that holds the target, and the target's name in it.

    Raises:
        PatchTargetMissing: If a part of the path does not exist.
    """
    module_name, colon, qualified = patch.target.partition(":")
    if not colon or not module_name or not qualified:
        raise ValueError(
            f"patch target {patch.target!r} is not of the form 'module:name' or 'module:Class.name'"
        )
    try:
        owner: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists and itself lacks a dependency is another failure: let it be seen.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise _missing(patch, f"there is no module {error.name}") from error
    *holders, name = qualified.split(".")
    for holder in holders:
        _require(patch, owner, holder)
        owner = getattr(owner, holder)
    _require(patch, owner, name)
    return owner, name


def _require(patch: Patch, owner: Any, name: str) -> None:
    if not hasattr(owner, name):
        near = difflib.get_close_matches(name, dir(owner), n=3)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise _missing(patch, f"{_name(owner)} has no {name}{hint}")


def _name(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def _missing(patch: Patch, found: str) -> PatchTargetMissing:
    return PatchTargetMissing(
        f"can't patch {patch.target}: {found}.\n"
        f"  The patch is there because: {patch.why} "
        f"(upstream: {patch.upstream}; remove when {patch.remove_when}).\n"
        "  If the engine renamed it, change the patch's target and its parameters; if the engine no longer "
        "needs it, remove the patch. Until then use an engine version that this package names as supported."
    )


def _function(target: Any) -> Any:
    return target.__func__ if isinstance(target, staticmethod | classmethod) else target


def _look(patch: Patch) -> tuple[Any, str, Any]:
    """The owner, the name and the static attribute; raises if the target is not as the patch says."""
    owner, name = _owner(patch)
    static = inspect.getattr_static(owner, name)
    if patch.parameters:
        found = inspect.signature(_function(static)).parameters
        absent = [parameter for parameter in patch.parameters if parameter not in found]
        if absent:
            raise _missing(
                patch, f"it has no parameter {', '.join(absent)} (it has {', '.join(found) or 'none'})"
            )
    return owner, name, static


def check(patch: Patch) -> str:
    """Why the patch can't be applied; empty if it can, or is applied already. Changes nothing."""
    if patch.target in _LEDGER and _LEDGER[patch.target].patch == patch:
        return ""
    try:
        _look(patch)
    except PatchTargetMissing as error:
        return str(error)
    return ""


def apply(patch: Patch, replacement: Any) -> None:
    """Put ``replacement`` where the patch points. Applying the same patch again does nothing.

    A plain function that replaces a static or class method becomes one.

    Raises:
        PatchTargetMissing: If the engine has no such target.
        ValueError: If another patch holds the target: two changes of one name belong in one patch.
    """
    wrap(patch, lambda _: replacement)


def wrap(patch: Patch, wrapper: Callable[[Any], Any]) -> None:
    """Like :func:`apply`, with the replacement made from the original.

    Args:
        patch: Where.
        wrapper: From the original (the bare function of a static or class method) to what replaces
            it. It is called once.
    """
    if (applied := _LEDGER.get(patch.target)) is not None:
        if applied.patch != patch:
            raise ValueError(
                f"{patch.target} is patched already, because: {applied.patch.why}. "
                f"A second patch of it ({patch.why}) would hide the first: make them one."
            )
        return
    owner, name, static = _look(patch)
    original = _function(static)
    replacement = wrapper(original)
    if inspect.isfunction(replacement) and inspect.isfunction(original) and replacement is not original:
        functools.update_wrapper(replacement, original)
    if isinstance(static, staticmethod | classmethod) and not isinstance(
        replacement, staticmethod | classmethod
    ):
        replacement = type(static)(replacement)
    own = vars(owner).get(name)
    setattr(owner, name, replacement)
    _LEDGER[patch.target] = _Applied(patch, own, replacement)


def revert(patch: Patch) -> None:
    """Put the original back; does nothing if the patch is not applied."""
    applied = _LEDGER.pop(patch.target, None)
    if applied is None:
        return
    owner, name = _owner(patch)
    if applied.original is None:
        delattr(owner, name)
    else:
        setattr(owner, name, applied.original)


def ledger() -> list[Patch]:
    """The patches that this process has applied, in order."""
    return [applied.patch for applied in _LEDGER.values()]


def overwritten() -> list[str]:
    """Targets of applied patches that somebody else has replaced since."""
    lost = []
    for target, applied in _LEDGER.items():
        owner, name = _owner(applied.patch)
        if inspect.getattr_static(owner, name) is not applied.replacement:
            lost.append(target)
    return lost
