"""Engram: fetch table rows."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

register(
    Provider(
        op="engram_gather",
        name="torch",
        path="deepinfer_plugins.kernels.engram_gather.reference:engram_gather",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
# Behind torch until a run on each of these chips is on record.
register(
    Provider(
        op="engram_gather",
        name="triton",
        path="deepinfer_plugins.kernels.engram_gather.triton:engram_gather",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Bitwise(),
        needs=("triton",),
    )
)
