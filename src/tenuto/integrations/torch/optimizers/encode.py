"""Encodes optimizers: state is stored under the full path of its parameter, found by identity."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch.optim import Optimizer

from tenuto.errors import StateError
from tenuto.integrations.torch import sharded, tensors
from tenuto.integrations.torch.meshes import is_dtensor, on_one_rank
from tenuto.integrations.torch.optimizers.zero import local_optimizer
from tenuto.integrations.torch.tensors import TensorDict
from tenuto.integrations.torch.wrappers import replicas_in
from tenuto.model.leaf import Placement, join
from tenuto.model.records import Json
from tenuto.state.declarations import Shard, ShardLayout, attached
from tenuto.state.encode.walker import StateWalker, StructureChanged
from tenuto.state.frameworks import Refresh, type_name
from tenuto.state.tree import ROOT, segment

_KNOWN: Final = ("state", "param_groups")


def its_own_way(optimizer: Optimizer, method: str) -> bool:
    """Returns whether an optimizer overrides state_dict or load_state_dict, or has hooks on it. A wrapper around
    another one may lack everything that Optimizer.__init__ sets."""
    names = (f"_optimizer_{method}_pre_hooks", f"_optimizer_{method}_post_hooks")
    own = getattr(type(optimizer), method) is not getattr(Optimizer, method)
    return own or any(getattr(optimizer, name, None) for name in names)


def encode(optimizer: Optimizer, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
    local = local_optimizer(optimizer, path)
    if local is not optimizer:
        node, again = encode(local, path, writer)
        return node, lambda outer, replay: again(local_optimizer(outer, path), replay)
    paths = _paths(optimizer, path, writer)
    kind = type_name(type(optimizer))
    known_parameters = [list(group["params"]) for group in optimizer.param_groups]
    if its_own_way(optimizer, "state_dict"):
        return _saved_node(optimizer, kind, paths, path, writer), _refresh_saved(
            optimizer, kind, known_parameters, paths, path
        )
    places = [_Place(parameter, value, path, paths, writer) for parameter, value in optimizer.state.items()]
    named, other = _split(places)
    node = _node(kind, named, other, _group_nodes(optimizer.param_groups, paths, path, writer))

    def refresh(again: Optimizer, replay: StateWalker) -> Json:
        _check_groups(again, optimizer, known_parameters)
        if its_own_way(again, "state_dict") or len(again.state) != len(places):
            raise StructureChanged
        for place in places:
            place.again(again.state, replay)
        named, other = _split(places)
        return _node(kind, named, other, _group_nodes(again.param_groups, paths, path, replay))

    return node, refresh


def _node(kind: str, named: list[Json], other: list[Json], groups: Json, extra: Sequence[Json] = ()) -> Json:
    pairs: list[Json] = [["state", {"!": "bypath", "i": named}]]
    if other:
        pairs.append(["other", {"!": "dict", "i": other}])
    pairs += [["param_groups", groups], *extra]
    return {"!": "optimizer", "type": kind, "v": {"!": "dict", "i": pairs}}


def _paths(optimizer: Optimizer, path: str, writer: StateWalker) -> dict[int, str]:
    """Returns the path of each parameter, by identity."""
    return {id(parameter): located(writer.owner(parameter), optimizer, path, number)
            for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}  # fmt: skip


def located(found: str | None, optimizer: Optimizer, path: str, group: int) -> str:
    if found is None:
        raise StateError(
            f"{path or ROOT}: group {group} of this {type(optimizer).__name__} holds a parameter that is not in "
            "the state",
            subject=path or ROOT,
            hint="put the model that it belongs to into the state, beside the optimizer",
        )
    return found


def _shared_parameters(writer: StateWalker) -> Collection[int]:
    """Returns the identities of parameters that are equal on several ranks."""
    if "replicas" not in writer.extra:
        writer.extra["replicas"] = replicas_in(writer.root).parameters
    found: Collection[int] = writer.extra["replicas"]
    return found


def _placement(parameter: Any, path: str, writer: StateWalker) -> tuple[ShardLayout | None, Placement]:
    """Returns the layout of state with a parameter's shape (None: as it is), and the placement of its other state."""
    layout = sharded.layout_like(parameter, path) if isinstance(parameter, torch.Tensor) else None
    if layout is None or (is_dtensor(parameter) and on_one_rank(parameter)):
        return None, "replicated" if id(parameter) in _shared_parameters(writer) else "whole"
    return layout, "replicated"


def marked(value: Any, layout: ShardLayout | None) -> Any:
    """Returns a parameter's state, in which tensors of the shape of the parameter's part are marked with its layout.

    A step count is equal for every part; a DTensor has its own layout.
    """
    if layout is None or is_dtensor(value):
        return value
    if type(value) is dict:
        return {key: one if key == "step" else marked(one, layout) for key, one in value.items()}
    fits = tensors.is_dense(value) and value.ndim > 0 and tuple(value.shape) == layout.local
    return Shard(value, layout) if fits and attached(value) is None else value


class _Place:
    """The state of one parameter (or of a key that is none): its place, and its refresh."""

    def __init__(self, key: Any, value: Any, path: str, paths: Mapping[int, str], writer: StateWalker) -> None:
        self.key = key
        self.named = isinstance(key, torch.Tensor)
        if self.named and id(key) not in paths:
            raise StateError(f"{path or ROOT}: state of a parameter that is in no group", subject=path)
        self.name = paths[id(key)] if self.named else writer.closed(key, f"{path} (a key)")
        below = self.name if self.named else segment(self.name)
        self._path = join(join(path, "state" if self.named else "other"), below)
        self._entries: TensorDict | sharded.ShardDict | None = None
        self._layout, placement = _placement(key, self.name if self.named else path, writer)
        with writer.placed(placement) if placement != "whole" else nullcontext():
            self.node = self._first(value, writer)

    def _first(self, value: Any, writer: StateWalker) -> Json:
        if type(value) is dict and value and all(type(key) is str and key.isascii() for key in value):
            if self._layout is not None and all(tensors.is_dense(one) or is_dtensor(one) for one in value.values()):
                self._entries = sharded.ShardDict(marked(value, self._layout), self._path, writer)
            elif self._layout is None and all(map(tensors.is_dense, value.values())):
                self._entries = TensorDict(value, self._path, writer)
            if self._entries is not None:
                return {"!": "dict", "i": self._entries.pairs}
        return writer.encode(marked(value, self._layout), self._path)

    def again(self, state: Mapping[Any, Any], replay: StateWalker) -> None:
        value = state.get(self.key, self)
        if value is self:
            raise StructureChanged
        if self._entries is None:
            self.node = replay.encode(marked(value, self._layout), self._path)
        elif type(value) is not dict:
            raise StructureChanged
        else:
            self._entries.again(marked(value, self._layout), replay)


def _split(places: Sequence[_Place]) -> tuple[list[Json], list[Json]]:
    named = [[place.name, place.node] for place in places if place.named]
    return named, [[place.name, place.node] for place in places if not place.named]


def _group_nodes(
    groups: Sequence[Mapping[str, Any]], paths: Mapping[int, str], path: str, writer: StateWalker
) -> list[Json]:
    found: list[Json] = []
    for number, group in enumerate(groups):
        where = join(join(path, "param_groups"), str(number))
        options = writer.pairs(((key, value) for key, value in group.items() if key != "params"), where)
        found.append({"!": "dict", "i": [*options, ["params", [paths[id(one)] for one in group["params"]]]]})
    return found


def _check_groups(again: Optimizer, known: Optimizer, known_parameters: Sequence[Sequence[Any]]) -> None:
    if again is not known or len(again.param_groups) != len(known_parameters):
        raise StructureChanged
    for group, parameters in zip(again.param_groups, known_parameters, strict=True):
        now = group["params"]
        if len(now) != len(parameters) or any(one is not other for one, other in zip(now, parameters, strict=True)):
            raise StructureChanged


def _saved_node(optimizer: Optimizer, kind: str, paths: Mapping[int, str], path: str, writer: StateWalker) -> Json:
    """Encodes the result of state_dict(), whose numbers stand for parameters in the order of the groups."""
    saved_state = optimizer.state_dict()
    by_number: dict[Any, str] = {}
    parameters: dict[Any, Any] = {}
    for group, saved in zip(optimizer.param_groups, saved_state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            by_number[number], parameters[number] = paths[id(parameter)], parameter
    named: list[Json] = []
    other: list[Json] = []
    for key, value in saved_state["state"].items():
        if key in by_number:
            layout, placement = _placement(parameters[key], by_number[key], writer)
            with writer.placed(placement) if placement != "whole" else nullcontext():
                node = writer.encode(marked(value, layout), join(join(path, "state"), by_number[key]))
            named.append([by_number[key], node])
        else:
            spelled = writer.closed(key, f"{path} (a key)")
            other.append([spelled, writer.encode(value, join(join(path, "other"), segment(spelled)))])
    groups: list[Json] = []
    for number, saved in enumerate(saved_state["param_groups"]):
        where = join(join(path, "param_groups"), str(number))
        options = writer.pairs(((key, value) for key, value in saved.items() if key != "params"), where)
        groups.append({"!": "dict", "i": [*options, ["params", [by_number[one] for one in saved["params"]]]]})
    extra = writer.pairs(((key, value) for key, value in saved_state.items() if key not in _KNOWN), path)
    return _node(kind, named, other, groups, extra)


def _refresh_saved(
    optimizer: Optimizer, kind: str, known_parameters: Sequence[Sequence[Any]], paths: Mapping[int, str], path: str
) -> Refresh:
    def refresh(again: Optimizer, replay: StateWalker) -> Json:
        _check_groups(again, optimizer, known_parameters)
        return _saved_node(again, kind, paths, path, replay)

    return refresh
