"""Root-mean-square normalisation of rows."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider, Within

# Not run on hardware on an SM100.
register(
    Provider(
        op="rms_norm",
        name="triton",
        path="deepinfer_plugins.kernels.rms_norm.triton:rms_norm",
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
        op="rms_norm",
        name="tile_kernels",
        path="deepinfer_plugins.kernels.rms_norm.tile_kernels:rms_norm",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        # One step of bfloat16.
        agrees=Within(atol=2.0**-16, rtol=2.0**-7),
        needs=("tile_kernels.quant:norm_forward",),
        unchecked=frozenset({Arch.SM90, Arch.SM100}),
    )
)
register(
    Provider(
        op="rms_norm",
        name="torch",
        path="deepinfer_plugins.kernels.rms_norm.reference:rms_norm",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
