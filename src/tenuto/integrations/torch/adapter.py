"""The adapter for torch's values: tensors, modules, optimizers, generators, and its small plain types."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from tenuto.errors import CorruptionError, Unserialisable, UsageError
from tenuto.integrations.torch import modules, sharded, tensors
from tenuto.integrations.torch.device import TORCH_DTYPES
from tenuto.integrations.torch.meshes import is_dtensor
from tenuto.integrations.torch.modules import settle
from tenuto.integrations.torch.optimizers import encode as optimizer_encode
from tenuto.integrations.torch.optimizers import restore as optimizer_restore
from tenuto.integrations.torch.tensors import PLAIN, TensorDict
from tenuto.integrations.torch.wrappers import own_tensors
from tenuto.model.leaf import LeafSpec, escape, join
from tenuto.model.records import Json
from tenuto.state.contract import Memory, Sink
from tenuto.state.declarations import Replicated, Shard, attach, attached, declarations, replicated_layout
from tenuto.state.encode.walker import StateWalker
from tenuto.state.frameworks import Refresh
from tenuto.state.restore.restorer import Restorer, Thunk
from tenuto.state.tree import ROOT, kind_of

_SMALL: Final = (torch.Size, torch.dtype, torch.device)


def _small_node(value: Any) -> Json:
    if isinstance(value, torch.Size):
        return {"!": "torch.size", "v": [int(one) for one in value]}
    kind = "torch.dtype" if isinstance(value, torch.dtype) else "torch.device"
    return {"!": kind, "v": str(value).removeprefix("torch.") if kind == "torch.dtype" else str(value)}


def _small(node: Json, path: str) -> Any:
    try:
        if node["!"] == "torch.size":
            return torch.Size(node["v"])
        return TORCH_DTYPES[node["v"]] if node["!"] == "torch.dtype" else torch.device(node["v"])
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        raise CorruptionError(f"{path or ROOT}: no {node['!']}: {error}", subject=path) from None


class TorchAdapter:
    def claims(self, kind: type) -> bool:
        return issubclass(kind, (torch.Tensor, nn.Module, Optimizer, torch.Generator, *_SMALL))

    def plain(self, kind: type) -> bool:
        return issubclass(kind, _SMALL)

    def owners(self, value: Any, path: str) -> Iterable[tuple[Any, str]]:
        if isinstance(value, nn.Module):
            settle(value)
            return [(tensor, join(path, escape(name))) for _, name, tensor, _ in own_tensors(value)]
        return [(value, path or ROOT)] if isinstance(value, torch.Tensor) else []

    def encode(self, value: Any, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
        if isinstance(value, torch.Tensor):
            return tensors.encode(value, path, writer)
        if isinstance(value, nn.Module):
            return modules.encode(value, path, writer)
        if isinstance(value, Optimizer):
            return optimizer_encode.encode(value, path, writer)
        if isinstance(value, torch.Generator):
            return _generator_node(value, path, writer), lambda again, replay: _generator_node(again, path, replay)
        return _small_node(value), lambda again, _: _small_node(again)

    def encode_shard(self, value: Shard, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
        if not isinstance(value.value, torch.Tensor):
            raise Unserialisable(f"{path or ROOT}: only a tensor can be a shard", subject=path)
        return sharded.encode_shard(value, path, writer)

    def encode_entries(
        self, entries: Mapping[str, Any], path: str, writer: StateWalker
    ) -> tuple[list[Json], Refresh] | None:
        if declarations() and any(attached(one) is not None for one in entries.values()):
            return None
        if not all(type(one) in PLAIN and one.layout is torch.strided for one in entries.values()):
            return None
        recorded = TensorDict(entries, path, writer)
        return recorded.pairs, recorded.again

    def restore(self, value: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
        if isinstance(value, torch.Tensor):
            return tensors.restore(value, node, path, restorer)
        if isinstance(value, nn.Module):
            return modules.restore(value, node, path, restorer)
        if isinstance(value, Optimizer):
            return optimizer_restore.restore(value, node, path, restorer)
        if isinstance(value, torch.Generator):
            return _restore_generator(value, node, path, restorer)
        return restorer.rebuild(node, path) if restorer.takes(path) else lambda: value

    def restore_shard(self, value: Shard, node: Json, path: str, restorer: Restorer) -> Thunk:
        return sharded.restore_shard(value, node, path, restorer)

    def restore_all(
        self, values: Sequence[Any], nodes: Sequence[Json], paths: Sequence[str], restorer: Restorer
    ) -> bool:
        return tensors.restore_all(values, nodes, paths, restorer)

    def fresh(self, node: Json, path: str, restorer: Restorer) -> Thunk:
        kind = kind_of(node)
        if kind == "generator":
            return _fresh_generator(node, path, restorer)
        made = {
            "module": modules.fresh,
            "optimizer": optimizer_restore.fresh,
            "sparse": tensors.fresh_sparse,
            "subclass": tensors.fresh_subclass,
        }.get(kind)
        if made is not None:
            return made(node, path, restorer)
        value = _small(node, path)
        return lambda: value

    def move(self, value: Any, device: Any) -> None:
        if isinstance(value, nn.Module):
            value.to(device)

    def memory(self, value: Any) -> Memory | None:
        return tensors.memory(value) if isinstance(value, torch.Tensor) else None

    def allocate(self, spec: LeafSpec, node: Json, device: Any) -> tuple[Any, Sink]:
        return tensors.allocate(spec, device)

    def view(self, base: Any, node: Json) -> Any:
        return tensors.view(base, node)


def _generator_node(value: torch.Generator, path: str, writer: StateWalker) -> Json:
    return {"!": "generator", "device": value.device.type, "v": writer.encode(value.get_state(), path)}


def _restore_generator(value: torch.Generator, node: Json, path: str, restorer: Restorer) -> Thunk:
    if kind_of(node) != "generator" or node.get("device") != value.device.type:
        return restorer.mismatch(value, path, restorer.words(node), f"a {value.device.type} generator")
    if not restorer.takes(path):
        return lambda: value
    with restorer.on("cpu"):
        state = restorer.rebuild(node.get("v"), path)
    restorer.restored.append(path)

    def set_state() -> None:
        before = value.get_state()
        restorer.kept.undo(path, lambda: value.set_state(before))
        value.set_state(state())

    restorer.later(path, set_state)
    return lambda: value


def _fresh_generator(node: Json, path: str, restorer: Restorer) -> Thunk:
    with restorer.on("cpu"):
        state = restorer.rebuild(node.get("v"), path)
    device = str(node.get("device", "cpu"))
    if device == "cuda" and not torch.cuda.is_available():
        restorer.notes.append(f"{path}: no CUDA device is here for this generator; its state is loaded as a tensor")
        return state
    return lambda: torch.Generator(device).set_state(state())


adapter: Final = TorchAdapter()


# -- declarations on parameters, for states that contain the module itself

Rule = Callable[[Any], Shard | Replicated]


def declare(what: Shard | Replicated | nn.Module, rules: Mapping[str, Rule] | None = None) -> None:
    """Declares that a parameter is this rank's part of a global one, or equal on several ranks.

    `declare(tenuto.fused(layer.qkv.weight, sizes=(h, h, h), rank=r, of=n))` stays with the parameter: wherever a state
    contains it, also in a module, it is saved and restored as that part, and so is optimizer state of its shape.
    `declare(tenuto.replicated(module))` does this for every parameter and buffer of a module. With `rules`, `what` is a
    module: globs over the names of its parameters, each with a function that declares one; the first match counts, and
    a parameter without a match stays undeclared.

    Raises UsageError for what cannot be declared (a DTensor has its own layout), and for a rule that matches nothing.
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
            hint="tenuto.declare(tenuto.shard(parameter, …)), or a module with rules",
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
            hint="declare a tensor of torch; put an array into the state as tenuto.shard(…); a DTensor needs nothing",
        )
    attach(tensor, what.layout if isinstance(what, Shard) else replicated_layout(tensor.shape))
