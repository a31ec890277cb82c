"""Write rows that wait for their pair to their cache."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

register(
    Provider(
        op="store_compressor",
        name="torch",
        path="deepinfer_plugins.kernels.store_compressor.reference:store_compressor",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
