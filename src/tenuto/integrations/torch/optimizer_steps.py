"""What optimizers left behind at their latest step: gradients that they have used, weights as they made them.

A save may fall where that is not what lies there any more. Gradients of a backward that no step has used yet are those
of an open accumulation window, which a checkpoint does not have. Weights that something else has changed since may be
averaged ones, swapped in for an evaluation. Torch counts the changes of each tensor; a few tensors of each optimizer
are looked at behind each step, by that counter and by where they lie, so that no value is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_FEW: Final = 8
"""Parameters of each optimizer that are looked at."""
_SAMPLED: Final = 64
"""Elements of a gradient that are looked at for one that is not zero."""


class _Behind:
    """What one optimizer's latest step left behind."""

    def __init__(self) -> None:
        self.weights: dict[int, tuple[int, int]] = {}
        self.gradients: dict[int, tuple[int, int]] = {}
        self.touched = 0
        """Steps in a row before which the weights had been changed by something else, as by a loop that clips them."""


_behind: Final[weakref.WeakKeyDictionary[Optimizer, _Behind]] = weakref.WeakKeyDictionary()
_followed: list[Any] = []


def follow() -> None:
    """Begins to look behind the steps of all optimizers, once per process."""
    if not _followed:
        _followed.append(register_optimizer_step_pre_hook(_before))
        _followed.append(register_optimizer_step_post_hook(_after))


def _before(optimizer: Optimizer, *_: Any) -> None:
    behind = _behind.get(optimizer)
    if behind is not None:
        behind.touched = behind.touched + 1 if _weights(optimizer) != behind.weights else 0


def _after(optimizer: Optimizer, *_: Any) -> None:
    behind = _behind.get(optimizer)
    if behind is None:
        behind = _behind[optimizer] = _Behind()
    behind.weights = _weights(optimizer)
    behind.gradients = {id(one): _marked(one.grad) for one in _few(optimizer) if one.grad is not None}


def _few(optimizer: Optimizer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        found += group["params"][: _FEW - len(found)]
        if len(found) == _FEW:
            break
    return found


def _weights(optimizer: Optimizer) -> dict[int, tuple[int, int]]:
    return {id(one): (one.data_ptr(), one._version) for one in _few(optimizer)}


def _marked(gradient: torch.Tensor) -> tuple[int, int]:
    return id(gradient), gradient._version


def window_is_open(optimizer: Optimizer, saved: Container[int] = ()) -> bool:
    """Returns whether gradients lie there that no step of this optimizer has used: some are others than the latest step
    left, and not zero. Waits for the device only where gradients have changed since. `saved`: the addresses (`id`) of
    tensors that are saved."""
    behind = _behind.get(optimizer)
    used = {} if behind is None else behind.gradients
    return any(
        _marked(one.grad) != used.get(id(one)) and id(one.grad) not in saved and _has_values(one.grad)
        for one in _few(optimizer)
        if one.grad is not None
    )


def weights_were_swapped(optimizer: Optimizer) -> bool:
    """Returns whether the weights are others than the latest step left, where they had not been before that step.

    Not seen: a change of some values through `.data`, which torch does not count.
    """
    behind = _behind.get(optimizer)
    return behind is not None and not behind.touched and _weights(optimizer) != behind.weights


def _has_values(gradient: torch.Tensor) -> bool:
    inside = gradient._values() if gradient.is_sparse else getattr(gradient, "_local_tensor", gradient)
    flat = inside.detach().reshape(-1) if inside.is_contiguous() else inside.detach().flatten()
    few = flat[:: max(1, flat.numel() // _SAMPLED)]
    # infinite ones are of a step that a GradScaler has skipped, and no step will use them
    return bool(few.any()) and bool(few.isfinite().all())
