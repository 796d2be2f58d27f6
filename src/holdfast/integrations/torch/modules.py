"""Modules <-> entries: what state_dict() says, under names without wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from holdfast.errors import StateError
from holdfast.integrations.torch import tensors
from holdfast.integrations.torch.fully_sharded import loaded, others, settle, settling
from holdfast.integrations.torch.looks import Looks
from holdfast.integrations.torch.meta import plans
from holdfast.integrations.torch.replicas import Replicas, replicas
from holdfast.integrations.torch.wrappers import own_tensors, places
from holdfast.model.checkpoint import Json
from holdfast.model.paths import escape, join
from holdfast.state.declared import Shard, attached
from holdfast.state.nodes import KEYED, LEAVES, ROOT, items, kind_of, name_of
from holdfast.state.registry import Refresh
from holdfast.state.restorer import MODULES, Restorer, Thunk
from holdfast.state.tagged import type_name
from holdfast.state.writer import Changed, Writer

_EXTRA: Final = "_extra_state"
_FLAGS: Final = ("param", "buffer", "grad")


def overrides(module: nn.Module, *names: str) -> bool:
    """Whether the class has its own version of a method; torch's own classes are known to keep to the rules."""
    for name in names:
        for base in type(module).__mro__:
            if name in vars(base):
                if base is not nn.Module and not base.__module__.startswith("torch.nn.modules."):
                    return True
                break
    return False


def _saves_its_own_way(module: nn.Module) -> bool:
    hooks = bool(module._state_dict_hooks) or others(module._state_dict_pre_hooks.values())
    return hooks or overrides(module, "state_dict", "_save_to_state_dict", "get_extra_state") or _has_extra(module)


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _loads_its_own_way(module: nn.Module) -> bool:
    before, after = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    hooks = (before or after) and others([*before.values(), *after.values()])
    return bool(hooks) or overrides(module, "load_state_dict", "_load_from_state_dict")


@dataclass(slots=True)
class Entry:
    """One entry of state_dict(): its key there, its canonical name, and the module's own tensor where it is that."""

    key: str
    name: str
    value: Any
    own: bool


def entries(module: nn.Module, path: str) -> tuple[list[Entry], Mapping[str, Any]]:
    """What state_dict() says, and its metadata by canonical module prefix.

    A tree of modules that all save in torch's own way need not be asked: their state is their tensors, in order.
    """
    if is_plain(module):
        metadata = {place.canonical.rstrip("."): {"version": place.module._version} for place in places(module)}
        return [Entry(raw, name, tensor, True) for raw, name, tensor, kept in own_tensors(module) if kept], metadata
    return _asked(module, path)


def is_plain(module: nn.Module) -> bool:
    return not any(_saves_its_own_way(place.module) for place in places(module) if not place.wrapper)


def _asked(module: nn.Module, path: str) -> tuple[list[Entry], Mapping[str, Any]]:
    state = module.state_dict()
    if not isinstance(state, Mapping):
        raise StateError(f"{path or ROOT}: state_dict() of {type_name(type(module))} is no mapping", subject=path)
    by_raw, by_name = {}, {}
    for raw, name, tensor, kept in own_tensors(module):
        if kept:
            by_raw[raw], by_name[name] = (name, tensor), tensor
    prefixes = sorted(((place.raw, place.canonical) for place in places(module)), key=lambda pair: -len(pair[0]))
    found: list[Entry] = []
    for key, value in state.items():
        name = by_raw[key][0] if key in by_raw else key if key in by_name else _canonical(key, prefixes)
        own = by_name.get(name)
        same = own is not None and isinstance(value, torch.Tensor) and _same(value, own)
        found.append(Entry(key, name, own if same else value, same))
    canonical = {raw.rstrip("."): name.rstrip(".") for raw, name in prefixes}
    metadata = getattr(state, "_metadata", None) or {}
    return found, {canonical.get(raw, raw): said for raw, said in metadata.items()}


def _canonical(key: Any, prefixes: list[tuple[str, str]]) -> str:
    if not isinstance(key, str):
        raise StateError(f"a module's state_dict() has the key {key!r}, which is no string", subject=repr(key))
    return next(canonical + key[len(raw) :] for raw, canonical in prefixes if key.startswith(raw))


def _same(value: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether an entry is the module's own tensor (as state_dict() gives it: detached)."""
    if value is own:
        return True
    if value.layout is not torch.strided or own.layout is not torch.strided or value.is_meta != own.is_meta:
        return value.layout is own.layout and type(value) is not torch.Tensor
    if tensors.is_lazy(own):
        return False
    if value.shape != own.shape or value.dtype is not own.dtype or value.stride() != own.stride():
        return False
    return own.is_meta or type(value) is not torch.Tensor or value.data_ptr() == own.data_ptr()


# -- down -------------------------------------------------------------------------------------------------------


def encode(module: nn.Module, path: str, writer: Writer) -> tuple[Json, Refresh]:
    put_back = settling(module)
    for put in put_back:
        put()
    cells = _Cells(module, path)
    found, metadata = entries(module, path)
    said = {"!": "module", "type": type_name(type(module)), "meta": _metadata_node(metadata, writer, path)}
    same = replicas([module])
    dense = not same.buffers and all(one.own and _is_ordinary(one.value) for one in found)
    plain = is_plain(module)
    if not (dense and plain):
        known = found if plain else None
        return {**said, "i": _pairs(found, path, writer, same)}, _again(cells, said, same, put_back, known)
    looks = Looks()
    values = [one.value for one in found]
    pairs = []
    for one in found:
        with _placed(one.value, same, writer):
            pairs.append([one.name, looks.first(one.value, join(path, escape(one.name)), writer)])
    node = {**said, "i": pairs}

    def refresh(again: nn.Module, replay: Writer) -> Json:
        cells.check(again)
        looks.again(replay, values)
        return node

    return node, refresh


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensors.is_subclass(tensor) and attached(tensor) is None


def _placed(tensor: Any, same: Replicas, writer: Writer) -> AbstractContextManager[None]:
    return writer.placed("replicated") if id(tensor) in same.parameters else _ANYWHERE


_ANYWHERE: Final = nullcontext()


def _pairs(found: list[Entry], path: str, writer: Writer, same: Replicas) -> list[Json]:
    names: set[str] = set()
    for one in found:
        if one.name in names:
            raise StateError(f"{join(path, escape(one.name))}: two entries of a module have this name", subject=path)
        names.add(one.name)
    pairs: list[Json] = []
    for one in found:
        layout = same.layout(one.value) if one.own and attached(one.value) is None else None
        with _placed(one.value, same, writer):
            value = one.value if layout is None else Shard(one.value, layout)
            pairs.append([one.name, writer.encode(value, join(path, escape(one.name)))])
    return pairs


def _again(
    cells: _Cells,
    said: dict[str, Json],
    same: Replicas,
    put_back: Sequence[Callable[[], Any]],
    known: list[Entry] | None,
) -> Refresh:
    """For modules of which each value must be asked again; where `known` is None their state_dict() too. A tree of
    modules that save in torch's own way has the same entries as long as everything sits where it sat."""

    def refresh(again: nn.Module, replay: Writer) -> Json:
        for put in put_back:
            put()
        cells.check(again)
        if known is not None:
            return {**said, "i": _pairs(known, cells.path, replay, same)}
        found, metadata = entries(again, cells.path)
        pairs = _pairs(found, cells.path, replay, same)
        return {**said, "meta": _metadata_node(metadata, replay, cells.path), "i": pairs}

    return refresh


def _metadata_node(metadata: Mapping[str, Any], writer: Writer, path: str) -> Json:
    """state_dict()'s metadata where it says more than that a module is of version 1."""
    return [[prefix, writer.closed(said, path)] for prefix, said in metadata.items() if said != {"version": 1}]


class _Cells:
    """Which tensors and modules sit where, by identity."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.path = path
        self._module = module
        self._cells: list[tuple[dict[str, Any], tuple[tuple[str, Any], ...]]] = []
        self._others: list[tuple[Any, int]] = []
        for place in places(module):
            one = place.module
            self._cells += [
                (held, tuple(held.items())) for held in (one._parameters, one._buffers, one._modules) if held
            ]
            empty = [held for held in (one._parameters, one._buffers, one._modules) if not held]
            counted = [*empty, one._non_persistent_buffers_set, one._state_dict_hooks, one._state_dict_pre_hooks]
            self._others += [(held, len(held)) for held in counted]

    def check(self, module: nn.Module) -> None:
        """Raises Changed where anything is not what it was."""
        if module is not self._module:
            raise Changed
        for held, size in self._others:
            if len(held) != size:
                raise Changed
        for cell, known in self._cells:
            if len(cell) != len(known):
                raise Changed
            for name, value in known:
                if cell.get(name, cell) is not value:
                    raise Changed


# -- back -------------------------------------------------------------------------------------------------------


def restore(module: nn.Module, node: Json, path: str, restorer: Restorer) -> Thunk:
    kind = kind_of(node)
    if kind != "module" and kind not in KEYED:
        return restorer.mismatch(module, path, restorer.words(node), f"a module ({type_name(type(module))})")
    theirs = {name_of(key): child for key, child in items(node)}
    settle(module)
    found, _ = entries(module, path)
    direct = all(one.own or one.name.rpartition(".")[2] == _EXTRA for one in found)
    if not direct or any(_loads_its_own_way(place.module) for place in places(module) if not place.wrapper):
        from holdfast.integrations.torch.module_loading import through_load_state_dict

        through_load_state_dict(module, node, theirs, found, path=path, restorer=restorer)
    else:
        _in_place(module, theirs, found, path, restorer)
        restorer.later(path, lambda: loaded(module), MODULES)
    _check_meta(module, path, restorer)
    return lambda: module


def _in_place(module: nn.Module, theirs: dict[str, Json], found: list[Entry], path: str, restorer: Restorer) -> None:
    for one in found:
        where = join(path, escape(one.name))
        if not restorer.takes(where):
            theirs.pop(one.name, None)
        elif one.name not in theirs:
            restorer.missing.append(where)
        elif one.own:
            tensors.restore(one.value, theirs.pop(one.name), where, restorer)
        else:
            _extra(module, one, theirs.pop(one.name), where, restorer)
    _left_over(theirs, path, restorer)


def _left_over(theirs: dict[str, Json], path: str, restorer: Restorer) -> None:
    restorer.unexpected.extend(where for name in theirs if restorer.takes(where := join(path, escape(name))))


def _extra(module: nn.Module, one: Entry, node: Json, path: str, restorer: Restorer) -> None:
    """Extra state: whatever the module's class makes of it."""
    raw = one.key[: -len(_EXTRA)]
    owner = next(place.module for place in places(module) if place.raw == raw)
    value = restorer.rebuild(bare(node), path, one.value)
    restorer.restored.append(path)
    restorer.later(path, lambda: owner.set_extra_state(value()), MODULES)


def _check_meta(module: nn.Module, path: str, restorer: Restorer) -> None:
    taken = plans(restorer).taken
    for _, name, tensor, _ in own_tensors(module):
        if tensor.is_meta and id(tensor) not in taken:
            restorer.faults.append(f"{join(path, escape(name))}: a meta tensor that no leaf of the checkpoint fills")


def fresh(node: Json, path: str, restorer: Restorer) -> Thunk:
    """A module's entries where there is no module: a dictionary as state_dict() gives it."""
    thunks = {
        name_of(key): restorer.rebuild(bare(child), join(path, escape(name_of(key)))) for key, child in items(node)
    }
    return lambda: {name: thunk() for name, thunk in thunks.items()}


def bare(node: Json) -> Json:
    """A leaf's node as state_dict() would give it: a plain tensor."""
    if isinstance(node, dict) and node.get("!") in (*LEAVES, "sparse"):
        return {key: value for key, value in node.items() if key not in _FLAGS}
    return node
