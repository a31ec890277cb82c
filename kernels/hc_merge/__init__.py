"""Hyper-connections: spread a sublayer's output over the streams and mix the streams."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

# Not run on hardware on an SM100.
register(
    Provider(
        op="hc_merge",
        name="triton",
        path="deepinfer_plugins.kernels.hc_merge.triton:hc_merge",
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
        op="hc_merge",
        name="torch",
        path="deepinfer_plugins.kernels.hc_merge.reference:hc_merge",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
