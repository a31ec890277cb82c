"""Rejection of one draft token a row, and the token in its place."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

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
# Behind torch until a run on each of these chips is on record.
register(
    Provider(
        op="accept_or_resample",
        name="triton",
        path="deepinfer_plugins.kernels.accept_or_resample.triton:accept_or_resample",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Bitwise(),
        needs=("triton",),
    )
)
