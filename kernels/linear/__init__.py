"""Linear layer on bf16 rows and a bf16 weight."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

register(
    Provider(
        op="linear",
        name="torch",
        path="deepinfer_plugins.kernels.linear.torch:linear",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
