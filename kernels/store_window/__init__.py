"""Write sliding-window keys to their cache."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

register(
    Provider(
        op="store_window",
        name="torch",
        path="deepinfer_plugins.kernels.store_window.reference:store_window",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
