"""Optimizers <-> nodes: state lies under the full path of the parameter it belongs to, found by identity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim import Optimizer

from holdfast.errors import CorruptionError, StateError
from holdfast.integrations.torch import tensors
from holdfast.integrations.torch.meta import device_after
from holdfast.model.checkpoint import Json
from holdfast.model.paths import join
from holdfast.state.nodes import KEYED, LEAVES, ROOT, items, kind_of, name_of, segment, sequence
from holdfast.state.registry import Refresh
from holdfast.state.restorer import OPTIMIZERS, Restorer, Thunk
from holdfast.state.tagged import type_name
from holdfast.state.writer import Changed, Writer

_KNOWN: Final = ("state", "param_groups")


def _asked_each_time(optimizer: Optimizer) -> bool:
    """Whether only state_dict() knows the state: overridden, or with hooks."""
    hooks = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
    return bool(hooks) or type(optimizer).state_dict is not Optimizer.state_dict


def _loads_its_own_way(optimizer: Optimizer) -> bool:
    hooks = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    return bool(hooks) or type(optimizer).load_state_dict is not Optimizer.load_state_dict


# -- down -------------------------------------------------------------------------------------------------------


def encode(optimizer: Optimizer, path: str, writer: Writer) -> tuple[Json, Refresh]:
    paths = _paths(optimizer, path, writer)
    kind = type_name(type(optimizer))
    held = [list(group["params"]) for group in optimizer.param_groups]
    if _asked_each_time(optimizer):
        return _asked_node(optimizer, kind, paths, path, writer), _ask_again(optimizer, kind, held, paths, path)
    places = [_Place(parameter, value, path, paths, writer) for parameter, value in optimizer.state.items()]
    named, other = _split(places)
    node = _node(kind, named, other, _group_nodes(optimizer.param_groups, paths, path, writer))

    def refresh(again: Optimizer, replay: Writer) -> Json:
        _check_groups(again, optimizer, held)
        if _asked_each_time(again) or len(again.state) != len(places):
            raise Changed
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


def _paths(optimizer: Optimizer, path: str, writer: Writer) -> dict[int, str]:
    """The path of each parameter, by identity."""
    return {id(parameter): _located(writer.owner(parameter), optimizer, path, number)
            for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}  # fmt: skip


def _located(found: str | None, optimizer: Optimizer, path: str, group: int) -> str:
    if found is None:
        raise StateError(
            f"{path or ROOT}: group {group} of this {type(optimizer).__name__} holds a parameter that the state does not",
            subject=path or ROOT,
            hint="put the model that it belongs to into the state, beside the optimizer",
        )
    return found


class _Place:
    """The state of one parameter (or of a key that is none): where it lies, and how to tell it again."""

    def __init__(self, key: Any, value: Any, path: str, paths: Mapping[int, str], writer: Writer) -> None:
        self.key = key
        self.named = isinstance(key, torch.Tensor)
        if self.named and id(key) not in paths:
            raise StateError(f"{path or ROOT}: state of a parameter that is in no group", subject=path)
        self.name = paths[id(key)] if self.named else writer.closed(key, f"{path} (a key)")
        below = self.name if self.named else segment(self.name)
        self._path = join(join(path, "state" if self.named else "other"), below)
        self._keys: tuple[Any, ...] | None = None
        self._looks: tensors.Looks | None = None
        self.node = self._first(value, writer)

    def _first(self, value: Any, writer: Writer) -> Json:
        if (
            type(value) is dict
            and value
            and all(tensors.is_dense(one) and type(key) is str for key, one in value.items())
        ):
            self._keys = tuple(value)
            self._looks = tensors.Looks(list(value.values()))
            pairs: list[Json] = []
            for key, one in value.items():
                where = join(self._path, segment(key))
                tensors.check(one, where)
                pairs.append([key, tensors.dense_leaf(one, where, writer)])
            return {"!": "dict", "i": pairs}
        return writer.encode(value, self._path)

    def again(self, state: Mapping[Any, Any], replay: Writer) -> None:
        value = state.get(self.key, self)
        if value is self:
            raise Changed
        if self._looks is None or self._keys is None:
            self.node = replay.encode(value, self._path)
        elif tuple(value) != self._keys:
            raise Changed
        else:
            self._looks.again(replay, value.values())


def _split(places: Sequence[_Place]) -> tuple[list[Json], list[Json]]:
    named = [[place.name, place.node] for place in places if place.named]
    return named, [[place.name, place.node] for place in places if not place.named]


def _group_nodes(
    groups: Sequence[Mapping[str, Any]], paths: Mapping[int, str], path: str, writer: Writer
) -> list[Json]:
    found: list[Json] = []
    for number, group in enumerate(groups):
        where = join(join(path, "param_groups"), str(number))
        options = writer.pairs(((key, value) for key, value in group.items() if key != "params"), where)
        found.append({"!": "dict", "i": [*options, ["params", [paths[id(one)] for one in group["params"]]]]})
    return found


def _check_groups(again: Optimizer, known: Optimizer, held: Sequence[Sequence[Any]]) -> None:
    if again is not known or len(again.param_groups) != len(held):
        raise Changed
    for group, parameters in zip(again.param_groups, held, strict=True):
        now = group["params"]
        if len(now) != len(parameters) or any(one is not other for one, other in zip(now, parameters, strict=True)):
            raise Changed


def _asked_node(optimizer: Optimizer, kind: str, paths: Mapping[int, str], path: str, writer: Writer) -> Json:
    """The node of what state_dict() says: its numbers stand for parameters in the order of the groups."""
    said = optimizer.state_dict()
    by_number: dict[Any, str] = {}
    for group, saved in zip(optimizer.param_groups, said["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            by_number[number] = paths[id(parameter)]
    named: list[Json] = []
    other: list[Json] = []
    for key, value in said["state"].items():
        if key in by_number:
            named.append([by_number[key], writer.encode(value, join(join(path, "state"), by_number[key]))])
        else:
            spelled = writer.closed(key, f"{path} (a key)")
            other.append([spelled, writer.encode(value, join(join(path, "other"), segment(spelled)))])
    groups: list[Json] = []
    for number, saved in enumerate(said["param_groups"]):
        where = join(join(path, "param_groups"), str(number))
        options = writer.pairs(((key, value) for key, value in saved.items() if key != "params"), where)
        groups.append({"!": "dict", "i": [*options, ["params", [by_number[one] for one in saved["params"]]]]})
    extra = writer.pairs(((key, value) for key, value in said.items() if key not in _KNOWN), path)
    return _node(kind, named, other, groups, extra)


def _ask_again(
    optimizer: Optimizer, kind: str, held: Sequence[Sequence[Any]], paths: Mapping[int, str], path: str
) -> Refresh:
    def refresh(again: Optimizer, replay: Writer) -> Json:
        _check_groups(again, optimizer, held)
        return _asked_node(again, kind, paths, path, replay)

    return refresh


# -- back -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Saved:
    """An optimizer's node, taken apart. `state` and `groups` name parameters by their path."""

    state: list[tuple[str, Json]]
    other: list[tuple[Json, Json]]
    groups: list[tuple[list[tuple[str, Json]], list[str]]]
    extra: list[tuple[str, Json]]


def _saved(node: Json, path: str) -> Saved:
    content = {name_of(key): child for key, child in items(node["v"])}
    state, groups = content.pop("state", None), content.pop("param_groups", None)
    other = content.pop("other", {"!": "dict", "i": []})
    if kind_of(state) != "bypath" or type(groups) is not list or kind_of(other) != "dict":
        raise CorruptionError(f"{path or ROOT}: a malformed optimizer", subject=path)
    found: list[tuple[list[tuple[str, Json]], list[str]]] = []
    for group in groups:
        pairs = [(name_of(key), child) for key, child in items(group)]
        parameters = [name_of(one) for key, child in pairs if key == "params" for one in sequence(child)]
        found.append(([(key, child) for key, child in pairs if key != "params"], parameters))
    return Saved([(name_of(key), child) for key, child in items(state)], items(other), found, list(content.items()))


def restore(optimizer: Optimizer, node: Json, path: str, restorer: Restorer) -> Thunk:
    if kind_of(node) != "optimizer":
        return restorer.mismatch(optimizer, path, restorer.words(node), f"an optimizer ({type_name(type(optimizer))})")
    if not restorer.takes(path):
        return lambda: optimizer
    if node.get("type") != type_name(type(optimizer)):
        restorer.notes.append(
            f"{path or ROOT}: saved by a {node.get('type')}, restored into a {type_name(type(optimizer))}"
        )
    saved = _saved(node, path)
    plan = _Plan(optimizer, saved, path, restorer)
    if _loads_its_own_way(optimizer) or saved.extra:
        plan.through_load_state_dict()
    else:
        plan.in_place()
    return lambda: optimizer


class _Plan:
    """Restoring one optimizer: which of its parameters and groups are which of the checkpoint's."""

    def __init__(self, optimizer: Optimizer, saved: Saved, path: str, restorer: Restorer) -> None:
        self._optimizer = optimizer
        self._saved = saved
        self._path = path
        self._restorer = restorer
        self._paths: dict[int, str] = {}
        self._by_mark: dict[Any, tuple[torch.Tensor, Mapping[str, Any]]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                where = _located(restorer.owner(parameter), optimizer, path, number)
                self._paths[id(parameter)] = where
                self._by_mark[restorer.number_at(where)] = (parameter, group)
        self._groups = self._match_groups()

    def _marks(self, paths: Sequence[str]) -> set[Any]:
        return {self._restorer.number_at(path) for path in paths}

    def _match_groups(self) -> list[int | None]:
        """For each group of the target the number of the saved one with the same parameters."""
        theirs = [self._marks(parameters) for _, parameters in self._saved.groups]
        free = list(range(len(theirs)))
        found: list[int | None] = []
        for number, group in enumerate(self._optimizer.param_groups):
            ours = self._marks([self._paths[id(parameter)] for parameter in group["params"]])
            exact = next((one for one in free if theirs[one] == ours), None)
            best = exact if exact is not None else max(free, key=lambda one: len(theirs[one] & ours), default=None)
            if exact is None:
                self._differs(number, ours, theirs[best] if best is not None else set())
            if best is not None:
                free.remove(best)
            found.append(best)
        for left in free:
            self._restorer.unexpected.append(f"{self._path}/param_groups/{left}")
        return found

    def _differs(self, number: int, ours: set[Any], theirs: set[Any]) -> None:
        missing = [path for path in self._paths.values() if self._restorer.number_at(path) in ours - theirs]
        what = f", among them {missing[0]}" if missing else ""
        self._restorer.mismatched.append(
            f"{self._path}/param_groups/{number}: {len(theirs)} parameters in the checkpoint, {len(ours)} in the target, "
            f"{len(ours & theirs)} of them the same{what}"
        )

    def _states(self) -> Iterator[tuple[torch.Tensor, Mapping[str, Any], str, Json, str]]:
        """(parameter, its group, its path, the saved state's node, the state's path) for what is restored."""
        for name, node in self._saved.state:
            found = self._by_mark.get(self._restorer.number_at(name))
            where = join(join(self._path, "state"), name)
            if found is None:
                if self._restorer.takes(where):
                    self._restorer.unexpected.append(where)
            else:
                here = self._paths[id(found[0])]
                where = join(join(self._path, "state"), here)
                if self._restorer.takes(where):
                    yield found[0], found[1], name, node, where

    def _device(self, parameter: torch.Tensor, group: Mapping[str, Any], name: str, key: str, node: Json) -> Any:
        """Where a new state tensor belongs: as it lay relative to its parameter when saved.

        A step count is the exception, as in torch: it lies with the parameter only where the update runs on the device.
        """
        ours = device_after(parameter, self._restorer)
        theirs = node.get("device", "cpu") if isinstance(node, dict) else "cpu"
        if key == "step":
            return ours if group.get("capturable") or group.get("fused") else torch.device("cpu")
        return torch.device("cpu") if theirs == "cpu" and self._restorer.device_at(name) != "cpu" else ours

    def _value(
        self, parameter: torch.Tensor, group: Mapping[str, Any], name: str, key: str, node: Json, path: str, now: Any
    ) -> Thunk:
        """One entry of a parameter's state: filled in place where it is there already, else new."""
        restorer = self._restorer
        if kind_of(node) in LEAVES and tensors.is_dense(now) and not now.is_meta:
            _, spec = restorer.spec(node, path)
            if spec.shape == tuple(now.shape) and spec.dtype == str(now.dtype)[6:]:
                return tensors.restore(now, node, path, restorer)
        with restorer.on(self._device(parameter, group, name, key, node)):
            return restorer.rebuild(node, path)

    def in_place(self) -> None:
        thunks: list[tuple[torch.Tensor, dict[str, Thunk] | Thunk]] = []
        kept = {id(parameter) for parameter in self._skipped()}
        for parameter, group, name, node, where in self._states():
            now = self._optimizer.state.get(parameter)
            held = now if isinstance(now, dict) else {}
            if kind_of(node) not in KEYED:
                thunks.append((parameter, self._value(parameter, group, name, "", node, where, now)))
                continue
            entries: dict[Any, Thunk] = {}
            for key, child in items(node):
                below = join(where, segment(key))
                plain = key if type(key) is str else self._restorer.rebuild(key, below)()
                entries[plain] = self._value(parameter, group, name, str(plain), child, below, held.get(plain))
            thunks.append((parameter, entries))
        other = {key if type(key) is str else self._restorer.rebuild(key, self._path)(): self._restorer.rebuild(child, self._path)
                 for key, child in self._saved.other}  # fmt: skip
        options = self._options()

        def apply() -> None:
            state = self._optimizer.state
            before = {key: value for key, value in state.items() if isinstance(key, torch.Tensor) and id(key) in kept}
            known = dict(state)
            state.clear()
            state.update(before)
            for parameter, entry in thunks:
                state[parameter] = _filled(known.get(parameter), entry)
            state.update({key: thunk() for key, thunk in other.items()})
            for group, found in options:
                group.update({key: thunk() for key, thunk in found.items()})

        self._restorer.later(self._path, apply, OPTIMIZERS)

    def _skipped(self) -> list[torch.Tensor]:
        """Parameters whose state include or exclude leaves as it is."""
        chosen = self._restorer.selection
        return [parameter for parameter, _ in self._by_mark.values()
                if not chosen.takes(join(join(self._path, "state"), self._paths[id(parameter)]))]  # fmt: skip

    def _options(self) -> list[tuple[dict[str, Any], dict[str, Thunk]]]:
        found: list[tuple[dict[str, Any], dict[str, Thunk]]] = []
        for number, (group, match) in enumerate(zip(self._optimizer.param_groups, self._groups, strict=True)):
            thunks: dict[str, Thunk] = {}
            for key, node in self._saved.groups[match][0] if match is not None else ():
                where, now = join(join(join(self._path, "param_groups"), str(number)), segment(key)), group.get(key)
                same = (
                    kind_of(node) in LEAVES
                    and tensors.is_dense(now)
                    and self._restorer.words(node) == tensors.words(now)
                )
                thunks[key] = (
                    tensors.restore(now, node, where, self._restorer)
                    if same
                    else self._restorer.rebuild(node, where, now)
                )
            found.append((group, thunks))
        return found

    def through_load_state_dict(self) -> None:
        """For optimizers that load in their own way; what they cast is put right afterwards."""
        restorer, numbers = self._restorer, {mark: number for number, mark in enumerate(self._by_mark)}
        state: dict[Any, tuple[torch.Tensor, Thunk]] = {}
        for parameter, group, name, node, where in self._states():
            pairs = {key: self._value(parameter, group, name, str(key), child, join(where, segment(key)), None)
                     for key, child in items(node)} if kind_of(node) in KEYED else None  # fmt: skip
            thunk = restorer.rebuild(node, where) if pairs is None else _dictionary(pairs)
            state[numbers[restorer.number_at(name)]] = (parameter, thunk)
        groups: list[tuple[dict[str, Thunk], list[int]]] = []
        for group, match in zip(self._optimizer.param_groups, self._groups, strict=True):
            options = (
                {
                    key: restorer.rebuild(node, f"{self._path}/param_groups")
                    for key, node in self._saved.groups[match][0]
                }
                if match is not None
                else {}
            )
            groups.append((options, [numbers[restorer.number_at(self._paths[id(one)])] for one in group["params"]]))
        extra = {key: restorer.rebuild(node, join(self._path, segment(key))) for key, node in self._saved.extra}
        other = {key if type(key) is str else restorer.rebuild(key, self._path)(): restorer.rebuild(node, self._path)
                 for key, node in self._saved.other}  # fmt: skip

        def apply() -> None:
            values = {number: thunk() for number, (_, thunk) in state.items()}
            said = {
                "state": {
                    **{number: _copied(value) for number, value in values.items()},
                    **{key: thunk() for key, thunk in other.items()},
                },
                "param_groups": [
                    {**{key: thunk() for key, thunk in options.items()}, "params": held} for options, held in groups
                ],
                **{key: thunk() for key, thunk in extra.items()},
            }
            self._optimizer.load_state_dict(said)
            for number, (parameter, _) in state.items():
                _put_right(self._optimizer.state.get(parameter), values[number])

        restorer.later(self._path, apply, OPTIMIZERS)


def _dictionary(thunks: Mapping[str, Thunk]) -> Thunk:
    return lambda: {key: thunk() for key, thunk in thunks.items()}


def _copied(value: Any) -> Any:
    return dict(value) if type(value) is dict else value


def _filled(now: Any, entry: dict[str, Thunk] | Thunk) -> Any:
    if callable(entry):
        return entry()
    made = {key: thunk() for key, thunk in entry.items()}
    if type(now) is not dict:
        return made
    now.clear()
    now.update(made)
    return now


def _put_right(now: Any, saved: Any) -> None:
    """Replaces tensors that loading has cast to another type by what was saved."""
    if not isinstance(now, dict) or not isinstance(saved, dict):
        return
    for key, value in saved.items():
        held = now.get(key)
        if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) and held.dtype is not value.dtype:
            now[key] = value


def fresh(node: Json, path: str, restorer: Restorer) -> Thunk:
    """An optimizer's state where there is no optimizer: a dictionary by the parameters' paths."""
    return restorer.rebuild(node["v"], path)
