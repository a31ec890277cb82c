"""Linear layer on MXFP8 rows and an MXFP8 weight with 32x32 scales."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

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
