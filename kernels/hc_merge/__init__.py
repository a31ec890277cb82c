"""Hyper-connections: spread a sublayer's output over the streams and mix the streams."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider, Within

# Not run on hardware on an SM100.
register(
    Provider(
        op="hc_merge",
        name="triton",
        path="deepinfer_plugins.kernels.hc_merge.triton:hc_merge",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Bitwise(),
        needs=("triton",),
        capturable=True,
        unchecked=frozenset({Arch.SM100}),
    )
)
# Not run on hardware, so after what is.
register(
    Provider(
        op="hc_merge",
        name="tile_kernels",
        path="deepinfer_plugins.kernels.hc_merge.tile_kernels:hc_merge",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        # One step of bfloat16.
        agrees=Within(atol=2.0**-16, rtol=2.0**-7),
        needs=("tile_kernels.mhc:mhc_post_fwd",),
        unchecked=frozenset({Arch.SM90, Arch.SM100}),
    )
)
register(
    Provider(
        op="hc_merge",
        name="torch",
        path="deepinfer_plugins.kernels.hc_merge.reference:hc_merge",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
