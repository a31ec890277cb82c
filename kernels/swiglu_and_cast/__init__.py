"""Clamped SwiGLU, then MXFP8."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider, Within

# Not run on hardware on an SM100.
register(
    Provider(
        op="swiglu_and_cast",
        name="triton",
        path="deepinfer_plugins.kernels.swiglu_and_cast.triton:swiglu_and_cast",
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
        op="swiglu_and_cast",
        name="tile_kernels",
        path="deepinfer_plugins.kernels.swiglu_and_cast.tile_kernels:swiglu_and_cast",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        # One step of e4m3.
        agrees=Within(atol=2.0**-9, rtol=2.0**-3),
        needs=("tile_kernels.quant:swiglu_forward_and_per_token_cast",),
        unchecked=frozenset({Arch.SM90, Arch.SM100}),
    )
)
register(
    Provider(
        op="swiglu_and_cast",
        name="torch",
        path="deepinfer_plugins.kernels.swiglu_and_cast.reference:swiglu_and_cast",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
