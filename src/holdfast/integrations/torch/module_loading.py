"""Modules that load in their own way: they get what they saved, and decide."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.errors import StateMismatch
from holdfast.integrations.torch import tensors
from holdfast.integrations.torch.meta import device_after, materialise, materialise_part
from holdfast.integrations.torch.modules import Entry, bare, overrides
from holdfast.integrations.torch.sharded import layout_like, made_like
from holdfast.integrations.torch.wrappers import places
from holdfast.model.checkpoint import Json
from holdfast.model.paths import escape, join
from holdfast.state.declared import attached
from holdfast.state.layouts import Layout
from holdfast.state.nodes import LEAVES, ROOT, items, kind_of, name_of
from holdfast.state.prepare import refuse_left_over
from holdfast.state.restorer import MODULES, Restorer, Thunk


def through_load_state_dict(
    module: nn.Module, node: Json, theirs: dict[str, Json], found: list[Entry], *, path: str, restorer: Restorer
) -> None:
    """Plans load_state_dict(), which decides; what it says that it lacks, or has no place for, is taken over."""
    keys = {one.name: one.key for one in found}
    present = {one.name: one.value for one in found}
    state: OrderedDict[str, Thunk] = OrderedDict()
    unfit: set[str] = set()
    for name, child in theirs.items():
        where = join(path, escape(name))
        if not restorer.takes(where):
            continue
        ours = present.get(name)
        if isinstance(ours, torch.Tensor) and kind_of(child) in LEAVES and not _fits(ours, child, where, restorer):
            unfit.add(keys[name])
            continue
        layout = layout_like(ours, where) if isinstance(ours, torch.Tensor) and kind_of(child) in LEAVES else None
        if layout is not None and not restorer.private:
            state[keys.get(name, name)] = _part(ours, layout, child, where, restorer)
            continue
        if isinstance(ours, torch.Tensor) and ours.is_meta and kind_of(child) in LEAVES:
            number, spec = restorer.spec(child, where)
            materialise(ours, number, spec, where, restorer)
        restorer.restored.append(where)
        device = ours.device if isinstance(ours, torch.Tensor) and not ours.is_meta else restorer.device
        with restorer.on(device):
            state[keys.get(name, name)] = restorer.rebuild(bare(child), where, ours)
    metadata = _metadata_for(module, node)
    paths = {keys.get(name, name): join(path, escape(name)) for name in (*keys, *theirs)}

    def load() -> None:
        said = _load(module, state, metadata, path, restorer)
        where = [[paths.get(key) or join(path, escape(key)) for key in getattr(said, name, ()) if key not in unfit]
                 for name in ("missing_keys", "unexpected_keys")]  # fmt: skip
        _take_over(where[0], where[1], restorer)

    restorer.later(path, load, MODULES)


def _take_over(missing: Sequence[str], unexpected: Sequence[str], restorer: Restorer) -> None:
    """Strictness and the report, by what a module has found as it loaded."""
    asked_for = [where for where in missing if restorer.selection.takes(where)]
    if restorer.strict and not restorer.selection.everything:
        refuse_left_over(() if restorer.apart else unexpected, asked_for)
    restorer.missing.extend(asked_for)
    restorer.unexpected.extend(unexpected)
    if unexpected:
        aside = {*unexpected}
        restorer.restored[:] = [where for where in restorer.restored if where not in aside]


def _part(ours: Any, layout: Layout, child: Json, path: str, restorer: Restorer) -> Thunk:
    """What load_state_dict() gets for a part of a global tensor: this rank's part, as the module's own is one."""
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
    if spec.shape == shape and spec.dtype == str(ours.dtype)[6:]:
        return True
    restorer.mismatch(ours, path, f"{spec.dtype} {list(spec.shape)}", tensors.words(ours))
    return False


def _load(
    module: nn.Module, thunks: Mapping[str, Thunk], metadata: Mapping[str, Any], path: str, restorer: Restorer
) -> Any:
    """What load_state_dict() returns."""
    state = OrderedDict((key, thunk()) for key, thunk in thunks.items())
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
    from holdfast.state.rebuild import plain

    saved = {name_of(prefix): plain(said) for prefix, said in items(node, "meta")} if "meta" in node else {}
    found: OrderedDict[str, Any] = OrderedDict()
    for place in places(module):
        found[place.raw.rstrip(".")] = saved.get(place.canonical.rstrip("."), {"version": 1})
    return found
