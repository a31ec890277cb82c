"""Root-mean-square normalisation of rows."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

register(
    Provider(
        op="rms_norm",
        name="torch",
        path="deepinfer_plugins.kernels.rms_norm.reference:rms_norm",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
# Behind torch until a run on each of these chips is on record.
register(
    Provider(
        op="rms_norm",
        name="triton",
        path="deepinfer_plugins.kernels.rms_norm.triton:rms_norm",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Bitwise(),
        needs=("triton",),
    )
)
