"""Reads `tenuto.toml` and the environment: every value with where it came from, and what is wrong with the line it has.

The environment overrides the file, variable by variable: `TENUTO_` and the key in capitals, `__` for each dot, such as
`TENUTO_SAVE__STEPS=200`; a tier by its name or number (`TENUTO_TIERS__NVME__CAPACITY`, `TENUTO_TIERS__0__CAPACITY`). A
value is what the file would have, text without its quotes.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tenuto.errors import UsageError, did_you_mean, typed
from tenuto.record import record
from tenuto.regular_files import opener
from tenuto.repo.replicated.tiers import ENCODE_ALL
from tenuto.training.config.keys import KEYS, Key, Kind, Table, flat, named

FILE: Final = "tenuto.toml"
VARIABLE: Final = "TENUTO_CONFIG"
"""Names the file, instead of the first one from the working directory upwards."""
PREFIX: Final = "TENUTO_"
_OTHERS: Final = (
    VARIABLE, "TENUTO_CERTIFY", "TENUTO_HEARTBEAT", "TENUTO_RESTART", "TENUTO_RESTART_CAUSE", "TENUTO_BATCH_SCALE",
    "TENUTO_SKIP_STEPS",
)  # fmt: skip
_CREDENTIAL: Final = re.compile(
    r"[a-z][a-z0-9+.-]*://"
    r"(?:[^/@]*:[^/@]*@|[^?]*\?(?:.*[&;])?[^=&;]*(?:sig|token|secret|passw|credential|key|sas)[^=&;]*=)",
    re.IGNORECASE,
)
"""A URL with a password before its host, or with what signs or authorizes a request in its query."""
_SECRET: Final = re.compile("secret|password|token|credential|access_?key|account_?key", re.IGNORECASE)
_ELSEWHERE: Final = (
    "credentials come from where the service's own tools have them: the environment, their files, or the machine's role"
)

Place = tuple[str | int, ...]
"""A value's way through the document: names of keys, and numbers in arrays."""


def dotted(place: Place) -> str:
    """Returns a place as messages show it: `tiers[0].keep.latest`."""
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place).removeprefix(".")


@record
class Problem:
    """What is wrong with a value. origin: the file and line, or the variable, that it comes from."""

    place: Place
    origin: str
    message: str
    hint: str

    @property
    def name(self) -> str:
        return dotted(self.place)

    def __str__(self) -> str:
        return f"{self.origin}: {self.message}"


@record
class Shown:
    """A setting for people: its key, its value, the same as the file would have it, and where it came from.

    A table that is left out has no value, and what that means as its text.
    """

    name: str
    value: object
    text: str
    origin: str


@dataclass
class Document:
    """The settings of a file and an environment, read: `values` by key, in the types that code would use."""

    path: Path | None
    raw: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _origins: dict[Place, str] = field(default_factory=dict)
    _of_file: set[Place] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The file as messages name it."""
        if self.path is None:
            return "the environment"
        inside = self.path.is_relative_to(Path.cwd())
        return str(self.path.relative_to(Path.cwd()) if inside else self.path)

    def origin(self, *place: str | int) -> str:
        """Returns where the value at `place` came from: its own line, or that of what it is in."""
        while place and place not in self._origins:
            place = place[:-1]
        return self._origins.get(place, self.name)

    def add(self, place: Place, message: str, hint: str) -> None:
        self.problems.append(Problem(place, self.origin(*place), message, hint))

    def check(self, *tops: str) -> None:
        """Raises UsageError for the first problem, of the keys `tops` if any are given."""
        found = [one for one in self.problems if not tops or not one.place or one.place[0] in tops]
        if found:
            more = f" (and {len(found) - 1} more: {typed('tenuto', 'config', 'check')})" if len(found) > 1 else ""
            raise UsageError(f"{found[0]}{more}", subject=found[0].name, hint=found[0].hint)

    def shown(self) -> Iterator[Shown]:
        """Yields every key that has a value, and what is the default of the others, in the order of the table."""
        yield from self._shown(KEYS, self.raw, ())

    def _shown(self, keys: Sequence[Key | Table], raw: Mapping[str, Any], above: Place) -> Iterator[Shown]:
        for key in keys:
            place = (*above, key.name)
            value = raw.get(key.name)
            if value is None:
                said = not above or (above == ("save",) and isinstance(key, Key))
                if key.default and said and key.name != "part":  # which concerns a stripe alone
                    default = tomllib.loads(f"value = {key.default}")["value"] if isinstance(key, Key) else None
                    yield Shown(dotted(place), default, key.default, "default")
            elif isinstance(key, Key):
                value = self._resolved(key.kind, value, place)
                yield Shown(dotted(place), value, _toml(value), self.origin(*place))
            else:
                for number, one in enumerate(_tables(value)):
                    yield from self._shown(key.keys, one, (*place, number) if key.many else place)

    def read(self) -> None:
        self.values = self._table(KEYS, self.raw, ())

    def _table(self, keys: Sequence[Key | Table], raw: Mapping[str, Any], above: Place) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in raw.items():
            place = (*above, name)
            key = named(keys, name)
            if key is None:
                self._unknown(keys, name, place)
            elif isinstance(key, Key):
                self._value(key, value, place, values)
            elif not _tables(value) or (isinstance(value, list) and not key.many):
                kind = "an array of tables" if key.many else "a table"
                self.add(place, f"{dotted(place)} is not {kind}", f"[[{name}]]" if key.many else f"[{name}]")
            elif key.many:
                tables = enumerate(_tables(value))
                values[name] = [self._table(key.keys, one, (*place, number)) for number, one in tables]
            else:
                values[name] = self._table(key.keys, value, place)
        for key in keys:
            if isinstance(key, Key) and key.required and key.name not in raw:
                self.add(above, f"{dotted(above)} has no {key.name}", f"{key.name} = {key.kind.example}")
        return values

    def _value(self, key: Key, value: object, place: Place, values: dict[str, Any]) -> None:
        if any(
            isinstance(one, str) and _CREDENTIAL.match(one) for one in (value if isinstance(value, list) else [value])
        ):
            self.add(place, f"{dotted(place)} holds what looks like a credential", f"take it out: {_ELSEWHERE}")
            return
        try:
            values[key.name] = self._resolved(key.kind, key.kind.read(value), place)
        except ValueError:
            self.add(
                place, f"{dotted(place)} = {_toml(value)} is not {key.kind.name}", f"{key.name} = {key.kind.example}"
            )

    def _resolved(self, kind: Kind, value: Any, place: Place) -> Any:
        """Returns a path of the file as seen from the working directory; any other value as it is."""
        if isinstance(value, list):
            return [self._resolved(kind, one, place) for one in value]
        if not kind.is_path or self.path is None or place not in self._of_file or not isinstance(value, str):
            return value
        if "://" in value or value.startswith("~") or self.path.parent == Path.cwd():
            return value
        return os.path.normpath(self.path.parent / value)

    def _unknown(self, keys: Sequence[Key | Table], name: str, place: Place) -> None:
        hint = did_you_mean(name, [key.name for key in keys])
        if hint is None:  # perhaps at another level
            hint = did_you_mean(name, [whole for whole, _ in flat()])
        if _SECRET.search(name):
            hint = f"no key holds a secret: {_ELSEWHERE}"
        why = ""
        if (place[0], name) == ("tiers", "encoding"):
            why, hint = ": a tier stores each checkpoint as the primary does", ENCODE_ALL
        self.add(
            place, f"there is no key {dotted(place)}{why}", hint or f"one of {', '.join(key.name for key in keys)}"
        )

    # The file.

    def load(self, path: Path) -> None:
        """Reads the file. Raises UsageError if it cannot be read or is no TOML."""
        try:
            with open(path, "rb", opener=opener) as file:
                text = file.read().decode("utf-8").replace("\r\n", "\n")
            self.raw = tomllib.loads(text)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            kind = "cannot be read" if isinstance(error, OSError) else "is not TOML"
            raise UsageError(
                f"the settings file {self.name} {kind}: {why}",
                subject=str(path),
                hint=f"mend it, or name another one: {VARIABLE}=/path/{FILE}",
            ) from error
        for place, line in lines(text).items():
            self._origins[place] = f"{self.name}:{line}"
            self._of_file.add(place)

    # The environment.

    def override(self, environment: Mapping[str, str]) -> None:
        """Puts what the environment says in the place of what the file says."""
        for variable in sorted(environment):
            if variable.startswith(PREFIX) and variable not in _OTHERS and environment[variable]:
                self._override(variable, environment[variable])

    def _override(self, variable: str, text: str) -> None:
        keys: Sequence[Key | Table] = KEYS
        key: Key | Table | None = None
        into: Any = self.raw
        place: Place = ()
        words = variable.removeprefix(PREFIX).lower().split("__")
        for number, word in enumerate(words):
            if isinstance(into, list):
                numbers = [n for n, one in enumerate(into) if word in (str(n), str(one.get("name", "")).lower())]
                step: str | int = numbers[0] if numbers else word
                known = bool(numbers)
            else:
                step, key = word, named(keys, word)
                keys = key.keys if isinstance(key, Table) else ()
                known = key is not None
            place = (*place, step)
            if not known:
                names = {whole.replace(".", "__").upper(): whole for whole, _ in flat()}
                near = did_you_mean(variable.removeprefix(PREFIX), names)
                if "__" in variable or near is not None:  # else it may be somebody else's
                    self.problems.append(Problem(place, variable, f"there is no key {dotted(place)}", _meant(near)))
                return
            if number == len(words) - 1:
                break
            into = into.setdefault(step, {}) if isinstance(into, dict) else into[step]
            if not isinstance(into, dict | list):
                into = {}  # the file is wrong there, which is said where it is read
        into[place[-1]] = _of_text(key, text) if isinstance(key, Key) else _of_text(None, text)
        self._origins = {one: origin for one, origin in self._origins.items() if one[: len(place)] != place}
        self._origins[place] = variable
        self._of_file -= {one for one in self._of_file if one[: len(place)] == place}


def _meant(near: str | None) -> str:
    return re.sub(r"'(\w+)'", rf"{PREFIX}\1", near) if near else "docs/reference/settings.md has all keys"


def _of_text(key: Key | None, text: str) -> object:
    if key is not None and key.kind.is_text and not text.startswith("["):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _tables(value: Any) -> list[dict[str, Any]]:
    """Returns the tables of an array, or one alone; nothing for anything else."""
    found: list[Any] = value if isinstance(value, list) else [value]
    return found if all(isinstance(one, dict) for one in found) else []


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def find(path: str | os.PathLike[str] | None = None) -> Path | None:
    """Returns the settings file: `path`, or what TENUTO_CONFIG names, or the first one from the working directory
    upwards; None without any."""
    if path is not None and not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"the settings file is a path, not a {type(path).__name__}",
            subject="from_config",
            hint='Checkpointer.from_config(state, "tenuto.toml"): the state comes first',
        )
    named_file = path or os.environ.get(VARIABLE)
    if named_file:
        return Path(named_file).expanduser().absolute()
    here = Path.cwd()
    return next((up / FILE for up in (here, *here.parents) if (up / FILE).exists()), None)


def document(path: Path | None, environment: Mapping[str, str] | None = None) -> Document:
    """Returns the settings of a file and of `environment` (default: this process's).

    `problems` has what is wrong with single values; raises UsageError for a file that cannot be read at all.
    """
    found = Document(path)
    if path is not None:
        found.load(path)
    found.override(os.environ if environment is None else environment)
    found.read()
    return found


def lines(text: str) -> dict[Place, int]:
    """Returns the line on which each value of a TOML document begins, from 1. The document has to be valid.

    tomllib has no positions, but it says when a statement is complete: the shortest run of lines that it accepts.
    """
    found: dict[Place, int] = {}
    arrays: dict[Place, int] = {}
    table: Place = ()
    statement: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        statement.append(line)
        try:
            parsed = tomllib.loads("\n".join(statement))
        except tomllib.TOMLDecodeError:
            continue
        first, statement = number - len(statement) + 1, []
        if line.lstrip().startswith("[") and first == number:
            table = _header(parsed, arrays)
            found[table] = number
            if isinstance(table[-1], int):
                found.setdefault(table[:-1], number)
        else:
            for place in _within(parsed):
                found[(*table, *place)] = first
    return found


def _header(parsed: Any, arrays: dict[Place, int]) -> Place:
    """Returns the table that a header opens, which parsed alone is `parsed`. arrays: the last number in each array."""
    place: Place = ()
    while parsed:
        name, parsed = next(iter(parsed.items()))
        place = (*place, name)
        if isinstance(parsed, list):
            arrays[place] = arrays.get(place, -1) + 1
            parsed = parsed[0]
        if place in arrays:
            place = (*place, arrays[place])
    return place


def _within(parsed: Any, above: Place = ()) -> Iterator[Place]:
    for name, value in parsed.items() if isinstance(parsed, dict) else enumerate(parsed):
        yield (*above, name)
        if isinstance(value, dict | list):
            yield from _within(value, (*above, name))
