"""Attention to a window and to chosen compressed entries, with a sink."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

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
