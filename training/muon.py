"""Muon: the momentum of a matrix, made orthogonal, as its update.

Everything that is no linear map (embeddings, the head, norms, hyper-connections, routers) is left to AdamW.
Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; scale of the update from
"Muon is Scalable for LLM Training" (arXiv 2502.16982). torch's own takes no stacks of matrices, which is what the
experts are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

# The quintic iteration of the source: singular values go to about 1 in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_MOMENTUM = 0.95


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """About ``U V^T`` of each of ``matrices [n, a, b]``."""
    a, b, c = _COEFFICIENTS
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """The optimiser of matrices, and of stacks of them.

    Args:
        parameters: ``[..., a, b]``.
        lr: A number, or a tensor of one, on the parameters' device. The root mean square of an update is a fifth of
            it, as AdamW's usually is.
        weight_decay: As in AdamW.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], lr: float | torch.Tensor, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[torch.nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[tuple(parameter.shape[-2:])].append(parameter)
            for shape, parameters in alike.items():
                updates = []
                for parameter in parameters:
                    assert parameter.grad is not None
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1 - _MOMENTUM)
                    updates.append(parameter.grad.lerp(momentum, _MOMENTUM).reshape(-1, *shape))
                update = orthogonalise(torch.cat(updates)) * (0.2 * max(shape) ** 0.5)
                for parameter, own in zip(parameters, update.split([len(u) for u in updates]), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(own.reshape(parameter.shape) * group["lr"])
