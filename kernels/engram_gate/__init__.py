"""Engram: add the fetched value to each stream, as far as the stream's gate opens."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider, Within

# Not run on hardware on an SM100.
register(
    Provider(
        op="engram_gate",
        name="triton",
        path="deepinfer_plugins.kernels.engram_gate.triton:engram_gate",
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
        op="engram_gate",
        name="tile_kernels",
        path="deepinfer_plugins.kernels.engram_gate.tile_kernels:engram_gate",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        # One step of bfloat16, and what a gate differs by where nothing agrees.
        agrees=Within(atol=2.0**-9, rtol=2.0**-7),
        needs=("tile_kernels.engram:engram_gate_fwd",),
        unchecked=frozenset({Arch.SM90, Arch.SM100}),
    )
)
register(
    Provider(
        op="engram_gate",
        name="torch",
        path="deepinfer_plugins.kernels.engram_gate.torch:engram_gate",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
