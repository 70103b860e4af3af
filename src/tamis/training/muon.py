"""Muon: a step of equal size in every direction that a gradient points to.

Muon: An optimizer for hidden layers in neural networks, Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/

    M <- mu M + (1 - mu) G;   N = mu M + (1 - mu) G;   W <- (1 - lr decay) W - lr sqrt(max(1, rows / columns)) U V^T
    with the singular value decomposition N = U S V^T

Directions that are rare in a batch get a step as large as the common ones.  Associative recall, whose pairs are each
rare, has a third of AdamW's loss after as many steps (docs/notebook/mqmtar.md).

U V^T comes from five steps of Newton and Schulz with the coefficients of the paper, which bring singular values of
0.2 % of the norm and more to between 0.68 and 1.21: near enough.  Matrices of one shape go through them together, as a
model has many and each is small.
It is for the matrices inside of a model; embeddings, the output layer, vectors and what a mechanism learns stay with
AdamW.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tamis.training.distributed import gathered, laid_out_as

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """For matrices."""

    found_inf: Tensor | None = None
    """One element, fp32: where it is set and not 0, a step leaves weights and memory as they are."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        shapes = [tuple(p.shape) for group in self.param_groups for p in group["params"] if p.ndim != 2]
        if shapes:
            raise ValueError(f"Muon is for matrices, got a parameter of shape {shapes[0]}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[(*parameter.shape, parameter.device, parameter.dtype)].append(parameter)
            for parameters in alike.values():
                self._update(parameters, group["lr"], group["momentum"], group["weight_decay"])
        return loss

    def _update(self, parameters: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        """One step of matrices of one shape."""
        # Shards are put together: a singular value is one of the whole matrix.
        gradients = torch.stack([gathered(parameter.grad) for parameter in parameters])  # type: ignore[arg-type]
        memory = torch.stack([gathered(self._memory(parameter)) for parameter in parameters])
        moved = memory.lerp(gradients, 1.0 - momentum)
        rows, columns = gradients.shape[1:]
        change = orthogonal(gradients.lerp(moved, momentum)) * (-lr * max(1.0, rows / columns) ** 0.5)
        if weight_decay:
            change -= lr * weight_decay * torch.stack([gathered(parameter) for parameter in parameters])
        if self.found_inf is not None:
            wrong = self.found_inf != 0
            moved, change = torch.where(wrong, memory, moved), torch.where(wrong, 0.0, change)
        torch._foreach_add_(parameters, [laid_out_as(parameters[0], step) for step in change])
        for parameter, new in zip(parameters, moved, strict=True):
            self.state[parameter]["momentum"] = laid_out_as(parameter, new)

    def _memory(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        return state["momentum"] if state else torch.zeros_like(parameter)


def orthogonal(matrices: Tensor) -> Tensor:
    """About U V^T of each of the matrices U S V^T, (N, rows, columns).  In bf16 on a GPU."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=SMALLEST_NORM)[:, None, None]
    x = x.to(torch.bfloat16) if x.is_cuda else x
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrices.dtype)
