"""Rejection of one draft token a row, and the token in its place."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

# Not run on hardware on an SM100.
register(
    Provider(
        op="accept_or_resample",
        name="triton",
        path="deepinfer_plugins.kernels.accept_or_resample.triton:accept_or_resample",
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
        op="accept_or_resample",
        name="torch",
        path="deepinfer_plugins.kernels.accept_or_resample.torch:accept_or_resample",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
