"""Hyper-connections: one input from the streams."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider, Within

# Not run on hardware on an SM100.
register(
    Provider(
        op="hc_collapse",
        name="triton",
        path="deepinfer_plugins.kernels.hc_collapse.triton:hc_collapse",
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
        op="hc_collapse",
        name="tile_kernels",
        path="deepinfer_plugins.kernels.hc_collapse.tile_kernels:hc_collapse",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        # One step of bfloat16.
        agrees=Within(atol=2.0**-16, rtol=2.0**-7),
        needs=("tile_kernels.mhc:mhc_pre_apply_mix_fwd",),
        unchecked=frozenset({Arch.SM90, Arch.SM100}),
    )
)
register(
    Provider(
        op="hc_collapse",
        name="torch",
        path="deepinfer_plugins.kernels.hc_collapse.reference:hc_collapse",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
