"""What a load changes, as it was before: a load that is refused half-way puts it back.

All that can be told before the first write is told then (`match`). What remains is code of others, an object's own
`load_state_dict` above all, which runs when tensors have been filled already. Where a load will run some, up to `ROOM`
bytes of what it fills are copied first. A larger target costs nothing, and the error names what is overwritten.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Final

from tenuto.errors import TenutoError
from tenuto.state import frameworks
from tenuto.state.contract import Memory
from tenuto.state.frameworks import is_stateful

ROOM: Final = 256 << 20
_ENTRY: Final = 1 << 10
"""What an attribute or item counts for: there may be millions."""

Undo = Callable[[], Any]
_GONE: Final[Any] = object()


class Kept:
    """What one load has kept, in the order of its changes."""

    def __init__(self) -> None:
        self._undo: list[tuple[str, Undo]] = []
        self._room = ROOM
        self._lost: dict[str, None] = {}
        """Entries of the target of which something is changed and not kept."""

    def undo(self, path: str, undo: Undo) -> None:
        """Notes what puts `path` back, before it is changed."""
        self._undo.append((path, undo))

    def sinks(self, filled: Iterable[tuple[str, Memory]], *, needed: bool) -> None:
        """Keeps the memory of the target that is going to be filled: all of it, or nothing."""
        found = list(filled)
        nbytes = sum(sink.nbytes for _, sink in found)
        if not needed or nbytes > self._room:
            self._lost.update((path.partition("/")[0], None) for path, _ in found)
            return
        self._room -= nbytes
        for path, sink in found:
            self.undo(path, sink.keep())

    def replace(self, like: MutableMapping[Any, Any], key: Any, now: Any, path: str) -> None:
        """Replaces one entry of a mapping."""
        old = like.get(key, _GONE)
        like[key] = now
        self.value(old, lambda: like.pop(key, None) if old is _GONE else like.__setitem__(key, old), path)

    def value(self, old: Any, undo: Undo, path: str) -> None:
        """Notes what puts back one value that is not changed but replaced: it takes its memory for as long."""
        if self._takes(getattr(old, "nbytes", 0), path):
            self.undo(path, undo)

    def end(self) -> None:
        """Drops all that was kept: the load is through."""
        self._undo.clear()

    def content(self, like: Any, path: str) -> None:
        """Keeps what a container has in it, or the attributes of an object, without what those are made of."""
        nbytes = sum(getattr(one, "nbytes", 0) for one in _inside(like))
        if self._takes(nbytes, path):
            self.undo(path, _filled_again(like))

    def object(self, like: Any, path: str, *, without: Iterable[Any] = (), memory: bool = True) -> None:
        """Keeps an object whose own code is going to change it: its attributes, and what they hold of containers, of
        tensors and arrays (with `memory`), and of other objects that load a state; of a module its submodules."""
        of_framework = frameworks.adapter_for(type(like)) is not None
        waiting, seen = [like], {id(one): one for one in without}
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen[id(one)] = one
            adapter = frameworks.adapter_for(type(one))
            sink = adapter.memory(one) if hasattr(adapter, "memory") else None  # type: ignore[union-attr]
            if sink is not None:
                if memory and self._takes(sink.nbytes, path):
                    self.undo(path, sink.keep())
                continue
            is_object = one is like or (is_stateful(one) and (adapter is None or of_framework))
            inside = list(_inside(one)) if is_object or type(one) in _CONTAINERS else []
            if inside and self._takes(_ENTRY * len(inside), path):
                waiting.extend(inside)
            if (is_object and hasattr(one, "__dict__")) or type(one) in _MUTABLE:
                self.undo(path, _filled_again(one))

    def _takes(self, nbytes: int, path: str) -> bool:
        if nbytes > self._room:
            self._lose(path)
            return False
        self._room -= nbytes
        return True

    def _lose(self, path: str) -> None:
        self._lost[path.partition("/")[0]] = None

    def put_back(self, error: BaseException) -> None:
        """Puts everything back, the last change first. The error tells of what could not be."""
        for path, undo in reversed(self._undo):
            try:
                undo()
            except Exception:  # noqa: BLE001 - of anybody's class: named in the error that is raised
                self._lose(path)
        self.end()
        if self._lost and isinstance(error, TenutoError):
            names = ", ".join(name or "the target" for name in sorted(self._lost))
            error.message += f"\n  overwritten already, and not put back: {names}"


_CONTAINERS: Final = frozenset(
    {dict, list, tuple, set, collections.deque, collections.OrderedDict, collections.defaultdict}
)
_MUTABLE: Final = _CONTAINERS - {tuple}


def _inside(one: Any) -> Iterable[Any]:
    if isinstance(one, dict):
        return list(one.values())
    if isinstance(one, list | tuple | set | collections.deque):
        return list(one)
    return list(vars(one).values()) if hasattr(one, "__dict__") else ()


def _filled_again(one: Any) -> Undo:
    """Returns what gives a container, or an object's attributes, the same content again."""
    like: Any = one if isinstance(one, list | collections.deque | set | dict) else vars(one)
    add: Any = like.extend if isinstance(like, list | collections.deque) else like.update
    before = like.copy()

    def fill() -> None:
        like.clear()
        add(before)

    return fill
