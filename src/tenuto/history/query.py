"""Conditions on checkpoints, as `tenuto ls --where` takes them: `val_loss < 2 and step > 1000`.

The grammar is a small part of Python's, read by its parser and never executed: comparisons (also chained), `and`, `or`,
`not`, parentheses, `in [...]`, `is None`, numbers and text. A name that is none of FIELDS is a metric; one that Python
would not take for a name is written `metric["val/loss"]`.

`matches` and `sql` mean the same. Where a value is missing, a comparison is neither true nor false, as with NULL in
SQL, and what is not true does not match: `not (val_loss < 2)` leaves out what has no `val_loss`. NaN counts as missing.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Literal

from tenuto.errors import UsageError, did_you_mean
from tenuto.model.sizes import parse_bytes, parse_time, seconds_of
from tenuto.record import record

Kind = Literal["number", "bytes", "span", "time", "text", "names", "flag"]
"""bytes: also "2 GiB". span: seconds, also "3d". time: seconds since 1970, or a date. names: any number of words."""

FIELDS: Final[Mapping[str, Kind]] = {
    "run": "text",
    "attempt": "number",
    "step": "number",
    "size": "bytes",
    "stored": "bytes",
    "leaves": "number",
    "ranks": "number",
    "created": "time",
    "age": "span",
    "line": "text",
    "tag": "names",
    "best": "names",
    "pinned": "flag",
    "held": "flag",
    "verified": "flag",
    "proven": "flag",
    "damaged": "flag",
    "healthy": "flag",
}
"""The names that are no metrics, and what they are compared with."""
LINES: Final = ("current", "left")
_LONGEST: Final = 2_000
_DEEPEST: Final = 40
_EXAMPLE: Final = '"val_loss < 2 and step > 1000"'
_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "<>": operator.ne,
}
_OPERATORS: Final[Mapping[type[ast.cmpop], str]] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "=",
    ast.NotEq: "<>",
}

Value = Any
Column = Callable[[str], str]


def quoted(name: str) -> str:
    """Returns `name` as an identifier of SQL."""
    return '"{}"'.format(name.replace('"', '""'))


@record
class _Name:
    name: str
    kind: Kind
    column: int

    def of(self, row: Mapping[str, Value]) -> Value:
        found = row.get(self.name)
        if self.kind == "time" and isinstance(found, str):
            return seconds_of(found)
        return None if isinstance(found, float) and math.isnan(found) else found

    def words(self, row: Mapping[str, Value]) -> Collection[str]:
        found = row.get(self.name)
        return (found,) if isinstance(found, str) and found else found or ()


@record
class _Constant:
    value: float | str | bool

    def of(self, row: Mapping[str, Value]) -> Value:
        return self.value


@record
class _Compare:
    left: _Name | _Constant
    operator: str
    right: _Name | _Constant

    def holds(self, row: Mapping[str, Value]) -> bool | None:
        left, right = self.left.of(row), self.right.of(row)
        return None if left is None or right is None else bool(_COMPARE[self.operator](left, right))

    def sql(self, column: Column, values: list[Value]) -> str:
        return f"({_side(self.left, column, values)} {self.operator} {_side(self.right, column, values)})"


@record
class _Within:
    """Whether a value is one of `values`; of a name of several words, whether any of them is."""

    name: _Name
    values: tuple[float | str | bool, ...]

    def holds(self, row: Mapping[str, Value]) -> bool | None:
        if self.name.kind == "names":
            return any(word in self.values for word in self.name.words(row))
        found = self.name.of(row)
        return None if found is None else found in self.values

    def sql(self, column: Column, values: list[Value]) -> str:
        values += self.values
        if self.name.kind == "names":
            there = f"(instr(coalesce({column(self.name.name)}, ''), char(10) || ? || char(10)) > 0)"
            return f"({' OR '.join([there] * len(self.values))})"
        return f"({column(self.name.name)} IN ({', '.join('?' * len(self.values))}))"


@record
class _Missing:
    name: _Name

    def holds(self, row: Mapping[str, Value]) -> bool | None:
        return not self.name.words(row) if self.name.kind == "names" else self.name.of(row) is None

    def sql(self, column: Column, values: list[Value]) -> str:
        name = column(self.name.name)
        return f"(coalesce({name}, '') = '')" if self.name.kind == "names" else f"({name} IS NULL)"


@record
class _Not:
    part: _Node

    def holds(self, row: Mapping[str, Value]) -> bool | None:
        found = self.part.holds(row)
        return None if found is None else not found

    def sql(self, column: Column, values: list[Value]) -> str:
        return f"(NOT {self.part.sql(column, values)})"


@record
class _Several:
    """All of `parts`, or (`ends` is True) any of them: the value `ends` of one decides."""

    ends: bool
    parts: tuple[_Node, ...]

    def holds(self, row: Mapping[str, Value]) -> bool | None:
        found = [part.holds(row) for part in self.parts]
        return self.ends if self.ends in found else None if None in found else not self.ends

    def sql(self, column: Column, values: list[Value]) -> str:
        return f"({(' OR ' if self.ends else ' AND ').join(part.sql(column, values) for part in self.parts)})"


_Node = _Compare | _Within | _Missing | _Not | _Several


def _side(side: _Name | _Constant, column: Column, values: list[Value]) -> str:
    if isinstance(side, _Name):
        return column(side.name)
    values.append(side.value)
    return "?"


@record
class Query:
    """A condition on a checkpoint. `text`: as it was written."""

    text: str
    _node: _Node
    _used: tuple[_Name, ...]

    @classmethod
    def parse(cls, text: str) -> Query:
        """Raises UsageError, which names the column of what makes no sense."""
        reader = _Reader(text)
        return cls(text, reader.node, tuple(reader.used))

    def of_run(self, run: str) -> Query:
        """Returns the same of one run alone."""
        only = _Compare(_Name("run", "text", 1), "=", _Constant(run.casefold()))
        return Query(self.text, _Several(False, (self._node, only)), self._used)

    @property
    def names(self) -> tuple[str, ...]:
        """The fields and metrics that it looks at, each once, in the order of the text."""
        return tuple(dict.fromkeys(one.name for one in self._used))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those of `names` that are metrics."""
        return tuple(name for name in self.names if name not in FIELDS)

    def check(self, metrics: Iterable[str]) -> None:
        """Raises UsageError where a name is neither a field nor one of `metrics`, those that any checkpoint has."""
        there = set(metrics)
        for one in self._used:
            if one.name not in FIELDS and one.name not in there:
                known = ", ".join(sorted(there)) or "none"
                raise _wrong(
                    self.text,
                    one.column,
                    f"{one.name!r} is neither a field nor a metric of any checkpoint; metrics: {known}",
                    did_you_mean(one.name, [*FIELDS, *sorted(there)]) or f"fields: {', '.join(FIELDS)}",
                )

    def matches(self, row: Mapping[str, Value]) -> bool:
        """Returns whether a checkpoint with these values matches: fields and metrics by name, where absent or None is
        missing. `created` may be text as in manifests; `tag` and `best` are a word or several."""
        return self._node.holds(row) is True

    def sql(self, column: Column = quoted) -> tuple[str, list[Value]]:
        """Returns the condition as a clause of SQLite and its parameters.

        column: returns the expression for a name. That of `created` is in seconds since 1970; words of `tag` and `best`
        stand in one text, with a line break before and after each.
        """
        values: list[Value] = []
        return self._node.sql(column, values), values


def _wrong(text: str, column: int, what: str, hint: str | None = None) -> UsageError:
    return UsageError(f"{text!r}, column {column}: {what}", subject=text, hint=hint or f"for example {_EXAMPLE}")


class _Reader:
    """Makes conditions of one text. `used`: the names in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.used: list[_Name] = []
        self._code = text.strip()
        self._lead = len(text) - len(text.lstrip())
        if not self._code or len(text) > _LONGEST or not text.isprintable():
            why = "says nothing" if not self._code else f"is longer than {_LONGEST:,} characters"
            why = why if text.isprintable() else "has a line break or another control character"
            raise UsageError(f"a condition {why}", subject=text[:80], hint=f"for example {_EXAMPLE}")
        try:
            parsed = ast.parse(self._code, mode="eval").body
        except SyntaxError as error:
            column = self._lead + (error.offset or len(self._code) + 1)  # 0: at the end
            hint = 'text, and numbers with a unit, stand in quotes: size > "2 GiB"; == compares'
            raise _wrong(text, column, f"not understood from here on ({error.msg})", hint) from None
        except (ValueError, RecursionError, MemoryError):
            raise _wrong(text, 1, "not understood") from None
        self.node = self._node(parsed, 0)

    def _wrong(self, at: ast.expr, what: str, hint: str | None = None) -> UsageError:
        before = len(self._code.encode()[: at.col_offset].decode(errors="replace"))
        return _wrong(self.text, self._lead + before + 1, what, hint)

    def _node(self, at: ast.expr, depth: int) -> _Node:
        if depth > _DEEPEST:
            raise self._wrong(at, f"nested more than {_DEEPEST} deep")
        if isinstance(at, ast.BoolOp):
            return _Several(isinstance(at.op, ast.Or), tuple(self._node(part, depth + 1) for part in at.values))
        if isinstance(at, ast.UnaryOp) and isinstance(at.op, ast.Not):
            return _Not(self._node(at.operand, depth + 1))
        if isinstance(at, ast.Compare):
            sides = [at.left, *at.comparators]
            pairs = zip(at.ops, sides, sides[1:], strict=False)
            found = tuple(self._compare(op, left, right) for op, left, right in pairs)
            return found[0] if len(found) == 1 else _Several(False, found)
        name = self._name(at)
        if name is not None and name.kind == "flag":
            return _Compare(name, "=", _Constant(True))
        if name is not None and name.kind == "names":
            return _Not(_Missing(name))
        if name is not None:
            raise self._wrong(at, f"{name.name} is compared with what?", _example(name))
        raise self._wrong(at, f"{ast.unparse(at)} is not a condition")

    def _name(self, at: ast.expr) -> _Name | None:
        """Returns the field or metric that is named; None for anything else."""
        written = _written(at)
        if written is None:
            return None
        name = _Name(written, FIELDS.get(written, "number"), len(self._code.encode()[: at.col_offset].decode()) + 1)
        if isinstance(at, ast.Subscript) and written in FIELDS:
            raise self._wrong(at, f"a metric called {written} cannot be asked for: that is a field")
        self.used.append(_Name(name.name, name.kind, name.column + self._lead))
        return self.used[-1]

    def _compare(self, op: ast.cmpop, left: ast.expr, right: ast.expr) -> _Node:
        one, other = self._name(left), self._name(right)
        if one is None and other is None:
            raise self._wrong(left, "compares nothing of a checkpoint")
        if isinstance(op, (ast.In, ast.NotIn)):
            return self._within(one, left, right, negated=isinstance(op, ast.NotIn))
        if isinstance(op, (ast.Is, ast.IsNot)):
            if one is None or not (isinstance(right, ast.Constant) and right.value is None):
                raise self._wrong(right, "`is` asks only for what is missing: val_loss is None")
            return _Missing(one) if isinstance(op, ast.Is) else _Not(_Missing(one))
        sign = _OPERATORS[type(op)]
        name = one or other
        assert name is not None
        if one is not None and other is not None:
            if _sort(one) != _sort(other) or one.kind == "names":
                raise self._wrong(right, f"{one.name} and {other.name} are not to be compared with each other")
            return _Compare(one, sign, other)
        value = self._constant(left if one is None else right, name)
        if name.kind in ("names", "flag") and sign not in ("=", "<>"):
            raise self._wrong(left, f"{name.name} is not ordered: == and != compare it")
        if name.kind == "names":
            within = _Within(name, (value,))
            return within if sign == "=" else _Not(within)
        constant = _Constant(value)
        return _Compare(one or constant, sign, other or constant)

    def _within(self, name: _Name | None, left: ast.expr, right: ast.expr, *, negated: bool) -> _Node:
        if name is None or not isinstance(right, (ast.List, ast.Tuple)) or not right.elts:
            raise self._wrong(right if name else left, "`in` needs a name and a list", 'run in ["gpt", "bert"]')
        within = _Within(name, tuple(self._constant(one, name) for one in right.elts))
        return _Not(within) if negated else within

    def _constant(self, at: ast.expr, name: _Name) -> float | str | bool:
        """Returns the value that `name` is compared with."""
        negative = isinstance(at, ast.UnaryOp) and isinstance(at.op, ast.USub)
        inner = at.operand if isinstance(at, ast.UnaryOp) and negative else at
        value = inner.value if isinstance(inner, ast.Constant) else None
        if isinstance(value, bool) or (negative and not isinstance(value, (int, float))):
            value = value if name.kind == "flag" and not negative else None
            if value is not None:
                return bool(value)
        elif isinstance(value, str) and value.isprintable():
            found = self._of_text(at, value, name)
            if found is not None:
                return found
        elif isinstance(value, (int, float)) and name.kind in ("number", "bytes", "span", "time"):
            number = -value if negative else value
            return number if abs(number) < 1 << 63 else float(min(max(number, -(1 << 1000)), 1 << 1000))
        raise self._wrong(at, f"{name.name} is not compared with {ast.unparse(at)}", _example(name))

    def _of_text(self, at: ast.expr, text: str, name: _Name) -> float | str | None:
        if name.kind == "time":
            return seconds_of(text)
        try:
            if name.kind == "bytes":
                return parse_bytes(text, name.name)
            if name.kind == "span":
                return parse_time(text, name.name)
        except UsageError as error:
            raise self._wrong(at, error.message, error.hint) from None
        if name.name == "line" and text not in LINES:
            hint = did_you_mean(text, LINES) or 'line == "current", or line == "left"'
            raise self._wrong(at, f"a line of training is current or left, not {text!r}", hint)
        if name.name == "run":
            return text.casefold()
        return text if name.kind in ("text", "names") else None


def _written(at: ast.expr) -> str | None:
    """Returns the name that is written: `loss`, `eval.loss` or `metric["val/loss"]`."""
    if isinstance(at, ast.Name):
        return at.id
    if isinstance(at, ast.Attribute):
        before = _written(at.value)
        return None if before is None else f"{before}.{at.attr}"
    if isinstance(at, ast.Subscript) and isinstance(at.value, ast.Name) and at.value.id == "metric":
        inner = at.slice
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value.isprintable():
            return inner.value
    return None


def _sort(name: _Name) -> str:
    return name.kind if name.kind in ("text", "names", "flag") else "number"


def _example(name: _Name) -> str:
    if name.kind == "flag":
        return f"{name.name}, or not {name.name}"
    text = f'== "{LINES[0] if name.name == "line" else "main"}"'
    than = {"bytes": '> "2 GiB"', "span": '> "3d"', "time": '>= "2026-01-31"', "text": text, "names": '== "paper"'}
    return f"{name.name} {than.get(name.kind, '< 2')}"


@record
class Order:
    """What to sort by: `val_loss`, or `-step` for the highest first."""

    name: str
    descending: bool

    @classmethod
    def parse(cls, text: str) -> Order:
        """Raises UsageError where nothing is named."""
        name = text.removeprefix("-").strip()
        if not name:
            raise UsageError(f"--sort {text!r} names nothing", subject=text, hint="--sort val_loss, or --sort=-step")
        return cls(name, text.startswith("-"))

    def check(self, metrics: Iterable[str]) -> None:
        """Raises UsageError where the name is neither a field nor one of `metrics`."""
        known = [*FIELDS, *sorted(metrics)]
        if self.name not in known:
            raise UsageError(
                f"{self.name!r} is neither a field nor a metric of any checkpoint",
                subject=self.name,
                hint=did_you_mean(self.name, known) or f"there are: {', '.join(known)}",
            )
