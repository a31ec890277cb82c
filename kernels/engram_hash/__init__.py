"""Engram: table rows of the n-grams that end at each token."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

# Not run on hardware on an SM100.
register(
    Provider(
        op="engram_hash",
        name="triton",
        path="deepinfer_plugins.kernels.engram_hash.triton:engram_hash",
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
        op="engram_hash",
        name="torch",
        path="deepinfer_plugins.kernels.engram_hash.reference:engram_hash",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
