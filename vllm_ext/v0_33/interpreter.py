"""Triton's interpreter as a stand-in for a GPU, so that vLLM's V2 model runner runs on a CPU.

The runner's own kernels (block tables, sampling) are Triton. Under ``TRITON_INTERPRET=1`` they run
in numpy, but Triton still looks up an active driver (autotuning does, and so does vLLM when it decides
whether it has Triton at all), and the wheel has none for a CPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

NAME = "interpreter"


def install() -> None:
    """Switch the interpreter on and give Triton a driver that says so. Harmless when done before.

    Must run before anything decorates a kernel, since Triton decides at decoration whether to
    compile it. vLLM imports Triton before it loads plugins, so Triton's own functions are decorated again.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import Backend, backends

    if NAME in backends:
        return
    compiler, driver = _classes()
    backends[NAME] = Backend(compiler, driver)
    _interpret_library()


def _interpret_library() -> None:
    """Exchange the functions of Triton's library (``tl.max`` and its like) for interpreted ones."""
    from triton.language.core import tensor
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, InterpretedFunction] = {}
    modules = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    for holder in [*modules, tensor]:
        for name, value in [*vars(holder).items()]:
            if isinstance(value, JITFunction):
                exchanged = interpreted.setdefault(id(value), InterpretedFunction(value.fn))
                setattr(holder, name, exchanged)


def _classes() -> tuple[type, type]:
    """The two classes that make a Triton backend; here because their bases come with Triton."""
    import torch
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase

    class InterpreterCompiler(BaseBackend):
        """Claims the target; asked to compile, it says why it can't."""

        @staticmethod
        def supports_target(target: GPUTarget) -> bool:
            return target.backend == NAME

        def hash(self) -> str:
            return NAME

        def parse_options(self, options: dict[str, Any]) -> Any:
            raise NotImplementedError(
                "Triton's interpreter compiles nothing: TRITON_INTERPRET=1 was unset too late"
            )

        def add_stages(self, stages: dict[str, Any], options: Any, language: Any = None) -> None:
            self.parse_options({})

        def load_dialects(self, context: Any) -> None:
            self.parse_options({})

        def get_module_map(self) -> dict[str, Any]:
            return {}

    class InterpreterDriver(DriverBase):
        """A device of one CPU without streams."""

        @classmethod
        def is_active(cls) -> bool:
            return os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget(NAME, 0, 1)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cpu

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            return None

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_empty_cache_for_benchmark(self) -> torch.Tensor:
            return torch.empty(1)

        def clear_cache(self, cache: torch.Tensor) -> None:
            return None

        def get_benchmarker(self) -> Callable[..., Any]:
            return _benchmark

    return InterpreterCompiler, InterpreterDriver


def _benchmark(kernel: Callable[[], Any], *, quantiles: list[float] | None = None, **_: Any) -> Any:
    """Milliseconds of one run, once per quantile asked for: tuning an interpreter is pointless."""
    start = time.perf_counter()
    kernel()
    elapsed = 1e3 * (time.perf_counter() - start)
    return [elapsed] * len(quantiles) if quantiles else elapsed
