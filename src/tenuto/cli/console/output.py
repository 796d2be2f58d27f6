"""Writes data to stdout, as text, tables or one JSON document, and messages and questions to stderr.

What comes from a store or a person is escaped as `tenuto.printable` says.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Final, Literal

from tenuto import log_lines
from tenuto.errors import TenutoError, UsageError, typed
from tenuto.model.ids import CheckpointId
from tenuto.printable import clean, clean_lines

if TYPE_CHECKING:
    from rich.console import RenderableType


Style = Literal["", "damaged", "gone"]

_STYLES: Final[Mapping[str, str]] = {"damaged": "\x1b[31m", "gone": "\x1b[2m"}
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")

UNLIMITED = 100_000
PAGE = 100
"""Maximum columns of running text."""
COPIED = ("hint: ", "more: ", "… ")
"""How lines begin that are there to be copied: they stay whole, however long."""
NARROWEST = 24
"""Columns that wrapped text gets, however narrow the terminal is."""


def clipped(text: str, most: int) -> str:
    """Returns the beginning of a long text, and a mark that there is more."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def cells(text: str) -> int:
    """Returns the terminal columns of `text`: two for East Asian wide letters, none for combining marks."""
    if text.isascii():
        return len(text)
    return sum(
        2 if unicodedata.east_asian_width(char) in "WF" else 0 if unicodedata.combining(char) else 1 for char in text
    )


def padded(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def line(text: str = "", *, cleaned: bool = False) -> None:
    """Writes one or more lines of data; long ones wrap between words on a terminal. `cleaned`: the text has passed
    `clean`, fits, and may contain our own colours."""
    text = text if cleaned else clean_lines(text)
    if not cleaned and sys.stdout.isatty():
        text = "\n".join(_wrapped(row, width()) for row in text.split("\n"))
    _write(text)


def story(text: str, *, cleaned: bool = False) -> None:
    """Writes one or more lines for the person who waits; long ones wrap between words on a terminal. Where stderr takes
    none, nothing is said: what is under way goes on."""
    text = text if cleaned else clean_lines(text)
    if log_lines.is_terminal(sys.stderr):
        room = shutil.get_terminal_size().columns
        text = "\n".join(_wrapped(row, room) for row in text.split("\n"))
    with suppress(OSError, ValueError):  # what it holds still has to be written, and fails there
        sys.stdout.flush()  # what was printed before stands before it, also where both go into one file
    log_lines.put(text + "\n")


def _wrapped(row: str, room: int) -> str:
    """Wraps a long line, further lines below its first word if that is such as `error:`."""
    plain = _COLOUR.sub("", row)
    if cells(plain) <= room or plain.startswith(COPIED):
        return row
    head, colon, rest = row.partition(": ")
    if not colon or _COLOUR.sub("", head).rstrip(":") not in ("error", "warning", "note"):
        head, rest = row[: len(row) - len(row.lstrip())], row.lstrip()
        indent = f"{head}  "
    else:
        indent = " " * (cells(_COLOUR.sub("", head)) + 2)
        head += ": "
    first, *more = wrap(rest, room - len(indent))
    return "\n".join([head + first, *(indent + part for part in more)])


def wrap(text: str, room: int) -> list[str]:
    """Splits `text` into lines of at most `room` columns, between words; a longer word stays whole."""
    return textwrap.wrap(text, max(room, NARROWEST), break_long_words=False, break_on_hyphens=False) or [""]


def styled(text: str, style: Style, stream: IO[str]) -> str:
    """Returns `text` in colour if `stream` is a terminal and neither NO_COLOR nor TERM=dumb is set.

    Damaged entries are red, gone ones dim; both are legible on light and dark backgrounds.
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not log_lines.is_terminal(stream)
    return text if plain or not style else f"{_STYLES[style]}{text}\x1b[0m"


def document(name: str, body: Mapping[str, Any]) -> None:
    """Writes the command's result as one JSON object with its schema, `tenuto.<name>/1`."""
    record = {"schema": f"tenuto.{name}/1", **body}
    _write(json.dumps(jsonable(record), indent=2, allow_nan=False))


def rendered(what: RenderableType) -> None:
    """Prints a rich renderable as wide as stdout, without colour if that is no terminal."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=min(width(), PAGE), highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(what)
    text = capture.get()
    if not console.is_terminal or console.no_color:
        text = "".join(row.rstrip() + "\n" for row in text.splitlines())
    _write(text, end="")


def width() -> int:
    """Returns the columns of stdout: COLUMNS if set, else the terminal's, else no limit, so that lines of a file stay
    lines."""
    if not os.environ.get("COLUMNS", "").isdigit() and not sys.stdout.isatty():
        return UNLIMITED
    return shutil.get_terminal_size().columns


def jsonable(value: Any) -> Any:
    """Returns `value` as JSON can hold it: a checkpoint as an object, a number that JSON lacks as a string ("nan")."""
    if isinstance(value, CheckpointId):
        return {"run": value.run, "attempt": value.attempt, "step": value.step}
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def rows(pairs: Sequence[tuple[str, str]], indent: str = "  ") -> str:
    """Formats names and values in two columns; a long value wraps between words within its own column."""
    pairs = [(clean(name), clean(value)) for name, value in pairs]
    wide = max((cells(name) for name, _ in pairs), default=0)
    limit = width()
    room = (limit if limit == UNLIMITED else min(limit, PAGE)) - len(indent) - wide - 2
    out = []
    for name, value in pairs:
        parts = wrap(value, room)
        out += [
            f"{indent}{padded(first, wide)}  {part}".rstrip()
            for first, part in zip([name, *[""] * (len(parts) - 1)], parts, strict=True)
        ]
    return "\n".join(out)


def flush() -> None:
    """Writes what stdout still holds. Raises TenutoError if it cannot be written."""
    with _stdout_written():
        sys.stdout.flush()


def _write(text: str, end: str = "\n") -> None:
    with _stdout_written():
        sys.stdout.write(text + end)


@contextmanager
def _stdout_written() -> Iterator[None]:
    """Raises TenutoError where stdout cannot be written, as on a full disk. What it still holds, and what comes later,
    is dropped: it would fail again, at the latest as the process ends. A reader that went away, as `head` does, stays
    a BrokenPipeError."""
    try:
        yield
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it lasts as long as the process
        if isinstance(error, BrokenPipeError):
            raise
        raise TenutoError(
            f"the output cannot be written: {error.strerror}",
            subject="stdout",
            hint="make room where it goes, or send it elsewhere: `tenuto ls > /another/disk/file`",
        ) from error


GAP = "  "
TOGETHER = "\u00a0"
"""Stands for a space at which a column does not wrap."""


@dataclass(slots=True)
class Columns:
    """A table.

    titles: one for each column. The last one that is shown takes the remaining width and, unless it is right-aligned,
        wraps between words.
    right: titles of right-aligned columns.
    dispensable: titles of columns to drop, in this order, while a row is wider than the terminal.
    continued: by the number of a row, what stands in its first column where it takes several lines.
    """

    titles: tuple[str, ...]
    right: frozenset[str] = frozenset()
    dispensable: tuple[str, ...] = ()
    rows: list[tuple[tuple[str, ...], Style]] = field(default_factory=list)
    continued: dict[int, str] = field(default_factory=dict)
    remarks: dict[int, str] = field(default_factory=dict)
    """By the number of a row that has a first cell alone: a text that takes all columns beside it."""

    def add(self, *texts: str, style: Style = "") -> None:
        assert len(texts) == len(self.titles)
        self.rows.append((tuple(map(clean, texts)), style))

    def remark(self, first: str, text: str) -> None:
        """Adds a row with a text across all columns but the first."""
        self.remarks[len(self.rows)] = clean(text)
        self.add(first, *[""] * (len(self.titles) - 1))

    def print(self, indent: str = GAP) -> None:
        """Writes to stdout, in colour if that is a terminal that permits it."""
        for text in self.lines(indent):
            line(text, cleaned=True)

    def lines(self, indent: str = GAP) -> list[str]:
        """Returns the table's lines, for `line(…, cleaned=True)`."""
        limit = width() - len(indent)
        *first, last = self._fitting(limit)
        before = sum(self._width(place) + len(GAP) for place in first)
        out = []
        for row, (texts, style) in enumerate([(self.titles, ""), *self.rows], start=-1):
            lead = "".join(self._cell(texts[place], place) + GAP for place in first)
            below = padded(self.continued.get(row, ""), before)
            parts = wrap(texts[last], limit - before) if self._wraps(last) else [self._cell(texts[last], last)]
            if row in self.remarks:
                lead = below = padded(texts[0], self._width(0)) + GAP
                parts = wrap(self.remarks[row], limit - len(lead))
            for number, part in enumerate(parts):
                text = f"{below if number else lead}{part.replace(TOGETHER, ' ')}".rstrip()
                out.append(indent + styled(text, style, sys.stdout))
        return out

    def shown(self) -> list[str]:
        """Returns the titles of the columns that are shown."""
        return [self.titles[place] for place in self._fitting(width() - len(GAP))]

    def _cell(self, text: str, place: int) -> str:
        width = self._width(place)
        return " " * (width - cells(text)) + text if self.titles[place] in self.right else padded(text, width)

    def _fitting(self, width: int) -> list[int]:
        """Returns the positions of the columns to show: non-empty ones that fit."""
        shown = [place for place in range(len(self.titles)) if any(texts[place] for texts, _ in self.rows)]
        for title in self.dispensable:
            if self._least(shown) <= width:
                break
            shown = [place for place in shown if self.titles[place] != title]
        return shown or [0]

    def _least(self, shown: Sequence[int]) -> int:
        """Returns the columns that these take at least: the last one can wrap."""
        *first, last = (self._width(place) for place in shown)
        return sum(first) + len(GAP) * len(first) + (min(last, NARROWEST) if self._wraps(shown[-1]) else last)

    def _wraps(self, place: int) -> bool:
        return self.titles[place] not in self.right

    def _width(self, place: int) -> int:
        return max(cells(self.titles[place]), *(cells(texts[place]) for texts, _ in self.rows), 0)


def joined_marks(marks: Iterable[str]) -> str:
    """Joins marks for the last column of a table, which wraps between them, and within one only if it is long."""
    return ", ".join(mark.replace(" ", TOGETHER) if cells(mark) < NARROWEST else mark for mark in marks)


def print_grace_of_trash(where: str) -> None:
    """Says how long what has just gone into the trash can be brought back, and when its space comes free."""
    story("`tenuto undelete` can bring it back for 24 h; `tenuto gc` frees its space after 25 h")
    story(f"hint: to free it now: {typed('tenuto', 'gc', where, '--now')}")


def agreed(question: str, *, yes: bool) -> bool:
    """Returns whether to continue: True with --yes, the person's answer on a terminal.

    Raises UsageError without either: nothing waits for an answer that cannot come, and nothing is removed without one.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError("nothing was done: there is no terminal to ask on", hint="--yes does it without asking")
    sys.stderr.write(f"{clean(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().casefold() in ("y", "yes"):
        return True
    story("nothing was done")
    return False
