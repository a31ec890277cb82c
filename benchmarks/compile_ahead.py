"""Compile Triton kernels in several processes: the one that measures then finds them in the cache of Triton.

Needs no GPU: as a program it compiles what the providers of a name launch at the release's shapes for any chip, and
says what does not compile.

Usage: python benchmarks/compile_ahead.py [--arch 100] [--provider gluon] [--ops linear,experts/experts] [--tokens 1,8]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))
from kernel_cases import Draw, KernelCase, all_cases  # noqa: E402

from deepinfer_plugins.kernels import catalogue  # noqa: E402, F401 (registers every provider)
from deepinfer_plugins.kernels.registry import providers  # noqa: E402
from deepinfer_plugins.model.presets import preset  # noqa: E402

Forced = Callable[[KernelCase, Any], contextlib.AbstractContextManager[Any]]


def find(name: str, preset_name: str) -> KernelCase:
    """The case ``op/name`` at the sizes of a preset."""
    return next(case for case in all_cases(preset(preset_name)) if f"{case.op}/{case.name}" == name)


def provider_of(op: str, name: str) -> Callable[..., Any] | None:
    """The operator's provider of that name, whatever it is registered behind."""
    for provider in providers(op):
        if provider.name == name:
            return provider.load()
    return None


def compile_ahead(
    jobs: Sequence[tuple[str, int, Any]],
    preset_name: str,
    arch: int = 0,
    forced: Forced | None = None,
    names: Mapping[str, str] | None = None,
) -> list[str]:
    """Compile what each job launches, and launch nothing.

    Args:
        jobs: ``op/name`` of a case, a number of tokens, and what ``forced`` gets.
        preset_name: Sizes of the cases.
        arch: Compute capability, e.g. 90; 0 for that of the chip here.
        forced: Gives a context for a case, in which the provider is to be called; it must be importable.
        names: The provider by operator; that of Triton where none is named.

    Returns:
        What did not compile, and why.
    """
    start = time.perf_counter()
    if not arch:
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
    one = functools.partial(
        _compile, preset_name=preset_name, arch=arch, forced=forced, names=dict(names or {})
    )
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        notes = list(filter(None, pool.map(one, jobs)))
    for note in notes:
        print(f"# not compiled: {note}", file=sys.stderr)
    print(
        f"# {len(jobs) - len(notes)} of {len(jobs)} calls compiled in {time.perf_counter() - start:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return notes


class _Blank(Draw):
    """Memory that nobody writes or reads."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def choices(self, rows: int, count: int, of: int) -> torch.Tensor:
        return torch.empty(rows, count, dtype=torch.int64)


def _compile(
    job: tuple[str, int, Any], preset_name: str, arch: int, forced: Forced | None, names: Mapping[str, str]
) -> str:
    """Compile one job; returns why it could not, or nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    class Target:
        """A driver of which nothing is asked but the chip."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    driver.set_active(Target())
    run = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    name, n, choice = job
    case = find(name, preset_name)
    function = provider_of(case.op, names.get(case.op, "triton"))
    if function is None:
        return ""
    context = forced(case, choice) if forced else contextlib.nullcontext()
    with mock.patch.object(jit.JITFunction, "run", compile_only), context:
        try:
            function(**case.make(n, _Blank()))
        except Exception as error:  # it is compiled, or fails, again where it is measured
            return f"{job}: {error!r}"[:300]
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch", type=int, default=0, help="compute capability, e.g. 90; default: the chip here"
    )
    parser.add_argument(
        "--ops", default="", help="operators or cases (op/name), separated by commas; default: all"
    )
    parser.add_argument(
        "--provider", default="triton", help="operators without one of that name are left out"
    )
    parser.add_argument("--tokens", default="16")
    parser.add_argument("--preset", default="release")
    arguments = parser.parse_args()
    wanted = set(filter(None, arguments.ops.split(",")))
    cases = [
        case
        for case in all_cases(preset(arguments.preset))
        if not wanted or case.op in wanted or f"{case.op}/{case.name}" in wanted
    ]
    names = {
        case.op: arguments.provider
        for case in cases
        if any(provider.name == arguments.provider for provider in providers(case.op))
    }
    jobs = [
        (f"{case.op}/{case.name}", int(n), None)
        for case in cases
        for n in arguments.tokens.split(",")
        if case.op in names
    ]
    return bool(compile_ahead(jobs, arguments.preset, arguments.arch, names=names))


if __name__ == "__main__":
    sys.exit(main())
