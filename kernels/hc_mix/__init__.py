"""Hyper-connections: the next mixing weights, from the streams."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider, Within

# Not run on hardware on an SM100.
register(
    Provider(
        op="hc_mix",
        name="triton",
        path="deepinfer_plugins.kernels.hc_mix.triton:hc_mix",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Within(atol=1e-5, rtol=1e-4),
        needs=("triton",),
        capturable=True,
        unchecked=frozenset({Arch.SM100}),
    )
)
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
