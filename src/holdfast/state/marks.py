"""Back under a mark: what belongs to one rank comes from its private tree, a shard takes its part of a leaf."""

from __future__ import annotations

from typing import Any

from holdfast.model.checkpoint import Json
from holdfast.state import registry
from holdfast.state.declared import MARKS, Shard
from holdfast.state.nodes import OWN, ROOT, kind_of
from holdfast.state.restorer import ABSENT, Restorer, Thunk
from holdfast.state.tagged import type_name


def marked(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    """Plans the value of `node` where it or the target has a mark. A mark in the target stays, and holds the value."""
    if kind_of(node) == OWN:
        return _own(plan, node, like, path, keep)
    if not keep:
        return plan.rebuild(node, path, like.value)
    if isinstance(like, Shard):
        adapter = registry.adapter_for(type(like.value))
        if adapter is None:
            return plan.mismatch(like, path, plan.words(node), f"a shard of a {type_name(type(like.value))}")
        if not plan.takes(path):
            return lambda: like
        if plan.private:
            return _held(like, plan.value(node, like.value, path))
        return _held(like, adapter.restore_shard(like, node, path, plan))
    return _held(like, plan.value(node, like.value, path))


def _held(mark: Any, thunk: Thunk) -> Thunk:
    def take() -> Any:
        mark.value = thunk()
        return mark

    return take


def _own(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    """What each rank saved for itself: from the private tree at hand, or left as it is where that has none."""
    at = str(node.get("at"))
    found = plan.own(at)
    if found is ABSENT:
        plan.skipped.append(path or ROOT)
        plan.notes.append(f"{path or ROOT}: belongs to each rank alone, and nothing was saved for this one")
        return lambda: like if keep else ABSENT
    with plan.turned_to_own(at):
        if keep and like is not ABSENT:
            return plan.value(found, like, path)
        return plan.rebuild(found, path, like.value if type(like) in MARKS else like)
