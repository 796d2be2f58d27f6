"""Reads pickles without running anything that they name.

A pickle is a program for a small stack machine. This module runs that program over plain values alone: no module is
imported, and what a pickle calls is looked up in a table of functions of ours. A name that is not in the table becomes
an `Unknown`, which can be called and filled and stays what it is; whoever reads the result refuses it by its name.
Torch writes pickles of protocol 2, DCP of the newest one.

What a hostile pickle may try: calls (nothing is called); absurd lengths (arguments are cut from bytes that exist);
references that make a small file an endless tree (`resolved`, and `_Machine._spend` for what is handed to a function).
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import numpy as np

from tenuto.errors import CorruptionError, Unserialisable

Refuse = Callable[[str], NoReturn]
_MARK: Final = object()
_ROOM: Final = 64
"""How many times more values a pickle may describe than it has instructions, by naming the same ones again."""
MAX_DEPTH: Final = 90
_HANDED: Final = 8
_HANDED_ROOM: Final = 1 << 14
"""What may be handed to functions, in items and bytes: so many times the length of the pickle, and so much more."""


_CONTAINER_BYTES: Final = 2
_CONTAINERS_ROOM: Final = 1 << 20
"""A list, dict, set or tuple, or a name for one, takes at least so many bytes of a pickle, but for so many."""


class Constant:
    """A name of a pickle that stands for a value: an element type, an option."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


class Unknown:
    """What a pickle makes of a class or function that is in no table. Nothing of it exists."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Record:
    """An object of a known class, as its fields. `state`: as the pickle sets it."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Any = None


Call = Callable[..., Any]
Known = Mapping[str, Call | Constant]
"""By "module name", as a pickle spells it."""


def read_as_record(name: str) -> Call:
    """Returns the table's entry for a class whose objects are read as a Record."""

    def make(*arguments: Any) -> Record:
        if arguments:
            raise ValueError(f"{name} is made of nothing, and then filled")
        return Record(name)

    return make


# -- numpy's own: arrays and scalars of numbers


class _ArrayType:
    """A dtype that its state completes."""

    __slots__ = ("code", "order")

    def __init__(self, code: str, *_: Any) -> None:
        if not isinstance(code, str) or code[:1] not in "biufcSU" or not (code[1:].isdigit() and len(code) < 12):
            raise ValueError("arrays of something other than numbers and text")
        self.code = code
        self.order = "<"

    def fill(self, state: Any) -> None:
        if state[1] not in ("<", ">", "|", "="):
            raise ValueError(f"a byte order {state[1]!r}")
        self.order = state[1]

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(("<" if self.order == "=" else self.order) + self.code)


class _Array:
    __slots__ = ("value",)

    def __init__(self, *_: Any) -> None:
        self.value: np.ndarray[Any, Any] = np.empty(0)

    def fill(self, state: Any) -> None:
        _, shape, kind, by_columns, data = state
        self.value = _array(data, kind, shape, "F" if by_columns else "C")


def _array(data: Any, kind: _ArrayType, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    if not isinstance(data, bytes | bytearray):
        raise ValueError("an array of objects")
    if kind.dtype().itemsize == 0:
        raise ValueError("an array of nothing")
    found: np.ndarray[Any, Any] = np.frombuffer(bytearray(data), kind.dtype()).reshape(tuple(shape), order=order)
    return found  # in memory of its own, which can be written


def _scalar(kind: _ArrayType, data: bytes) -> Any:
    return np.frombuffer(data, kind.dtype(), 1)[0]


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"the encoding {encoding!r}")
    return text.encode("latin1")


def _bytearray(data: Any = b"") -> bytearray:
    if not isinstance(data, bytes):  # a number would be as much memory as it says
        raise ValueError("a bytearray of something other than bytes")
    return bytearray(data)


def _members(make: Call) -> Call:
    return lambda members=(): make(map(_key, members))


def _key(value: Any) -> Any:
    """Returns a key or member. Nested ones are hashed by the interpreter without a limit to their depth."""
    inner = value if isinstance(value, tuple) else (value,)
    if any(isinstance(one, tuple | frozenset) for one in inner):
        raise ValueError("a key of nested tuples")
    return value


def _mapping(*arguments: Any) -> dict[Any, Any]:
    """Of a `defaultdict` or a mapping of a framework's own: its content alone."""
    last = arguments[-1] if arguments else {}
    return dict(last) if isinstance(last, dict) else {}


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict((_key(key), value) for key, value in pairs)


def _tables() -> dict[str, Call | Constant]:
    found: dict[str, Call | Constant] = {
        "collections OrderedDict": _ordered,
        "collections defaultdict": _mapping,
        "_codecs encode": _encode,
        "numpy dtype": _ArrayType,
        "numpy ndarray": Constant("numpy.ndarray"),
    }
    for core in ("numpy.core", "numpy._core"):
        found[f"{core}.multiarray _reconstruct"] = _Array
        found[f"{core}.multiarray scalar"] = _scalar
        found[f"{core}.numeric _frombuffer"] = _array
    for builtins in ("builtins", "__builtin__"):
        made: dict[str, Call] = {"complex": complex, "bytearray": _bytearray}
        made |= {"set": _members(set), "frozenset": _members(frozenset)}
        found |= {f"{builtins} {name}": make for name, make in made.items()}
        found |= {f"{builtins} {name}": Constant(name) for name in ("dict", "list", "int", "float", "str", "bool")}
    return found


PLAIN: Final[Known] = _tables()
"""Python's containers, and numpy's arrays of numbers."""


# -- the machine


class Unpickled:
    """The value of a pickle, and the names in it that are in no table."""

    __slots__ = ("instructions", "unknown", "value")

    def __init__(self, value: Any, unknown: set[str], instructions: int) -> None:
        self.value = value
        self.unknown = unknown
        self.instructions = instructions


def unpickle(data: bytes, known: Known, refuse: Refuse, *, persistent: Callable[[Any], Any] | None = None) -> Unpickled:
    """Returns the value of a pickle. `persistent`: what stands for an id of something outside the pickle.

    `refuse` is called for what is no pickle, for instructions that no framework writes, and for arguments that a known
    function does not take.
    """
    machine = _Machine(known, persistent, len(data))
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.instructions += 1
            machine.run(opcode.name, argument)
    except (CorruptionError, Unserialisable):
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError) as error:
        refuse(f"its pickle is not one that can be read: {error or type(error).__name__}")
    if not machine.ended:
        refuse("its pickle has no end")
    return Unpickled(machine.value, machine.unknown, machine.instructions)


_VALUES: Final = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE"}
    | {"BINBYTES", "BINBYTES8", "SHORT_BINBYTES", "BYTEARRAY8"}
)
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


class _Machine:
    def __init__(self, known: Known, persistent: Callable[[Any], Any] | None, length: int) -> None:
        self._room = _HANDED * length + _HANDED_ROOM
        self._containers = length // _CONTAINER_BYTES + _CONTAINERS_ROOM
        self._known = known
        self._persistent = persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.unknown: set[str] = set()
        self.value: Any = None
        self.ended = False
        self.instructions = 0

    def run(self, name: str, argument: Any) -> None:
        if not self._push(name, argument):
            self._combine(name, argument)

    def _push(self, name: str, argument: Any) -> bool:
        """Runs an instruction that only puts a value onto the stack, or remembers one."""
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._make()
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"):
            self._make()
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set}[name]())
        else:
            return name in ("PROTO", "FRAME")
        return True

    def _combine(self, name: str, argument: Any) -> None:
        """Runs an instruction that makes something of what lies on the stack."""
        stack = self._stack
        if name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            self._pops(count)
            self._make()
            stack[-count:] = [self._checked(tuple(stack[-count:]))]
        elif name == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif name == "FROZENSET":
            stack.append(frozenset(map(_key, self._to_mark())))
        elif name == "APPEND":
            self._extend([self._pop()])
        elif name in ("APPENDS", "ADDITEMS"):
            self._extend(self._to_mark())
        elif name == "SETITEM":
            value, key = self._pop(), self._pop()
            self._set([key, value])
        elif name == "SETITEMS":
            self._set(self._to_mark())
        elif name == "GLOBAL":
            stack.append(self._find(argument))
        elif name == "STACK_GLOBAL":
            qualified, module = self._pop(), self._pop()
            if not isinstance(qualified, str) or not isinstance(module, str):
                raise ValueError("a name that is not text")
            stack.append(self._find(f"{module} {qualified}"))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, called = self._pop(), self._pop()
            stack.append(self._call(called, arguments))
        elif name == "BUILD":
            self._fill(self._pop())
        elif name == "BINPERSID":
            if self._persistent is None:
                raise ValueError("it names something outside of itself")
            id = self._pop()
            self._spend(id)
            stack.append(self._persistent(id))
        elif name == "STOP":
            self.value, self.ended = self._pop(), True
            if stack:
                raise ValueError("something is left over at its end")
        else:
            raise ValueError(f"the instruction {name}, which no checkpoint has")

    def _make(self) -> None:
        """Counts what takes 50 to 200 bytes of memory for one of the pickle."""
        self._containers -= 1
        if self._containers < 0:
            raise ValueError("it makes more containers than any checkpoint of its length has")

    def _pop(self) -> Any:
        return self._checked((self._stack.pop(),))[0]

    def _pops(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError("it takes more values than there are")

    @staticmethod
    def _checked(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if _MARK in map(_itself, values):
            raise ValueError("a mark in place of a value")
        return values

    def _to_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while at >= 0 and stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise ValueError("a mark is missing")
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, set):
            target.update(map(_key, values))
        elif not isinstance(target, Unknown):
            raise ValueError(f"items for a {type(target).__name__}")

    def _set(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if len(pairs) % 2:
            raise ValueError("a key without a value")
        if isinstance(target, dict):
            target.update(zip(map(_key, pairs[::2]), pairs[1::2], strict=True))
        elif not isinstance(target, Unknown):
            raise ValueError(f"entries for a {type(target).__name__}")

    def _find(self, name: Any) -> Any:
        found = self._known.get(name)
        if found is None:
            self.unknown.add(str(name).replace(" ", "."))
            return Unknown(str(name).replace(" ", "."))
        return found

    def _call(self, called: Any, arguments: Any) -> Any:
        if isinstance(called, Unknown):
            return Unknown(called.name)
        if isinstance(called, Constant) or not callable(called) or not isinstance(arguments, tuple):
            raise ValueError(f"a call of a {type(called).__name__}")
        if any(isinstance(one, Unknown) for one in arguments):  # whose function would not know what to make of it
            return next(one for one in arguments if isinstance(one, Unknown))
        self._spend(arguments)
        return called(*arguments)

    def _spend(self, value: Any) -> None:
        """Counts what a function is handed, with all that is in it as often as it is there: a function may copy it,
        print it or hash it."""
        values = [value]
        while values:
            one = values.pop()
            inner = isinstance(one, tuple | list | dict | set | frozenset)
            self._room -= 1 + (len(one) if inner or isinstance(one, str | bytes | bytearray) else 0)
            if self._room < 0:
                raise ValueError("it hands the same values to functions again and again")
            if isinstance(one, dict):
                values += [*one.keys(), *one.values()]
            elif inner:
                values += one

    def _fill(self, state: Any) -> None:
        target = self._stack[-1]
        if isinstance(target, _ArrayType | _Array):
            self._spend(state)
        if isinstance(target, Record):
            target.state = state
        elif isinstance(target, _ArrayType | _Array):
            target.fill(state)
        elif not isinstance(
            target, dict | Unknown
        ):  # attributes of a mapping (`_metadata`) say nothing about its values
            raise ValueError(f"a state for a {type(target).__name__}")


def _itself(value: Any) -> Any:
    return value if value is _MARK else None


# -- the result as a tree


def resolved(found: Unpickled, refuse: Refuse, convert: Callable[[Any, str], Any]) -> Any:
    """Returns the value as nested containers of plain values, a tree: `convert(value, path)` returns what is put in
    place of each value that is no container. Refuses a value that holds itself, or the same so often that a small file
    would fill the memory."""
    room = [_ROOM * found.instructions + 1000]

    def walk(value: Any, path: str, depth: int) -> Any:
        room[0] -= 1
        if room[0] < 0 or depth > MAX_DEPTH:
            refuse(f"at {path[:200]!r} it holds itself, or the same values again and again")
        if isinstance(value, _Array):
            return value.value
        if isinstance(value, dict):
            made = {walk(key, path, depth + 1): walk(one, _below(path, key), depth + 1) for key, one in value.items()}
            return OrderedDict(made) if isinstance(value, OrderedDict) else made
        if isinstance(value, list | tuple):
            items = [walk(one, _below(path, number), depth + 1) for number, one in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, set | frozenset):
            return type(value)(walk(one, path, depth + 1) for one in value)
        return convert(value, path)

    return walk(found.value, "", 0)


def _below(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)
