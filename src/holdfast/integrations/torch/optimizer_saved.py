"""An optimizer's node, taken apart."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import CorruptionError
from holdfast.model.checkpoint import Json
from holdfast.state.nodes import ROOT, items, kind_of, name_of, sequence


@dataclass(slots=True)
class Saved:
    """What an optimizer's node says. `state` and `groups` name parameters by their path."""

    state: list[tuple[str, Json]]
    other: list[tuple[Json, Json]]
    groups: list[tuple[list[tuple[str, Json]], list[str]]]
    extra: list[tuple[str, Json]]


def saved_in(node: Json, path: str) -> Saved:
    """CorruptionError for what no optimizer was saved as."""
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
