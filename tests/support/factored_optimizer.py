"""An optimizer that keeps, as Adafactor does, state of another shape than its parameter: of a DTensor, a DTensor."""

from __future__ import annotations

from typing import Any

import torch


class Factored(torch.optim.Optimizer):
    """Divides by the root of a running mean of each row's squares."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad, state = parameter.grad, self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["row"] = grad.new_zeros([*grad.shape[:-1], 1])
                state["step"] += 1
                state["row"].lerp_(grad.square().mean(-1, keepdim=True), 0.5)
                parameter.sub_(grad / (state["row"].sqrt() + 0.01), alpha=group["lr"])
