"""The two optimizers: Muon for the matrices inside the network, AdamW for everything else."""

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer


class Muon(Optimizer):
    """Momentum whose step is made orthogonal by five Newton-Schulz iterations (Jordan et al. 2024)."""

    def __init__(self, parameters: list[nn.Parameter], *, lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # takes no closure, so no loss
        """Update every matrix; matrices of one shape are done together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append(parameter)
            for shape, members in shapes.items():
                push = orthogonalize(torch.stack([self._push(member, group["momentum"]) for member in members]))
                size = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for member, direction in zip(members, push, strict=True):
                    member.mul_(1 - group["lr"] * group["decay"]).add_(direction, alpha=-size)

    def _push(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[parameter]
        if "average" not in state:
            state["average"] = torch.zeros_like(parameter)
        state["average"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["average"], momentum)  # pyright: ignore[reportOptionalMemberAccess]  # step has checked


def orthogonalize(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly; [matrices, rows, columns] in and out."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


def make_optimizers(network: nn.Module, helpers: nn.Module, *, muon: float, adam: float) -> tuple[Optimizer, ...]:
    """Muon on the two-dimensional weights between embedding and output, AdamW on the rest and on the helper heads."""
    matrices, rest = [], list(helpers.parameters())
    for name, parameter in network.named_parameters():
        inside = parameter.ndim == 2 and not any(word in name for word in ("embed", "lm_head"))
        (matrices if inside else rest).append(parameter)
    return Muon(matrices, lr=muon), AdamW(rest, lr=adam, betas=(0.9, 0.98), weight_decay=0.0)
