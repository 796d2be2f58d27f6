"""The gradients of a module as an entry of the state: those of an accumulation window that is open when it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tenuto.errors import StateMismatch


class Gradients:
    """The gradients of a module's parameters, saved and restored with the state.

    A training that accumulates over several backward passes and saves between them has gradients that no optimizer
    has used yet. Pass `{"model": model, "gradients": tenuto.torch.Gradients(model), …}`: they are saved where there
    are any, and put back, so that the rest of the window is added to them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the gradients that there are, by the parameter's name."""
        return {name: one.grad for name, one in self.module.named_parameters() if one.grad is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the gradients; parameters that `state` does not name have none. Raises StateMismatch for a name or
        shape that the module does not have."""
        parameters = dict(self.module.named_parameters())
        for name, value in state.items():
            if name not in parameters or parameters[name].shape != value.shape:
                raise StateMismatch(f"the module has no parameter for the gradient {name!r}", subject=name)
        for name, one in parameters.items():
            found = state.get(name)
            if found is None or one.grad is None:
                one.grad = None if found is None else found.detach().to(one.device, one.dtype).clone()
            elif one.grad is not found:
                with torch.no_grad():
                    one.grad.copy_(found)
