"""Writes single lines for people: to the logger `tenuto` where logging is configured, else to stderr as `tenuto: …`.

A signal's handler may run in the middle of anything, also of a line that training writes, with a lock of the logging
module or of the stream held. So what is said meanwhile, by whatever thread, is `deferred`: a thread that waited for
that lock would wait for ever. To the process's own stderr a line goes by one system call, which takes no lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

from tenuto.printable import clean

LOGGER: Final = logging.getLogger("tenuto")
_COLOURS: Final = ((logging.ERROR, "31"), (logging.WARNING, "33"))
"""The codes of a terminal for lines from a level on."""
_deferred: Final = deque[tuple[int, str]]()
_handlers_running = 0


def log(level: int, message: str) -> None:
    """Writes one line. Where logging is configured its handlers and levels decide what becomes of it; else it goes to
    stderr from INFO, or from the level of the logger `tenuto`, on."""
    if _handlers_running and not _writes_directly():
        _deferred.append((level, message))
        return
    flush()
    _write(level, message)


def flush() -> None:
    """Writes what was deferred."""
    while _deferred and not _handlers_running:
        with contextlib.suppress(IndexError):  # another thread was faster
            _write(*_deferred.popleft())


@contextmanager
def deferred() -> Iterator[None]:
    """Keeps lines for later while the handler of a signal runs."""
    global _handlers_running  # noqa: PLW0603 - handlers run in one thread
    _handlers_running += 1
    try:
        yield
    finally:
        _handlers_running -= 1


def _writes_directly() -> bool:
    return not LOGGER.hasHandlers() and sys.stderr is not None and sys.stderr is sys.__stderr__


def _write(level: int, message: str) -> None:
    line = _one_line(message)
    if LOGGER.hasHandlers():
        try:
            LOGGER.log(level, "%s", line)
        except Exception as error:  # noqa: BLE001 - a handler that fails must end neither training nor a save
            _print(level, f"{line} (a logging handler failed: {_one_line(repr(error))})")
    elif level >= (LOGGER.level or logging.INFO) and not LOGGER.disabled and level > LOGGER.manager.disable:
        _print(level, line)


def _one_line(message: str) -> str:
    return clean(re.sub(r"\s*\n\s*(hint: )?", "; ", message.strip()))


def put(text: str) -> None:
    """Writes text to stderr as it is. Raises nothing where that is full or closed: what is under way goes on."""
    _put(lambda stream: text)


def _print(level: int, line: str) -> None:
    _put(lambda stream: _text(stream, level, line))


def _put(text_for: Callable[[TextIO], str]) -> None:
    stream, own = sys.stderr, sys.__stderr__
    if stream is not None and stream is not own:
        try:
            _print_to(stream, text_for(stream))
        except Exception:  # noqa: BLE001 - somebody's stand-in for stderr is closed or fails: the own one has the line
            stream = own
        else:
            return
    if stream is not None:
        _print_to_own(stream, text_for(stream))


def _print_to(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.write(text.encode("ascii", "backslashreplace").decode("ascii"))
    if hasattr(stream, "flush"):
        stream.flush()


def _print_to_own(own: TextIO, text: str) -> None:
    if not _handlers_running:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # a handler of the user's may interrupt a print
            own.flush()
    with contextlib.suppress(OSError, ValueError):  # closed: nobody reads it, and training goes on
        data = text.encode(own.encoding, "backslashreplace")
        while data:
            data = data[os.write(own.fileno(), data) :]


def _text(stream: TextIO, level: int, line: str) -> str:
    coloured = is_terminal(stream) and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    return (_styled(level, line) if coloured else f"tenuto: {line}") + "\n"


def is_terminal(stream: object) -> bool:
    asked = getattr(stream, "isatty", None)  # a stand-in may have nothing but write
    with contextlib.suppress(ValueError):  # closed
        return bool(asked and asked())
    return False


def _styled(level: int, line: str) -> str:
    colour = next((code for least, code in _COLOURS if level >= least), "")
    return "\x1b[2mtenuto:\x1b[0m " + (f"\x1b[{colour}m{line}\x1b[0m" if colour else line)


os.register_at_fork(after_in_child=_deferred.clear)
