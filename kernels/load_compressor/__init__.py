"""Read rows that wait for their pair from their cache."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

register(
    Provider(
        op="load_compressor",
        name="torch",
        path="deepinfer_plugins.kernels.load_compressor.reference:load_compressor",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
