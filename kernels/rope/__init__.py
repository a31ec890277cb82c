"""Rotary position embedding of the trailing dimensions."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

register(
    Provider(
        op="rope",
        name="torch",
        path="deepinfer_plugins.kernels.rope.reference:rope",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
# Behind torch until a run on each of these chips is on record.
register(
    Provider(
        op="rope",
        name="triton",
        path="deepinfer_plugins.kernels.rope.triton:rope",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Bitwise(),
        needs=("triton",),
    )
)
