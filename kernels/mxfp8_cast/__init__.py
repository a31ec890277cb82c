"""Quantise rows to MXFP8: e4m3 with one power-of-two scale per 32 values."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

# Not run on hardware on an SM100.
register(
    Provider(
        op="mxfp8_cast",
        name="triton",
        path="deepinfer_plugins.kernels.mxfp8_cast.triton:mxfp8_cast",
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
        op="mxfp8_cast",
        name="tile_kernels",
        path="deepinfer_plugins.kernels.mxfp8_cast.tile_kernels:mxfp8_cast",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Bitwise(),
        needs=("tile_kernels.quant:per_token_cast",),
        unchecked=frozenset({Arch.SM90, Arch.SM100}),
    )
)
register(
    Provider(
        op="mxfp8_cast",
        name="torch",
        path="deepinfer_plugins.kernels.mxfp8_cast.reference:mxfp8_cast",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
