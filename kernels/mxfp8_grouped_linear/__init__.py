"""Block-diagonal linear layer: group ``g`` of the input meets group ``g`` of the weight."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

register(
    Provider(
        op="mxfp8_grouped_linear",
        name="torch",
        path="deepinfer_plugins.kernels.mxfp8_grouped_linear.torch:mxfp8_grouped_linear",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
