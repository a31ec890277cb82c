"""Choose, for each query, the cached entries that it attends to."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

# Not run on hardware on an SM100.
register(
    Provider(
        op="index_select",
        name="triton",
        path="deepinfer_plugins.kernels.index_select.triton:index_select",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Bitwise(),
        needs=("triton",),
        capturable=True,
        unchecked=frozenset({Arch.SM100}),
    )
)
register(
    Provider(
        op="index_select",
        name="torch",
        path="deepinfer_plugins.kernels.index_select.torch:index_select",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
