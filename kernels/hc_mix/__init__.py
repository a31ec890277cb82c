"""Hyper-connections: the next mixing weights, from the streams."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

register(
    Provider(
        op="hc_mix",
        name="torch",
        path="deepinfer_plugins.kernels.hc_mix.torch:hc_mix",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
