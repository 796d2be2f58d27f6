"""Tensors of another element type, rounded as torch rounds; and names by rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from tenuto.codec.derived import rounded
from tenuto.errors import UsageError, nearest
from tenuto.formats.contract import Array, Tensor
from tenuto.model.leaf import escape
from tenuto.state.contract import Buffer

FLOATS: Final[Mapping[str, str]] = {
    "float64": "float64",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
}
"""What --dtype takes, and the element type it means."""
_NUMPY: Final[Mapping[str, str]] = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_STEP_ITEMS: Final = 1 << 16
"""What the processor's cache holds, with what the rounding makes of it."""


def float_type(name: str) -> str:
    """Returns the element type that a word for one means. UsageError names those that there are."""
    found = FLOATS.get(name.lower().removeprefix("torch."))
    if found is None:
        near = nearest(name, FLOATS)
        raise UsageError(
            f"{name!r} is not an element type to round to: those are float64, float32, float16 and bfloat16",
            subject="--dtype",
            hint=f"--dtype {near[0] if near else 'bfloat16'}",
        )
    return found


def converts(tensor: Tensor, to: str) -> bool:
    """Returns whether a tensor changes where floating-point tensors are to be of type `to`."""
    return tensor.dtype in _NUMPY and tensor.dtype != to


class ConvertedTensor(Tensor):
    """A floating-point tensor with its values rounded to another type: to the nearest, ties to even.

    overflowed: whether a value that was read has become infinite.
    """

    __slots__ = ("base", "overflowed")

    def __init__(self, base: Tensor, to: str) -> None:
        super().__init__(to, base.shape)
        self.base = base
        self.made_by = base.made_by
        self.overflowed = False

    def read_into(self, out: Buffer, start: int = 0) -> None:
        first, items = start // self.itemsize, len(out) // self.itemsize
        target: Array = out.view(_NUMPY[self.dtype])
        size = self.base.itemsize
        buffer = np.empty(min(items, _STEP_ITEMS) * size, np.uint8)
        for at in range(0, items, _STEP_ITEMS):
            count = min(_STEP_ITEMS, items - at)
            data = buffer[: count * size]
            self.base.read_into(data, (first + at) * size)
            values = data.view(_NUMPY[self.base.dtype])
            made = target[at : at + count]
            made[:] = _rounded(values, self.base.dtype, self.dtype)
            if not self.overflowed and (self.dtype == "float16" or self.base.dtype == "float64"):
                self.overflowed = _infinite(made, self.dtype) > _infinite(values, self.base.dtype)


def _infinite(values: Array, of: str) -> int:
    """Returns how many values are infinite."""
    return int(np.count_nonzero((values & 0x7FFF) == 0x7F80 if of == "bfloat16" else np.isinf(values)))


def _rounded(values: Array, of: str, to: str) -> Array:
    if of == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        if to in ("float64", "float32"):
            return values.astype(_NUMPY[to])
        single = values.astype(np.float32, copy=False)  # as torch does it, also where the source is longer
        if to == "float16":
            return single.astype(np.float16)
    return np.frombuffer(rounded(np.ascontiguousarray(single).data, "bfloat16"), np.uint16)


# -- names ---------------------------------------------------------------------------------------------------------


class Renaming:
    """Rules for names, each applied to what the ones before it made: `old(.*)=new\\1`, a regular expression that is
    found in the name, and what replaces it. `strip`: taken off the beginnings of names first; of a path in a nested
    state also off that of its last part."""

    def __init__(self, rules: Iterable[str] = (), strip: str = "") -> None:
        self._strip = strip
        self._rules: list[tuple[re.Pattern[str], str]] = []
        for rule in rules:
            old, equals, new = rule.partition("=")
            if not equals or not old:
                raise UsageError(
                    f"{rule!r} is not a rule for names", subject="--rename", hint=r"--rename '^module\.(.*)=\1'"
                )
            try:
                pattern = re.compile(old)
                pattern.sub(new, "")
            except (re.error, IndexError) as error:
                raise UsageError(
                    f"{rule!r} is not a rule for names: {error}",
                    subject="--rename",
                    hint=r"--rename '^module\.(.*)=\1'",
                ) from None
            self._rules.append((pattern, new))

    def __bool__(self) -> bool:
        return bool(self._strip or self._rules)

    def _stripped(self, name: str) -> str:
        if name.startswith(self._strip):
            return name.removeprefix(self._strip)
        above, slash, last = name.rpartition("/")
        return above + slash + last.removeprefix(self._strip)

    def __call__(self, name: str) -> str:
        name = self._stripped(name)
        for pattern, new in self._rules:
            try:
                name = pattern.sub(new, name)
            except (re.error, IndexError) as error:
                raise UsageError(f"the rule for {name!r} cannot be applied: {error}", subject="--rename") from None
        return name

    def check(self, names: Sequence[str]) -> None:
        """Raises UsageError where a rule, or the prefix, meets none of these names, or two names become one."""
        if self._strip and all(self._stripped(name) == name for name in names):
            raise UsageError(
                f"--strip {self._strip}: no name begins so; names are {', '.join(names[:3])}",
                subject=self._strip,
                hint="leave --strip out",
            )
        stripped = [self._stripped(name) for name in names]
        for pattern, new in self._rules:
            if names and not any(pattern.search(name) for name in stripped):
                raise UsageError(
                    f"--rename '{pattern.pattern}={new}' meets no name; names are {', '.join(stripped[:3])}",
                    subject=pattern.pattern,
                    hint="a rule is a regular expression: a dot in a name is written \\.",
                )
            stripped = [pattern.sub(new, name) for name in stripped]
        made: dict[str, str] = {}
        for name in names:
            new = self(name)
            if not new or made.setdefault(new, name) != name:
                raise UsageError(
                    f"{name!r} has no name left" if not new else f"{made[new]!r} and {name!r} both become {new!r}",
                    subject=name,
                    hint="make the rules narrower",
                )


def renamed(tree: Any, rename: Callable[[str], str], *, flat: bool) -> Any:
    """Returns a tree with its tensors under new names: the keys of a flat dict, or, in a nested one, whole paths, whose
    parts are joined by `/`. What is no dict stays where it is, with all that is in it."""
    if flat or not isinstance(tree, Mapping):
        return {rename(name): value for name, value in tree.items()} if flat else tree
    found: dict[Any, Any] = {}
    for keys, value in _entries(tree):
        path = "/".join(_segment(key) for key in keys)
        new = rename(path)
        kept = keys if new == path else tuple(new.split("/"))
        inner = found
        for key in kept[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise UsageError(
                    f"{path!r} cannot become {new!r}: {key!r} is not a dict", subject=path, hint="--rename"
                )
        inner[kept[-1]] = value
    return found


def paths(tree: Any) -> list[str]:
    """Returns the paths that `renamed` renames in a nested tree."""
    return ["/".join(map(_segment, keys)) for keys, _ in _entries(tree)] if isinstance(tree, Mapping) else []


def _segment(key: Any) -> str:
    return escape(key) if isinstance(key, str) else f"#i:{key}"


def _entries(tree: Mapping[Any, Any], above: tuple[Any, ...] = ()) -> Iterable[tuple[tuple[Any, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _entries(value, (*above, key))
        else:
            yield (*above, key), value


def overflowed(tensors: Iterable[Any], names: Iterable[str]) -> list[str]:
    """Returns the names of the tensors in which rounding has made values infinite."""
    pairs = zip(tensors, names, strict=True)
    return [name for tensor, name in pairs if isinstance(tensor, ConvertedTensor) and tensor.overflowed]


def converted(tree: Any, to: str) -> Any:
    """Returns a tree with its floating-point tensors of type `to`. One tensor under two names stays one."""
    known: dict[int, Tensor] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            return known.setdefault(id(value), ConvertedTensor(value, to)) if converts(value, to) else value
        if isinstance(value, Mapping):
            return {key: visit(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(visit, value)) if type(value) in (list, tuple) else value
        return value

    return visit(tree)
