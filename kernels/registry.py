"""Which providers each operator has, and which one a process uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer_plugins.core.settings import PROVIDER
from deepinfer_plugins.core.target import Want
from deepinfer_plugins.kernels.spec import Provider

_PROVIDERS: dict[str, dict[str, Provider]] = {}


class NoProvider(LookupError):
    """No provider of an operator can serve what was asked for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The provider a process uses for an operator, and why it uses no other."""

    provider: Provider
    passed_over: dict[str, str]

    def load(self) -> Callable[..., Any]:
        return self.provider.load()


def register(provider: Provider) -> Provider:
    """Add a provider. Adding the same one again is harmless; a different one is refused."""
    known = _PROVIDERS.setdefault(provider.op, {})
    other = known.setdefault(provider.name, provider)
    if other != provider:
        raise ValueError(
            f"{provider.op}: {provider.name} is already {other.path}, so it can't become {provider.path}"
        )
    return provider


def operators() -> list[str]:
    """Every operator that has a provider, by name."""
    return sorted(_PROVIDERS)


def providers(op: str) -> list[Provider]:
    """The operator's providers, in the order in which they are preferred."""
    return list(_PROVIDERS.get(op, {}).values())


def choose(op: str, want: Want) -> Choice:
    """The first provider that can serve ``want``.

    ``DEEPINFER_PLUGINS_<OP>=<provider>`` asks for one by name, and ``DEEPINFER_PLUGINS_PROVIDER=<provider>`` for that
    of every operator that has it; it is then that one or an error. The former goes before the latter.

    Raises:
        NoProvider: If none can; the message says why for each.
    """
    variable = f"DEEPINFER_PLUGINS_{op.upper()}"
    forced = os.environ.get(variable, "")
    if not forced and os.environ.get(PROVIDER, "") in _PROVIDERS.get(op, {}):
        variable, forced = PROVIDER, os.environ[PROVIDER]
    if forced and forced not in _PROVIDERS.get(op, {}):
        known = ", ".join(_PROVIDERS.get(op, {})) or "none"
        raise NoProvider(f"{variable}={forced}: {op} has no provider of that name; it has {known}")
    passed_over: dict[str, str] = {}
    chosen: Provider | None = None
    for provider in providers(op):
        if forced and provider.name != forced:
            passed_over[provider.name] = f"{variable}={forced}"
        elif why := provider.refusal(want):
            passed_over[provider.name] = why
        elif want.batch_invariant and want.arch in provider.unchecked and not forced:
            passed_over[provider.name] = (
                f"not run on hardware: batch invariance unchecked on {want.arch.value}; "
                f"DEEPINFER_PLUGINS_{op.upper()}={provider.name} takes it all the same"
            )
        elif chosen is None:
            chosen = provider
        else:
            unchecked = "; not run on hardware" if want.arch in provider.unchecked else ""
            passed_over[provider.name] = f"{chosen.name} is preferred{unchecked}"
    if chosen is None:
        reasons = [f"  {name}: {why}" for name, why in passed_over.items()] or ["  none is registered"]
        raise NoProvider(
            "\n".join([f"no provider of {op} for {want}", *reasons])
            + f"\nadd one under kernels/{op}/, or name one of those above in {variable}"
        )
    return Choice(chosen, passed_over)
