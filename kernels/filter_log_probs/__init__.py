"""Log-probabilities after temperature, min-p, top-k and top-p."""

from deepinfer_plugins.core.target import Arch
from deepinfer_plugins.kernels.registry import register
from deepinfer_plugins.kernels.spec import Bitwise, Provider

# Not run on hardware on an SM100.
register(
    Provider(
        op="filter_log_probs",
        name="triton",
        path="deepinfer_plugins.kernels.filter_log_probs.triton:filter_log_probs",
        archs=frozenset({Arch.SM90, Arch.SM100}),
        batch_invariant=True,
        agrees=Bitwise(),
        needs=("triton",),
        capturable=True,
        unchecked=frozenset({Arch.SM100}),
    )
)
register(
    Provider(
        op="filter_log_probs",
        name="torch",
        path="deepinfer_plugins.kernels.filter_log_probs.torch:filter_log_probs",
        archs=frozenset(Arch),
        batch_invariant=True,
        agrees=Bitwise(),
    )
)
