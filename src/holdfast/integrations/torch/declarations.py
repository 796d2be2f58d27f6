"""What a user declares of a module's parameters where they are, so that the state may hold the module as it is."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.integrations.torch.meshes import is_dtensor
from holdfast.state.declared import Replicated, Shard, attach
from holdfast.state.layouts import everywhere

Rule = Callable[[Any], Shard | Replicated]


def declare(what: Shard | Replicated | nn.Module, rules: Mapping[str, Rule] | None = None) -> None:
    """Declares of a parameter itself that it is this rank's part of a global one, or the same on several ranks.

    `declare(holdfast.fused(layer.qkv.weight, sizes=(h, h, h), rank=r, of=n))` is kept with the parameter: wherever a
    state holds it, in a module too, it is saved and restored as that part, and so is optimizer state of its shape.
    `declare(holdfast.replicated(module))` does it for every parameter and buffer of a module. With `rules`, `what` is a
    module: globs over the names of its parameters, each with what makes the declaration of one; the first that matches
    counts, and a parameter that none matches is left alone.

    Raises UsageError for what cannot be declared (a DTensor says itself where it lies), and for a rule that matches
    nothing.
    """
    if rules is not None:
        _by_name(what, rules)
    elif isinstance(what, Shard):
        _declare(what)
    elif isinstance(what, Replicated) and isinstance(what.value, nn.Module):
        for tensor in [*what.value.parameters(), *what.value.buffers()]:
            _declare(Replicated(tensor))
    elif isinstance(what, Replicated):
        _declare(what)
    else:
        raise UsageError(
            f"a {type(what).__name__} declares nothing",
            hint="holdfast.declare(holdfast.shard(parameter, …)), or a module with rules",
        )


def _by_name(module: Any, rules: Mapping[str, Rule]) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(f"rules are for a module, not for a {type(module).__name__}", hint="declare(model, rules)")
    unused = dict.fromkeys(rules)
    for name, parameter in module.named_parameters():
        rule = next((one for one in rules if fnmatch.fnmatchcase(name, one)), None)
        if rule is not None:
            unused.pop(rule, None)
            _declare(rules[rule](parameter))
    if unused:
        raise UsageError(
            f"no parameter is called {next(iter(unused))!r}",
            hint="globs over names such as " + repr(next((name for name, _ in module.named_parameters()), "weight")),
        )


def _declare(what: Any) -> None:
    tensor = getattr(what, "value", None)
    if not isinstance(what, Shard | Replicated) or not isinstance(tensor, torch.Tensor) or is_dtensor(tensor):
        raise UsageError(
            f"of a {type(tensor if tensor is not None else what).__name__} nothing can be declared",
            hint="declare a tensor of torch; put an array into the state as holdfast.shard(…); a DTensor needs nothing",
        )
    attach(tensor, what.layout if isinstance(what, Shard) else everywhere(tensor.shape))
