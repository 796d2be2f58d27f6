"""Encodes and restores modules: the entries of state_dict(), under names without wrappers.

FSDP2's hooks around state_dict only put parameters back into their shards, so they count as no customisation. A module
that loads in its own way gets its saved entries through load_state_dict() and decides, also about sizes that differ:
what it takes of those has to be what was saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from tenuto.errors import StateError, StateMismatch
from tenuto.integrations.torch import tensors
from tenuto.integrations.torch.sharded import (
    device_after,
    filled,
    layout_like,
    made_like,
    materialise,
    materialise_part,
)
from tenuto.integrations.torch.tensors import WatchedTensors
from tenuto.integrations.torch.wrappers import DataParallelReplicas, own_tensors, places, refuse_unknown, replicas
from tenuto.model.leaf import escape, join
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.state.declarations import Shard, ShardLayout, attached
from tenuto.state.encode.walker import StateWalker, StructureChanged
from tenuto.state.frameworks import Refresh, type_name
from tenuto.state.restore.match import refuse_differing, refuse_unmatched
from tenuto.state.restore.restorer import ABSENT, MODULES, Restorer, Thunk
from tenuto.state.tree import KEYED, LEAVES, ROOT, items, kind_of, name_of

# -- FSDP2

_HOME: Final = "torch.distributed.fsdp._fully_shard"


def is_its_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_HOME)


def others(hooks: Iterable[Any]) -> bool:
    """Returns whether any of these hooks is not FSDP2's own."""
    return any(not is_its_own(hook) for hook in hooks)


def settling(module: nn.Module) -> list[Callable[[], Any]]:
    """Returns the functions that put parameters back into their shards where a forward pass left them gathered. No rank
    waits for another."""
    return [
        partial(hook, one, "", False)
        for one in module.modules()
        for hook in one._state_dict_pre_hooks.values()
        if is_its_own(hook)
    ]


def settle(module: nn.Module) -> None:
    for put_back in settling(module):
        put_back()


def loaded(module: nn.Module) -> None:
    """Runs FSDP2's hooks after load_state_dict, which update its references to the parameters' memory."""
    for one in module.modules():
        for hook in list(one._load_state_dict_post_hooks.values()):
            if is_its_own(hook):
                hook(one, None)


# -- modules with a load of their own


def through_load_state_dict(
    module: nn.Module, node: Json, theirs: dict[str, Json], found: list[ModuleEntry], *, path: str, restorer: Restorer
) -> None:
    """Plans load_state_dict() with the saved entries; adopts the missing and unexpected keys it reports."""
    keys = {one.name: one.key for one in found}
    present = {one.name: one.value for one in found}
    state: OrderedDict[str, Thunk] = OrderedDict()
    unfit: set[str] = set()
    asked: dict[str, _Asked] = {}
    deciding = _deciding(module)
    for name, child in theirs.items():
        where, key = join(path, escape(name)), keys.get(name, name)
        if not restorer.takes(where):
            continue
        ours = present.get(name)
        if isinstance(ours, torch.Tensor) and kind_of(child) in LEAVES and not _fits(ours, child, where, restorer):
            if ours.is_meta or layout_like(ours, where) is not None or not key.startswith(deciding):
                restorer.mismatched.append(_differs(ours, child, where, restorer))
                unfit.add(key)
                continue
            asked[key] = _Asked(name, where, _differs(ours, child, where, restorer))
        layout = layout_like(ours, where) if isinstance(ours, torch.Tensor) and kind_of(child) in LEAVES else None
        if layout is not None and not restorer.private:
            state[key] = _part(ours, layout, child, where, restorer)
            continue
        if isinstance(ours, torch.Tensor) and ours.is_meta and kind_of(child) in LEAVES:
            number, spec = restorer.spec(child, where)
            materialise(ours, number, spec, where, restorer)
        restorer.restored.append(where)
        device = ours.device if isinstance(ours, torch.Tensor) and not ours.is_meta else restorer.device
        with restorer.on(device), restorer.for_an_object(child):
            state[key] = restorer.rebuild(bare(child), where, ABSENT if name not in present else ours)
    metadata = _metadata_for(module, node)
    paths = {keys.get(name, name): join(path, escape(name)) for name in (*keys, *theirs)}
    restorer.asks = True

    def load() -> None:
        restorer.kept.object(module, path)
        values = {key: thunk() for key, thunk in state.items()}
        about, refused = _asked_load(partial(_load, module, metadata, path, restorer), module, values, asked, restorer)
        aside = {*unfit, *refused}
        where = [[paths.get(key) or join(path, escape(key)) for key in getattr(about, name, ()) if key not in aside]
                 for name in ("missing_keys", "unexpected_keys")]  # fmt: skip
        _apply_strictness(where[0], where[1], restorer)

    restorer.later(path, load, MODULES)


@record
class _Asked:
    """An entry of another size or type than the module's own, which the module's code may take all the same."""

    name: str
    path: str
    problem: str


def _deciding(module: nn.Module) -> tuple[str, ...]:
    """Returns the prefixes of the keys of which code decides that torch does not have: a load_state_dict() of the
    module's own, and what any module does with the keys below it before torch looks at their sizes."""
    own = [""] if overrides(module, "load_state_dict") else []
    return (
        *own,
        *(
            place.raw
            for place in places(module)
            if others(place.module._load_state_dict_pre_hooks.values())
            or overrides(place.module, "_load_from_state_dict")
        ),
    )


def _asked_load(
    load: Callable[[Mapping[str, Any]], Any],
    module: nn.Module,
    values: Mapping[str, Any],
    asked: Mapping[str, _Asked],
    restorer: Restorer,
) -> tuple[Any, Mapping[str, _Asked]]:
    """Calls load_state_dict(), as `load`, with what the module is asked to take, and looks whether it has. Returns its
    result, and what it was called again without, which only strict=False allows."""
    try:
        about = load(values)
        now = {one.name: one.value for one in entries(module, "")[0]} if asked else {}
        refused = {key: one for key, one in asked.items() if not _has_taken(now.get(one.name), values[key])}
    except StateMismatch:
        if not asked:
            raise
        refused = dict(asked)
    if not refused:
        return about, refused
    if restorer.strict:
        refuse_differing([one.problem for one in refused.values()])
    restorer.mismatched.extend(one.problem for one in refused.values())
    aside = {one.path for one in refused.values()}
    restorer.restored[:] = [where for where in restorer.restored if where not in aside]
    remaining = {key: value for key, value in values.items() if key not in refused}
    return load(remaining), refused


def _has_taken(now: Any, value: Any) -> bool:
    """Returns whether an entry of a module has the bytes that were saved."""
    if not isinstance(now, torch.Tensor) or now.dtype is not value.dtype or now.numel() != value.numel():
        return False
    return tensors.equal_bytes(now, value)


def _apply_strictness(missing: Sequence[str], unexpected: Sequence[str], restorer: Restorer) -> None:
    """Applies strictness and the report to the keys that a module reported on load."""
    asked_for = [where for where in missing if restorer.selection.takes(where)]
    if restorer.strict and not restorer.selection.everything:
        refuse_unmatched(() if restorer.apart else unexpected, asked_for)
    restorer.missing.extend(asked_for)
    restorer.unexpected.extend(unexpected)
    if unexpected:
        aside = {*unexpected}
        restorer.restored[:] = [where for where in restorer.restored if where not in aside]


def _part(ours: Any, layout: ShardLayout, child: Json, path: str, restorer: Restorer) -> Thunk:
    """Plans load_state_dict()'s value for a part of a global tensor: this rank's part, laid out like the module's
    own."""
    if ours.is_meta:
        materialise_part(ours, layout, restorer.spec(child, path)[0], path, restorer)
    else:
        restorer.restored.append(path)
    with restorer.on(device_after(ours, restorer)):
        made = made_like(ours, layout, child, path, restorer)
    restorer.created.pop()
    return made


def _fits(ours: torch.Tensor, child: Json, path: str, restorer: Restorer) -> bool:
    if tensors.is_lazy(ours):
        return True
    _, spec = restorer.spec(child, path)
    layout = attached(ours)
    shape = tuple(ours.shape) if layout is None or restorer.private else layout.whole
    return spec.shape == shape and spec.dtype == str(ours.dtype)[6:]


def _differs(ours: torch.Tensor, child: Json, path: str, restorer: Restorer) -> str:
    return f"{path}: {restorer.words(child)} in the checkpoint, {tensors.words(ours)} in the target"


def _load(
    module: nn.Module, metadata: Mapping[str, Any], path: str, restorer: Restorer, values: Mapping[str, Any]
) -> Any:
    """Calls load_state_dict() and returns its result."""
    state = OrderedDict(values)
    state._metadata = metadata  # type: ignore[attr-defined]
    try:
        if overrides(module, "load_state_dict") and not _takes_strict(module):
            return module.load_state_dict(state)
        return module.load_state_dict(state, strict=restorer.strict and restorer.selection.everything)
    except RuntimeError as error:
        raise StateMismatch(f"{path or ROOT}: load_state_dict() refused: {error}", subject=path) from error


def _takes_strict(module: nn.Module) -> bool:
    import inspect

    parameters = inspect.signature(module.load_state_dict).parameters.values()
    return any(one.name == "strict" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def _metadata_for(module: nn.Module, node: Json) -> OrderedDict[str, Any]:
    from tenuto.state.restore.rebuild import plain

    saved = {name_of(prefix): plain(about) for prefix, about in items(node, "meta")} if "meta" in node else {}
    found: OrderedDict[str, Any] = OrderedDict()
    for place in places(module):
        found[place.raw.rstrip(".")] = saved.get(place.canonical.rstrip("."), {"version": 1})
    return found


_EXTRA: Final = "_extra_state"
_FLAGS: Final = ("param", "buffer", "grad", "class", "dtensor")


def overrides(module: nn.Module, *names: str) -> bool:
    """Returns whether the class overrides one of the methods; torch's own classes are known to follow the rules."""
    for name in names:
        for base in type(module).__mro__:
            if name in vars(base):
                if base is not nn.Module and not base.__module__.startswith("torch.nn.modules."):
                    return True
                break
    return False


def _saves_its_own_way(module: nn.Module) -> bool:
    hooks = bool(module._state_dict_hooks) or others(module._state_dict_pre_hooks.values())
    has_extra = type(module).get_extra_state is not nn.Module.get_extra_state
    return hooks or has_extra or overrides(module, "state_dict", "_save_to_state_dict")


def _loads_its_own_way(module: nn.Module) -> bool:
    before, after = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    hooks = (before or after) and others([*before.values(), *after.values()])
    return bool(hooks) or overrides(module, "load_state_dict", "_load_from_state_dict")


@dataclass(slots=True)
class ModuleEntry:
    """One entry of state_dict(): its key, its canonical name, its value, and whether that is the module's own
    tensor."""

    key: str
    name: str
    value: Any
    own: bool


def entries(module: nn.Module, path: str) -> tuple[list[ModuleEntry], Mapping[str, Any]]:
    """Returns the entries of state_dict(), and its metadata by canonical module prefix.

    A module tree that saves in torch's standard way need not be asked: its state is its tensors, in order.
    """
    if is_plain(module):
        metadata = {place.canonical.rstrip("."): {"version": place.module._version} for place in places(module)}
        return [
            ModuleEntry(raw, name, tensor, True) for raw, name, tensor, persistent in own_tensors(module) if persistent
        ], metadata
    return _from_state_dict(module, path)


def is_plain(module: nn.Module) -> bool:
    return not any(_saves_its_own_way(place.module) for place in places(module) if not place.wrapper)


def _from_state_dict(module: nn.Module, path: str) -> tuple[list[ModuleEntry], Mapping[str, Any]]:
    state = module.state_dict()
    if not isinstance(state, Mapping):
        raise StateError(f"{path or ROOT}: state_dict() of {type_name(type(module))} is not a mapping", subject=path)
    by_raw, by_name = {}, {}
    for raw, name, tensor, persistent in own_tensors(module):
        if persistent:
            by_raw[raw], by_name[name] = (name, tensor), tensor
    prefixes = sorted(((place.raw, place.canonical) for place in places(module)), key=lambda pair: -len(pair[0]))
    found: list[ModuleEntry] = []
    for key, value in state.items():
        name = by_raw[key][0] if key in by_raw else key if key in by_name else _canonical(key, prefixes)
        own = by_name.get(name)
        same = own is not None and isinstance(value, torch.Tensor) and _same(value, own)
        found.append(ModuleEntry(key, name, own if same else value, same))
    canonical = {raw.rstrip("."): name.rstrip(".") for raw, name in prefixes}
    metadata = getattr(state, "_metadata", None) or {}
    return found, {canonical.get(raw, raw): about for raw, about in metadata.items()}


def _canonical(key: Any, prefixes: list[tuple[str, str]]) -> str:
    if not isinstance(key, str):
        raise StateError(f"a module's state_dict() has the key {key!r}, which is not a string", subject=repr(key))
    return next(canonical + key[len(raw) :] for raw, canonical in prefixes if key.startswith(raw))


def _same(value: torch.Tensor, own: torch.Tensor) -> bool:
    """Returns whether an entry is the module's own tensor (detached, as state_dict() returns it)."""
    if value is own:
        return True
    if value.layout is not torch.strided or own.layout is not torch.strided or value.is_meta != own.is_meta:
        return value.layout is own.layout and type(value) is not torch.Tensor
    if tensors.is_lazy(own):
        return False
    if value.shape != own.shape or value.dtype is not own.dtype or value.stride() != own.stride():
        return False
    return own.is_meta or type(value) is not torch.Tensor or value.data_ptr() == own.data_ptr()


# -- encode


def _refuse_engine(module: nn.Module, path: str) -> None:
    """Raises StateError for DeepSpeed's engine, whose state_dict() leaves out the optimizer, the loss scale and the
    partitions that the engine keeps beside the module."""
    kinds = [(base.__module__.partition(".")[0], base.__name__) for base in type(module).__mro__]
    if ("deepspeed", "DeepSpeedEngine") in kinds:
        raise StateError(
            f"{path or ROOT}: the state_dict() of a DeepSpeedEngine has the weights alone, and not its optimizer",
            subject=path,
            hint="pass tenuto.deepspeed.state(engine), with whatever else the training has",
        )


def encode(module: nn.Module, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
    refuse_unknown(module, path)
    _refuse_engine(module, path)
    put_back = settling(module)
    for put in put_back:
        put()
    cells = _Slots(module, path)
    found, metadata = entries(module, path)
    about = {"!": "module", "type": type_name(type(module)), "meta": _metadata_node(metadata, writer, path)}
    same = replicas([module])
    dense = not same.buffers and all(one.own and _is_ordinary(one.value) for one in found)
    plain = is_plain(module)
    if not (dense and plain):
        known = found if plain else None
        return {**about, "i": _pairs(found, path, writer, same)}, _again(cells, about, same, put_back, known)
    watched = WatchedTensors()
    values = [one.value for one in found]
    pairs = []
    for one in found:
        with _placed(one.value, same, writer):
            pairs.append([one.name, watched.first(one.value, join(path, escape(one.name)), writer)])
    node = {**about, "i": pairs}

    def refresh(again: nn.Module, replay: StateWalker) -> Json:
        cells.check(again)
        watched.again(replay, values)
        return node

    return node, refresh


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensors.is_subclass(tensor) and attached(tensor) is None


def _placed(tensor: Any, same: DataParallelReplicas, writer: StateWalker) -> AbstractContextManager[None]:
    return writer.placed("replicated") if id(tensor) in same.parameters else _ANYWHERE


_ANYWHERE: Final = nullcontext()


def _pairs(found: list[ModuleEntry], path: str, writer: StateWalker, same: DataParallelReplicas) -> list[Json]:
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
    cells: _Slots,
    about: dict[str, Json],
    same: DataParallelReplicas,
    put_back: Sequence[Callable[[], Any]],
    known: list[ModuleEntry] | None,
) -> Refresh:
    """Returns the refresh of a module whose values must be encoded again; with `known` None also its state_dict(). A
    module tree that saves in the standard way keeps its entries while every tensor stays in its slot."""

    def refresh(again: nn.Module, replay: StateWalker) -> Json:
        for put in put_back:
            put()
        cells.check(again)
        if known is not None:
            return {**about, "i": _pairs(known, cells.path, replay, same)}
        found, metadata = entries(again, cells.path)
        pairs = _pairs(found, cells.path, replay, same)
        return {**about, "meta": _metadata_node(metadata, replay, cells.path), "i": pairs}

    return refresh


def _metadata_node(metadata: Mapping[str, Any], writer: StateWalker, path: str) -> Json:
    """Returns the node of state_dict()'s metadata, without modules of version 1."""
    return [[prefix, writer.closed(about, path)] for prefix, about in metadata.items() if about != {"version": 1}]


class _Slots:
    """The slots of a module tree: which tensors and modules they contain, by identity."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.path = path
        self._module = module
        self._cells: list[tuple[dict[str, Any], tuple[tuple[str, Any], ...]]] = []
        self._others: list[tuple[Any, int]] = []
        for place in places(module):
            one = place.module
            self._cells += [
                (table, tuple(table.items())) for table in (one._parameters, one._buffers, one._modules) if table
            ]
            empty = [table for table in (one._parameters, one._buffers, one._modules) if not table]
            counted = [*empty, one._non_persistent_buffers_set, one._state_dict_hooks, one._state_dict_pre_hooks]
            self._others += [(table, len(table)) for table in counted]

    def check(self, module: nn.Module) -> None:
        """Raises StructureChanged if a slot has changed."""
        if module is not self._module:
            raise StructureChanged
        for table, size in self._others:
            if len(table) != size:
                raise StructureChanged
        for cell, known in self._cells:
            if len(cell) != len(known):
                raise StructureChanged
            for name, value in known:
                if cell.get(name, cell) is not value:
                    raise StructureChanged


# -- restore


def restore(module: nn.Module, node: Json, path: str, restorer: Restorer) -> Thunk:
    _refuse_engine(module, path)
    kind = kind_of(node)
    if kind != "module" and kind not in KEYED:
        return restorer.mismatch(module, path, restorer.words(node), f"a module ({type_name(type(module))})")
    refuse_unknown(module, path)
    theirs = {name_of(key): child for key, child in items(node)}
    settle(module)
    found, _ = entries(module, path)
    direct = all(one.own or one.name.rpartition(".")[2] == _EXTRA for one in found)
    if not direct or any(_loads_its_own_way(place.module) for place in places(module) if not place.wrapper):
        through_load_state_dict(module, node, theirs, found, path=path, restorer=restorer)
    else:
        _in_place(module, theirs, found, path, restorer)
        restorer.later(path, lambda: loaded(module), MODULES)
    _check_meta(module, path, restorer)
    return lambda: module


def _in_place(
    module: nn.Module, theirs: dict[str, Json], found: list[ModuleEntry], path: str, restorer: Restorer
) -> None:
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
    restorer.unexpected.extend(where for name in theirs if restorer.takes(where := join(path, escape(name))))


def _extra(module: nn.Module, one: ModuleEntry, node: Json, path: str, restorer: Restorer) -> None:
    """Plans extra state, whatever the module's class makes of it."""
    raw = one.key[: -len(_EXTRA)]
    owner = next(place.module for place in places(module) if place.raw == raw)
    with restorer.for_an_object(node):
        value = restorer.rebuild(bare(node), path, one.value)
    restorer.restored.append(path)
    restorer.asks = True

    def take() -> None:
        restorer.kept.object(owner, path, memory=False)
        owner.set_extra_state(value())

    restorer.later(path, take, MODULES)


def _check_meta(module: nn.Module, path: str, restorer: Restorer) -> None:
    taken = filled(restorer)
    for _, name, tensor, _ in own_tensors(module):
        if tensor.is_meta and id(tensor) not in taken:
            restorer.faults.append(f"{join(path, escape(name))}: a meta tensor that no leaf of the checkpoint fills")


def fresh(node: Json, path: str, restorer: Restorer) -> Thunk:
    """Plans a module's entries without a module: a dictionary as from state_dict()."""
    thunks = {
        name_of(key): restorer.rebuild(bare(child), join(path, escape(name_of(key)))) for key, child in items(node)
    }
    return lambda: {name: thunk() for name, thunk in thunks.items()}


def bare(node: Json) -> Json:
    """Returns a leaf's node as state_dict() would have it: a plain tensor."""
    if isinstance(node, dict) and node.get("!") in (*LEAVES, "sparse"):
        return {key: value for key, value in node.items() if key not in _FLAGS}
    return node
