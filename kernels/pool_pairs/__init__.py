"""Compressor: pool two latents by a softmax over their gates."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

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
# Behind torch until a run on each of these chips is on record.
register(
    Provider(
        op="pool_pairs",
        name="triton",
        path="deepinfer_plugins.kernels.pool_pairs.triton:pool_pairs",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Bitwise(),
        needs=("triton",),
    )
)
