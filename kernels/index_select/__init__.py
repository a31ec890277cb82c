"""Choose, for each query, the cached entries that it attends to."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

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
# Behind torch until a run on each of these chips is on record.
register(
    Provider(
        op="index_select",
        name="triton",
        path="deepinfer_plugins.kernels.index_select.triton:index_select",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Bitwise(),
        needs=("triton",),
    )
)
