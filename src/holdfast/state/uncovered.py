"""What a training script holds besides its `state` and looks like state: guesses that help to find a cause, no more."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, Final

import numpy as np

from holdfast.state.data import has_state
from holdfast.state.tagged import type_name

DEPTH: Final = 3
"""Containers and objects inside each other that are looked into, from a variable on."""
MOST: Final = 20_000
"""Objects that are looked at; a search for hints must come to an end."""
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)
_CLOSED: Final = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, str, bytes)
_WRAPPED: Final = ("module", "_orig_mod")


def uncovered(covered: tuple[Any, ...]) -> tuple[str, ...]:
    """Variables of the functions that are running, and of their modules, that hold a generator or something with
    `state_dict` and are not reached from `covered`. In words, each naming the variable."""
    reached = {id(value) for value in _reach(covered)}
    named: dict[int, str] = {}
    for name, root in _variables():
        for path, value in _inside(name, root):
            if id(value) not in reached and id(value) not in named and _holds_state(value, reached):
                named[id(value)] = f"{path} ({type_name(type(value))}) is not in `state`"
                reached.update(id(inner) for inner in _reach((value,)))
    return tuple(named.values())


def _holds_state(value: Any, reached: set[int]) -> bool:
    if isinstance(value, _GENERATORS) or type_name(type(value)) in ("torch.Generator", "torch._C.Generator"):
        return True
    if isinstance(value, type) or not has_state(value):
        return False
    if any(id(getattr(value, name)) in reached for name in _WRAPPED if hasattr(value, name)):
        return False
    try:
        return bool(value.state_dict())
    except Exception:  # noqa: BLE001 - anybody's code, asked only for a hint: one that cannot answer holds something
        return True


def _variables() -> Iterator[tuple[str, Any]]:
    """What the script's own functions that are running now have named, innermost first, then their modules."""
    modules: dict[int, dict[str, Any]] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _is_the_scripts(frame):
            modules[id(frame.f_globals)] = frame.f_globals
            if frame.f_locals is not frame.f_globals:
                yield from list(frame.f_locals.items())
        frame = frame.f_back
    for module in modules.values():
        yield from [(name, value) for name, value in list(module.items()) if not name.startswith("__")]


def _is_the_scripts(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    if name.partition(".")[0] == "holdfast" or name.startswith("importlib"):
        return False
    return "site-packages" not in frame.f_code.co_filename and not frame.f_code.co_filename.startswith("<frozen")


def _inside(name: str, root: Any) -> Iterator[tuple[str, Any]]:
    """`root` and what it holds, each with how to write it."""
    waiting: list[tuple[str, Any, int]] = [(name, root, 0)]
    seen: set[int] = set()
    while waiting and len(seen) < MOST:
        path, value, depth = waiting.pop(0)
        if id(value) in seen or isinstance(value, _CLOSED):
            continue
        seen.add(id(value))
        yield path, value
        if depth < DEPTH and type(value).__module__.partition(".")[0] != "holdfast":
            waiting += [(f"{path}{step}", inner, depth + 1) for step, inner in _below(value)]


def _reach(roots: tuple[Any, ...]) -> Iterator[Any]:
    waiting = list(roots)
    seen: set[int] = set()
    while waiting and len(seen) < MOST:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _CLOSED):
            continue
        seen.add(id(value))
        yield value
        waiting += [inner for _, inner in _below(value)]


def _below(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in list(value.items())]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{number}]", inner) for number, inner in enumerate(value)]
    held = getattr(value, "__dict__", None)
    return [(f".{key}", inner) for key, inner in list(held.items())] if isinstance(held, dict) else []
