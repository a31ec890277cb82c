"""Linear layer on MXFP8 rows and an MXFP8 weight with 32x32 scales."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider, Within
from deepinfer_plugins.kernels.vendors import GLUON, needs_deep_gemm

register(
    Provider(
        op="mxfp8_linear",
        name="gluon",
        path="deepinfer_plugins.kernels.mxfp8_linear.gluon:mxfp8_linear",
        archs=frozenset({Arch.SM90}),
        batch_invariant=True,
        # The bits of triton.
        agrees=Within(atol=2.0**-5, rtol=2.0**-7),
        needs=(GLUON,),
        capturable=True,
    )
)
# Not run on hardware on an SM100.
register(
    Provider(
        op="mxfp8_linear",
        name="triton",
        path="deepinfer_plugins.kernels.mxfp8_linear.triton:mxfp8_linear",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        # One step of bfloat16; and what float32 loses where terms of some 10^4, as in the tests, cancel.
        agrees=Within(atol=2.0**-5, rtol=2.0**-7),
        needs=("triton",),
        capturable=True,
        unchecked=frozenset({Arch.SM100}),
    )
)
# Not run on hardware, so after what is.
register(
    Provider(
        op="mxfp8_linear",
        name="deep_gemm",
        path="deepinfer_plugins.kernels.mxfp8_linear.deep_gemm:mxfp8_linear",
        archs=frozenset({Arch.SM100}),
        batch_invariant=True,
        # As of triton.
        agrees=Within(atol=2.0**-5, rtol=2.0**-7),
        needs=(needs_deep_gemm("fp8_fp4_gemm_nt"),),
        unchecked=frozenset({Arch.SM100}),
    )
)
register(
    Provider(
        op="mxfp8_linear",
        name="torch",
        path="deepinfer_plugins.kernels.mxfp8_linear.torch:mxfp8_linear",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
