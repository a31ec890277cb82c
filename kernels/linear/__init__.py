"""Linear layer on bf16 rows and a bf16 weight."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider, Within
from deepinfer_plugins.kernels.vendors import needs_deep_gemm

# Not run on hardware on an SM100.
register(
    Provider(
        op="linear",
        name="triton",
        path="deepinfer_plugins.kernels.linear.triton:linear",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Within(atol=2.0**-7, rtol=2.0**-7),
        needs=("triton",),
        capturable=True,
        unchecked=frozenset({Arch.SM100}),
    )
)
# Not batch-invariant; by name only, with the mode off, where it is not faster by more than chance. Not run on an SM100.
register(
    Provider(
        op="linear",
        name="cublas",
        path="deepinfer_plugins.kernels.linear.cublas:linear",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=False,
        agrees=Within(atol=2.0**-7, rtol=2.0**-7),
        capturable=True,
        unchecked=frozenset({Arch.SM100}),
    )
)
# Not run on hardware, so after what is.
register(
    Provider(
        op="linear",
        name="deep_gemm",
        path="deepinfer_plugins.kernels.linear.deep_gemm:linear",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Within(atol=2.0**-7, rtol=2.0**-7),
        needs=(needs_deep_gemm("bf16_gemm_nt"),),
        unchecked=frozenset({Arch.SM90, Arch.SM100}),
    )
)
register(
    Provider(
        op="linear",
        name="torch",
        path="deepinfer_plugins.kernels.linear.torch:linear",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
