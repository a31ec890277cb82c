"""The chosen experts' outputs."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider, Within
from deepinfer_plugins.kernels.vendors import GLUON

register(
    Provider(
        op="experts",
        name="gluon",
        path="deepinfer_plugins.kernels.experts.gluon:experts",
        archs=frozenset({Arch.SM90}),
        batch_invariant=True,
        # As triton's, below.
        agrees=Within(atol=2.0**-3, rtol=2.0**-7),
        needs=(GLUON,),
        capturable=True,
    )
)
# Not run on hardware on an SM100.
register(
    Provider(
        op="experts",
        name="triton",
        path="deepinfer_plugins.kernels.experts.triton:experts",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        # One step of bfloat16; and what float32 loses where terms of some 10^4, as in the tests, cancel.
        agrees=Within(atol=2.0**-3, rtol=2.0**-7),
        needs=("triton",),
        capturable=True,
        unchecked=frozenset({Arch.SM100}),
    )
)
register(
    Provider(
        op="experts",
        name="torch",
        path="deepinfer_plugins.kernels.experts.torch:experts",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
