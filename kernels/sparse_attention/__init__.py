"""Attention to a window and to chosen compressed entries, with a sink."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider, Within

# Not run on hardware on an SM100.
register(
    Provider(
        op="sparse_attention",
        name="triton",
        path="deepinfer_plugins.kernels.sparse_attention.triton:sparse_attention",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        # For keys up to 5 in magnitude.
        agrees=Within(atol=1e-2, rtol=1.6e-2),
        needs=("triton",),
        capturable=True,
        unchecked=frozenset({Arch.SM100}),
    )
)
register(
    Provider(
        op="sparse_attention",
        name="torch",
        path="deepinfer_plugins.kernels.sparse_attention.torch:sparse_attention",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
