"""Write compressed keys to their cache."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

# Not run on hardware on an SM100.
register(
    Provider(
        op="store_compressed",
        name="triton",
        path="deepinfer_plugins.kernels.store_compressed.triton:store_compressed",
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
        op="store_compressed",
        name="torch",
        path="deepinfer_plugins.kernels.store_compressed.reference:store_compressed",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
