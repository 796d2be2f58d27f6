"""What include= and exclude= leave of an optimizer as it is, where the rest of it is restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.model.paths import join
from holdfast.state.keys import key_node
from holdfast.state.nodes import segment
from holdfast.state.restorer import Thunk
from holdfast.state.selection import Selection


class Kept:
    """Of the optimizer at `path`. `names`: the paths of its parameters, by identity."""

    def __init__(self, path: str, names: Mapping[int, str], selection: Selection) -> None:
        self._path = path
        self._names = names
        self._selection = selection
        self._left: set[int] = set()
        """The identities of parameters whose state stays, whatever is selected."""

    def leave(self, parameter: torch.Tensor) -> None:
        """The state of a parameter stays as it is."""
        self._left.add(id(parameter))

    def entries(self, path: str, present: Mapping[Any, Any]) -> dict[Any, Any]:
        """The entries at `path` of which nothing is restored."""
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
        """Of the state of a parameter; None for nothing."""
        path = join(join(self._path, "state"), self._names[id(parameter)])
        if id(parameter) in self._left and present is not None:
            return constants(present) if type(present) is dict else _constant(present)
        if type(present) is dict:
            return constants(self.entries(path, present)) or None
        return None if present is None or self._selection.takes(path) else _constant(present)

    def carry_over(self, said: dict[str, Any], optimizer: Optimizer, groups: Sequence[int | None]) -> None:
        """Adds it to what `load_state_dict()` is given, which replaces all that the optimizer has. `groups`: None for a
        group that the checkpoint has nothing of."""
        if self._selection.everything and None not in groups and not self._left:
            return
        now = optimizer.state_dict()
        state, said_groups = now.pop("state"), now.pop("param_groups")
        said.update(self.entries(self._path, now))
        for number, (group, present) in enumerate(zip(optimizer.param_groups, said_groups, strict=True)):
            options = said["param_groups"][number]
            where = f"{self._path}/param_groups/{number}"
            stays = present if groups[number] is None else self.entries(where, present)
            said["param_groups"][number] = {**stays, **options}
            for parameter, theirs, ours in zip(group["params"], present["params"], options["params"], strict=True):
                kept = self.of(parameter, state.pop(theirs, None))
                if kept is not None:
                    said["state"][ours] = _beside(called(kept), said["state"].get(ours))
        said["state"] = self.of_no_parameter(state) | said["state"]


def constants(values: Mapping[Any, Any]) -> dict[Any, Thunk]:
    return {key: _constant(value) for key, value in values.items()}


def called(entry: dict[Any, Thunk] | Thunk) -> Any:
    return entry() if callable(entry) else {key: thunk() for key, thunk in entry.items()}


def _constant(value: Any) -> Thunk:
    return lambda: value


def _beside(kept: Any, restored: Any) -> Any:
    """What stays of a parameter's state, and what comes back of it."""
    if restored is None:
        return kept
    return {**kept, **restored} if type(kept) is dict and type(restored) is dict else restored


def _below(path: str, key: Any) -> str:
    return join(path, segment(key_node(key)))
