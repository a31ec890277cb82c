"""Makes PyPI's torchvision importable beside a CPU build of torch.

Its compiled operators are built for CUDA and do not load; it then fails to declare fake versions of
operators that are not there ("operator torchvision::nms does not exist"). No model of ours needs them, but
SGLang imports torchvision with the configurations of its vision models. scripts/setup-env puts this file,
and a .pth that imports it, into site-packages.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing; acts when torchvision is first looked for: Python's start-up imports no torch."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _skip_fakes_of_missing_operators()


def _skip_fakes_of_missing_operators() -> None:
    import torch

    register_fake = torch.library.register_fake

    def register_fake_if_defined(op: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if isinstance(op, str) and op.startswith("torchvision::"):
            if not hasattr(torch.ops.torchvision, op.removeprefix("torchvision::")):
                return lambda function: function
        return register_fake(op, *args, **kwargs)

    torch.library.register_fake = register_fake_if_defined


sys.meta_path.insert(0, _BeforeTorchvision())
