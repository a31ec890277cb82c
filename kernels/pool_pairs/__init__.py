"""Compressor: pool two latents by a softmax over their gates."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

# Not run on hardware on an SM100.
register(
    Provider(
        op="pool_pairs",
        name="triton",
        path="deepinfer_plugins.kernels.pool_pairs.triton:pool_pairs",
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
        op="pool_pairs",
        name="torch",
        path="deepinfer_plugins.kernels.pool_pairs.reference:pool_pairs",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
