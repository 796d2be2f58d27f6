"""Restores optimizers: state is found by parameter, filled in place where it exists, else made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim import Optimizer

from tenuto.errors import CorruptionError
from tenuto.integrations.torch import tensors
from tenuto.integrations.torch.device import TORCH_DTYPES
from tenuto.integrations.torch.meshes import is_dtensor, local_of
from tenuto.integrations.torch.optimizers.encode import its_own_way, located
from tenuto.integrations.torch.optimizers.zero import local_optimizer, publish_options
from tenuto.integrations.torch.sharded import (
    device_after,
    layout_like,
    made_like,
    own_like,
    replicated_like,
    restore_shard,
)
from tenuto.model.leaf import join
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.state.declarations import Shard, attached
from tenuto.state.frameworks import type_name
from tenuto.state.restore.entries import key_node
from tenuto.state.restore.restorer import ABSENT, OPTIMIZERS, Restorer, Thunk
from tenuto.state.restore.selection import Selection
from tenuto.state.tree import KEYED, LEAVES, ROOT, is_part, items, kind_of, name_of, segment, sequence, walk

# -- state that include= and exclude= leave unchanged


class UnchangedState:
    """The unchanged state of the optimizer at `path`. `names`: the paths of its parameters, by identity."""

    def __init__(self, path: str, names: Mapping[int, str], selection: Selection) -> None:
        self._path = path
        self._names = names
        self._selection = selection
        self._left: set[int] = set()
        """The identities of parameters whose state stays whatever is selected."""

    def leave(self, parameter: torch.Tensor) -> None:
        """Keeps the state of a parameter."""
        self._left.add(id(parameter))

    def entries(self, path: str, present: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns the entries at `path` of which nothing is restored."""
        if self._selection.everything:
            return {}
        return {key: value for key, value in present.items() if not self._takes(value, _below(path, key))}

    def _takes(self, value: Any, path: str) -> bool:
        if type(value) is dict and value:
            return any(self._takes(one, _below(path, key)) for key, one in value.items())
        return self._selection.takes(path)

    def of_no_parameter(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        others = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        return self.entries(join(self._path, "other"), others)

    def of(self, parameter: torch.Tensor, present: Any) -> dict[Any, Thunk] | Thunk | None:
        """Returns the unchanged state of a parameter; None for nothing."""
        path = join(join(self._path, "state"), self._names[id(parameter)])
        if id(parameter) in self._left and present is not None:
            return constants(present) if type(present) is dict else _constant(present)
        if type(present) is dict:
            return constants(self.entries(path, present)) or None
        return None if present is None or self._selection.takes(path) else _constant(present)

    def carry_over(self, arguments: dict[str, Any], optimizer: Optimizer, groups: Sequence[int | None]) -> None:
        """Adds the unchanged state to the argument of `load_state_dict()`, which replaces all state of the optimizer.

        `groups`: None for a group that the checkpoint lacks.
        """
        if self._selection.everything and None not in groups and not self._left:
            return
        now = optimizer.state_dict()
        state, present_groups = now.pop("state"), now.pop("param_groups")
        arguments.update(self.entries(self._path, now))
        for number, (group, present) in enumerate(zip(optimizer.param_groups, present_groups, strict=True)):
            options = arguments["param_groups"][number]
            where = f"{self._path}/param_groups/{number}"
            stays = present if groups[number] is None else self.entries(where, present)
            arguments["param_groups"][number] = {**stays, **options}
            for parameter, theirs, ours in zip(group["params"], present["params"], options["params"], strict=True):
                unchanged = self.of(parameter, state.pop(theirs, None))
                if unchanged is not None:
                    arguments["state"][ours] = _merged(called(unchanged), arguments["state"].get(ours))
        arguments["state"] = self.of_no_parameter(state) | arguments["state"]


def constants(values: Mapping[Any, Any]) -> dict[Any, Thunk]:
    return {key: _constant(value) for key, value in values.items()}


def called(entry: dict[Any, Thunk] | Thunk) -> Any:
    return entry() if callable(entry) else {key: thunk() for key, thunk in entry.items()}


def _constant(value: Any) -> Thunk:
    return lambda: value


def _merged(unchanged: Any, restored: Any) -> Any:
    """Merges the unchanged and the restored state of a parameter."""
    if restored is None:
        return unchanged
    return {**unchanged, **restored} if type(unchanged) is dict and type(restored) is dict else restored


def _below(path: str, key: Any) -> str:
    return join(path, segment(key_node(key)))


# -- the parts of an optimizer's node


@dataclass(slots=True)
class SavedOptimizer:
    """The content of an optimizer's node. `state` and `groups` name parameters by path."""

    state: list[tuple[str, Json]]
    other: list[tuple[Json, Json]]
    groups: list[tuple[list[tuple[str, Json]], list[str]]]
    extra: list[tuple[str, Json]]


def saved_in(node: Json, path: str) -> SavedOptimizer:
    """Reads an optimizer's node. Raises CorruptionError for a malformed one."""
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
    return SavedOptimizer(
        [(name_of(key), child) for key, child in items(state)], items(other), found, list(content.items())
    )


def restore(optimizer: Optimizer, node: Json, path: str, restorer: Restorer) -> Thunk:
    local = local_optimizer(optimizer, path)
    if local is not optimizer:
        restore(local, node, path, restorer)
        restorer.later(path, lambda: publish_options(optimizer), OPTIMIZERS)
        return lambda: optimizer
    if kind_of(node) != "optimizer":
        return restorer.mismatch(optimizer, path, restorer.words(node), f"an optimizer ({type_name(type(optimizer))})")
    if not restorer.takes_some(node, path):
        return lambda: optimizer
    if node.get("type") != type_name(type(optimizer)):
        restorer.notes.append(
            f"{path or ROOT}: saved by a {node.get('type')}, restored into a {type_name(type(optimizer))}"
        )
    saved = saved_in(node, path)
    plan = _Plan(optimizer, saved, path, restorer)
    with restorer.for_an_object(node["v"]):
        if its_own_way(optimizer, "load_state_dict") or saved.extra:
            plan.through_load_state_dict()
        else:
            plan.in_place()
    return lambda: optimizer


@record
class _SavedState:
    """One parameter's saved state, and the parameter of the target that it belongs to."""

    parameter: torch.Tensor
    group: Mapping[str, Any]
    name: str
    """The parameter's path in the checkpoint."""
    node: Json
    path: str
    """The path of the state in the target."""


class _Plan:
    """The restore of one optimizer: matches its parameters and groups with the checkpoint's."""

    def __init__(self, optimizer: Optimizer, saved: SavedOptimizer, path: str, restorer: Restorer) -> None:
        self._optimizer = optimizer
        self._saved = saved
        self._path = path
        self._restorer = restorer
        self._paths: dict[int, str] = {}
        self._by_mark: dict[Any, tuple[torch.Tensor, Mapping[str, Any]]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                where = located(restorer.owner(parameter), optimizer, path, number)
                self._paths[id(parameter)] = where
                self._name(parameter, where, group)
        self._unchanged = UnchangedState(path, self._paths, restorer.selection)
        self._groups = self._match_groups()
        self._on_device = {id(group): self._updates_on_device(number) for number, group in
                           enumerate(optimizer.param_groups)}  # fmt: skip

    def _name(self, parameter: torch.Tensor, path: str, group: Mapping[str, Any]) -> None:
        mark = self._restorer.number_at(path)
        other = self._by_mark.setdefault(mark, (parameter, group))[0]
        if other is not parameter:
            self._restorer.mismatched.append(
                f"{path}: one parameter with {self._paths[id(other)]} in the checkpoint, another in the target"
            )

    def _marks(self, paths: Sequence[str]) -> set[Any]:
        return {self._restorer.number_at(path) for path in paths}

    def _match_groups(self) -> list[int | None]:
        """Returns for each group of the target the number of the saved one with the same parameters (with other ranks
        around: a superset). None where no saved group has any of them."""
        groups, apart = self._optimizer.param_groups, self._restorer.apart
        theirs = [self._marks(parameters) for _, parameters in self._saved.groups]
        all_ours = [self._marks([self._paths[id(parameter)] for parameter in group["params"]]) for group in groups]
        free = list(range(len(theirs)))
        found: list[int | None] = [None] * len(groups)
        # Groups without parameters last: if other ranks have all of them, they take what remains.
        for number in sorted(range(len(groups)), key=lambda one: not all_ours[one]):
            ours = all_ours[number]
            same = [one for one in free if theirs[one] == ours]
            likely = same or [one for one in free if theirs[one] & ours] or (free if apart and not ours else [])
            best = max(likely, key=lambda one: (len(theirs[one] & ours), one == number), default=None)
            if not same and not (apart and best is not None and ours <= theirs[best]):
                self._differs(number, ours, theirs[best] if best is not None else set())
            if best is not None:
                free.remove(best)
            found[number] = best
        for left in free:
            if self._is_selected(left, [key for key, _ in self._saved.groups[left][0]]):
                self._restorer.unexpected.append(f"{self._path}/param_groups/{left}")
        return found

    def _is_selected(self, number: int, keys: Iterable[str]) -> bool:
        """Returns whether any option of a group is to be restored."""
        where = f"{self._path}/param_groups/{number}"
        return any(self._restorer.selection.takes(join(where, segment(key))) for key in keys)

    def _differs(self, number: int, ours: set[Any], theirs: set[Any]) -> None:
        if not self._is_selected(number, self._optimizer.param_groups[number]):
            return
        missing = [path for path in self._paths.values() if self._restorer.number_at(path) in ours - theirs]
        what = f", among them {missing[0]}" if missing else ""
        self._restorer.mismatched.append(
            f"{self._path}/param_groups/{number}: {len(theirs)} parameters in the checkpoint, {len(ours)} in the "
            f"target, {len(ours & theirs)} of them the same{what}"
        )

    def _states(self) -> Iterator[_SavedState]:
        """Yields the saved states to restore."""
        for name, node in self._saved.state:
            found = self._by_mark.get(self._restorer.number_at(name))
            where = join(join(self._path, "state"), name)
            if found is None:
                if self._restorer.takes_some(node, where):
                    self._restorer.unexpected.append(where)
            else:
                here = self._paths[id(found[0])]
                where = join(join(self._path, "state"), here)
                source = _SavedState(found[0], found[1], name, node, where)
                if not self._restorer.takes_some(node, where):
                    continue
                if self._fits(source):
                    yield source
                else:
                    self._unchanged.leave(source.parameter)

    def _fits(self, source: _SavedState) -> bool:
        """Returns whether the saved state fits the parameter; reports a mismatch. If one entry does not fit, none is
        restored: no optimizer can continue from half a state."""
        restorer, shapes = self._restorer, self._shapes(source)
        if shapes is not None:
            restorer.mismatch(None, source.path, *(f"the state of a parameter {list(shape)}" for shape in shapes))
        entries = [(source.path, source.node, present := self._optimizer.state.get(source.parameter))]
        if kind_of(source.node) in KEYED:
            now = present if isinstance(present, dict) else {}
            entries = [(join(source.path, segment(key)), child, now.get(self._plain_key(key, source.path)))
                       for key, child in items(source.node) if kind_of(child) not in LEAVES]  # fmt: skip
        lacking = [
            f"{where}: a tensor of other tensors ({found[0].get('type')}) in the checkpoint, of a class that this "
            "program has not loaded: import it, or let the optimizer make its state first"
            for where, child, now in entries
            if (found := [one for _, one in walk(child) if kind_of(one) == "subclass"])
            and not (found[0] is child and _is_subclass(now))
            and any(tensors.loaded_subclass(str(one.get("type"))) is None for one in found)
            and restorer.takes_some(child, where)
        ]
        restorer.mismatched.extend(lacking)
        return shapes is None and not lacking

    def _shapes(self, source: _SavedState) -> tuple[Sequence[int], Sequence[int]] | None:
        """Returns the parameter's shapes in the checkpoint and in the target, if the state has the former."""
        restorer, leaf = self._restorer, self._restorer.leaf_at(source.name)
        if leaf is None or tensors.is_lazy(source.parameter):
            return None
        layout = layout_like(source.parameter, source.path) if not restorer.private else None
        theirs = restorer.spec(leaf, source.name)[1].shape
        ours = tuple(local_of(source.parameter).shape) if layout is None else layout.whole
        if theirs == ours:
            return None
        # A module may save its weight in another shape, and a mark may declare a tensor to be a part: then the shapes
        # of the optimizer's state decide.
        found = [restorer.spec(node, source.path)[1].shape for _, node in walk(source.node) if kind_of(node) in LEAVES]
        if ours in found or not any(found):
            return None
        return None if is_part(leaf) and layout is None and theirs not in found else (theirs, ours)

    def _device(self, source: _SavedState, key: str, node: Json) -> Any:
        """Returns the device of a new state tensor: relative to its parameter as when saved.

        A step count is the exception, as in torch: it is on the parameter's device only if the update runs there.
        """
        ours, host = device_after(source.parameter, self._restorer), torch.device("cpu")
        if key == "step":
            return ours if self._on_device[id(source.group)] else host
        kinds = {one.get("device", "cpu") for _, one in walk(node) if kind_of(one) in LEAVES}
        return host if kinds <= {"cpu"} and self._restorer.device_at(source.name) != "cpu" else ours

    def _updates_on_device(self, number: int) -> bool:
        """Returns whether a group of the target, with its restored options, is updated on the device."""
        group, match = self._optimizer.param_groups[number], self._groups[number]
        where = f"{self._path}/param_groups/{number}"
        arguments = dict(self._saved.groups[match][0]) if match is not None else {}
        taken = {
            key: value for key, value in arguments.items() if self._restorer.selection.takes(join(where, segment(key)))
        }
        return any(taken.get(key, group.get(key)) for key in ("capturable", "fused"))

    def _value(self, source: _SavedState, key: str, node: Json, path: str, now: Any) -> Thunk:
        """Plans one entry of a parameter's state: filled in place if it exists, else new."""
        restorer = self._restorer
        if kind_of(node) == "subclass" and _is_subclass(now):
            return tensors.restore(now, node, path, restorer)
        part = self._part(source, key, node, path, now) if kind_of(node) in LEAVES else None
        if part is not None:
            return part
        if kind_of(node) in LEAVES and tensors.is_dense(now) and not now.is_meta:
            _, spec = restorer.spec(node, path)
            if spec.shape == now.shape and TORCH_DTYPES.get(spec.dtype) is now.dtype:
                return tensors.restore(now, node, path, restorer)
        with restorer.on(self._device(source, key, node)):
            return restorer.rebuild(node, path, ABSENT if now is None else now)

    def _part(self, source: _SavedState, key: str, node: Json, path: str, now: Any) -> Thunk | None:
        """Plans state laid out like its parameter (a part of a global tensor), or replicated next to such a parameter;
        None for other state."""
        restorer = self._restorer
        spec = restorer.spec(node, path)[1]
        kind = TORCH_DTYPES.get(spec.dtype)
        present = isinstance(now, torch.Tensor) and now.dtype is kind and not now.is_meta
        if present and is_dtensor(now) and spec.shape == tuple(now.shape) and not restorer.private:
            return tensors.restore(now, node, path, restorer)
        if kind is None or key == "step":
            return None
        if restorer.private:  # a plain tensor of the rank's own stays one, whatever its shape
            if not node.get("dtensor") or spec.shape != tuple(local_of(source.parameter).shape):
                return None
            with restorer.on(self._device(source, key, node)):
                return own_like(source.parameter, node, path, restorer)
        layout = layout_like(source.parameter, source.path)
        if layout is None:
            return None
        if spec.shape != layout.whole or not (spec.shape or self._follows_its_parameter(key)):
            plain = present and not is_dtensor(now)
            return (
                self._replicated(source, key, node, path)
                if not plain and self._replicates(source, node, spec.shape)
                else None
            )
        if present and tensors.is_dense(now) and tuple(now.shape) == layout.local and attached(now) is None:
            return restore_shard(Shard(now, layout), node, path, restorer)
        with restorer.on(self._device(source, key, node)):
            return made_like(source.parameter, layout, node, path, restorer)

    def _follows_its_parameter(self, key: str) -> bool:
        """Returns whether an entry of a parameter without dimensions lies as the parameter does, and is not merely a
        number: as it is with other parameters, whose shape tells; if there are none, it does."""
        restorer = self._restorer
        for name, node in self._saved.state:
            leaf = restorer.leaf_at(name)
            shape = () if leaf is None else restorer.spec(leaf, name)[1].shape
            for mark, child in items(node) if shape and kind_of(node) in KEYED else ():
                if mark == key and kind_of(child) in LEAVES:
                    return restorer.spec(child, name)[1].shape == shape
        return True

    def _replicates(self, source: _SavedState, node: Json, shape: Sequence[int]) -> bool:
        """Returns whether state of another shape than its DTensor parameter is a DTensor too: if it was saved as one,
        or none of the parameter's state was and it is more than a number."""
        if self._restorer.private or not is_dtensor(source.parameter):
            return False
        siblings = items(source.node) if kind_of(source.node) in KEYED else []
        return is_part(node) or (bool(shape) and not any(is_part(child) for _, child in siblings))

    def _replicated(self, source: _SavedState, key: str, node: Json, path: str) -> Thunk:
        with self._restorer.on(self._device(source, key, node)):
            return replicated_like(source.parameter, node, path, self._restorer)

    def _plain_key(self, node: Json, path: str) -> Any:
        return node if type(node) is str else self._restorer.rebuild(node, path)()

    def _other(self) -> dict[Any, Thunk]:
        """Plans state that belongs to no parameter."""
        restorer, path = self._restorer, join(self._path, "other")
        return {self._plain_key(key, path): restorer.rebuild(child, path) for key, child in self._saved.other
                if restorer.takes_some(child, join(path, segment(key)))}  # fmt: skip

    def _entries(self, source: _SavedState, present: Any = None) -> dict[Any, Thunk] | Thunk:
        """Plans the entries of one parameter's state, or the state itself if it is no dictionary. `present`: filled in
        place, or unchanged."""
        if kind_of(source.node) not in KEYED:
            return self._value(source, "", source.node, source.path, present)
        now = present if isinstance(present, dict) else {}
        found = constants(self._unchanged.entries(source.path, now))
        for key, child in items(source.node):
            where, plain = join(source.path, segment(key)), self._plain_key(key, source.path)
            if self._restorer.takes_some(child, where):
                found[plain] = self._value(source, str(plain), child, where, now.get(plain))
        return found

    def in_place(self) -> None:
        present = self._optimizer.state
        thunks = [(source.parameter, self._entries(source, present.get(source.parameter))) for source in self._states()]
        restored = {id(parameter) for parameter, _ in thunks}
        others = [parameter for parameter, _ in self._by_mark.values() if id(parameter) not in restored]
        rest = [
            (one, unchanged) for one in others if (unchanged := self._unchanged.of(one, present.get(one))) is not None
        ]
        other = self._other()
        options = self._options()

        def apply() -> None:
            state = self._optimizer.state
            known, inner = dict(state), [(one, dict(one)) for one in state.values() if type(one) is dict]
            before = [(group, dict(group)) for group in self._optimizer.param_groups]
            self._restorer.kept.undo(self._path, lambda: _again([*inner, *before, (state, known)]))
            state.clear()
            for parameter, entry in [*rest, *thunks]:
                state[parameter] = _filled(known.get(parameter), entry)
            state.update(self._unchanged.of_no_parameter(known) | called(other))
            for group, found in options:
                group.update(called(found))

        self._restorer.later(self._path, apply, OPTIMIZERS)

    def _options(self, *, in_place: bool = True) -> list[tuple[dict[str, Any], dict[str, Thunk]]]:
        """Plans for each group of the target the saved options; existing tensors are filled in place."""
        restorer = self._restorer
        found: list[tuple[dict[str, Any], dict[str, Thunk]]] = []
        for number, (group, match) in enumerate(zip(self._optimizer.param_groups, self._groups, strict=True)):
            thunks: dict[str, Thunk] = {}
            for key, node in self._saved.groups[match][0] if match is not None else ():
                now: Any = group.get(key, ABSENT)
                where = join(join(join(self._path, "param_groups"), str(number)), segment(key))
                if not restorer.takes_some(node, where):
                    continue
                if in_place and tensors.is_dense(now) and restorer.words(node) == tensors.words(now):
                    thunks[key] = tensors.restore(now, node, where, restorer)
                else:
                    thunks[key] = restorer.rebuild(node, where, now)
            if match is not None and not restorer.private:
                restorer.replaced.extend(_replaced(group, dict(self._saved.groups[match][0]), thunks, number))
            found.append((group, thunks))
        return found

    def through_load_state_dict(self) -> None:
        """Plans a restore through load_state_dict(), and replaces afterwards the tensors that it cast."""
        restorer, optimizer = self._restorer, self._optimizer
        restorer.asks = True
        numbers = {mark: number for number, mark in enumerate(self._by_mark)}
        present = optimizer.state
        state = {
            numbers[restorer.number_at(one.name)]: self._entries(one, _own_kind(present.get(one.parameter)))
            for one in self._states()
        }
        groups = [
            (thunks, [numbers[restorer.number_at(self._paths[id(one)])] for one in group["params"]])
            for group, thunks in self._options(in_place=False)
        ]
        extra = {key: restorer.rebuild(node, where) for key, node in self._saved.extra
                 if restorer.takes_some(node, where := join(self._path, segment(key)))}  # fmt: skip
        other = self._other()

        def apply() -> None:
            arguments = called(extra)
            arguments["state"] = {number: called(entry) for number, entry in state.items()} | called(other)
            arguments["param_groups"] = [called(options) | {"params": source} for options, source in groups]
            self._unchanged.carry_over(arguments, optimizer, self._groups)
            values = arguments["state"]
            arguments["state"] = {key: dict(value) if type(value) is dict else value for key, value in values.items()}
            parameters = [parameter for parameter, _ in self._by_mark.values()]
            restorer.kept.object(optimizer, self._path, without=parameters)
            optimizer.load_state_dict(arguments)
            for number, (parameter, _) in enumerate(self._by_mark.values()):
                _undo_casts(optimizer.state.get(parameter), values.get(number))

        restorer.later(self._path, apply, OPTIMIZERS)


def _again(kept: Iterable[tuple[Any, Any]]) -> None:
    """Gives dictionaries the content again that they had."""
    for like, content in kept:
        like.clear()
        like.update(content)


_SCHEDULED: Final = ("lr", "momentum", "betas")
"""What schedulers change: the learning rate, and some of them the momentum beside it."""


def _replaced(
    group: Mapping[str, Any], saved: Mapping[str, Json], thunks: Mapping[str, Thunk], number: int
) -> Iterator[str]:
    """Yields the settings of a group that the script gives otherwise than the checkpoint. Where a scheduler drives
    them, the learning rate that it begins with is what the script has given."""
    which = f" of group {number}" if number else ""
    scheduled = "initial_lr" in saved or "initial_lr" in group
    for key, thunk in thunks.items():
        first = scheduled and key == "lr"
        if key.startswith("_") or key == "initial_lr" or (scheduled and key in _SCHEDULED and not first):
            continue
        theirs_by = "initial_lr" if first and "initial_lr" in thunks else key
        ours = group.get("initial_lr", group.get(key)) if first else group.get(key)
        if kind_of(saved[theirs_by]) in LEAVES or not isinstance(ours, bool | int | float | tuple | list):
            continue
        theirs = thunks[theirs_by]() if theirs_by != key else thunk()
        if type(theirs) in (int, float, bool, tuple, list) and theirs != ours:
            yield f"{key} {theirs!r}{which} replaces {ours!r}"


def _own_kind(present: Any) -> Any:
    """Returns what only itself can restore of a parameter's state: tensors of other tensors, and objects."""
    if type(present) is dict:
        return {key: value for key, value in present.items() if _own_kind(value) is not None}
    return None if isinstance(present, torch.Tensor) and not _is_subclass(present) else present


def _is_subclass(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_dtensor(value) and tensors.is_subclass(value)


def _filled(now: Any, entry: dict[Any, Thunk] | Thunk) -> Any:
    made = called(entry)
    if type(now) is not dict or callable(entry):
        return made
    now.clear()
    now.update(made)
    return now


def _undo_casts(now: Any, saved: Any) -> None:
    """Replaces tensors that loading has cast to another type by the saved ones."""
    if not isinstance(now, dict) or not isinstance(saved, dict):
        return
    for key, value in saved.items():
        source = now.get(key)
        if isinstance(value, torch.Tensor) and isinstance(source, torch.Tensor) and source.dtype is not value.dtype:
            now[key] = value


def fresh(node: Json, path: str, restorer: Restorer) -> Thunk:
    """Plans an optimizer's state without an optimizer: a dictionary by the parameters' paths."""
    return restorer.rebuild(node["v"], path)
