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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final

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
        LOGGER.log(level, "%s", line)
    elif level >= (LOGGER.level or logging.INFO) and not LOGGER.disabled and level > LOGGER.manager.disable:
        _print(level, line)


def _one_line(message: str) -> str:
    text = re.sub(r"\s*\n\s*(hint: )?", "; ", message.strip())
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _print(level: int, line: str) -> None:
    stream = sys.stderr
    try:
        text = f"{_styled(level, line) if _is_terminal(stream) else f'tenuto: {line}'}\n"
        own = sys.__stderr__
        if own is not None and stream is own:
            if not _handlers_running:
                own.flush()
            os.write(own.fileno(), text.encode(own.encoding, "backslashreplace"))
        else:
            stream.write(text)
            stream.flush()
    except (OSError, ValueError, AttributeError):  # closed, or none at all: nobody reads it, and training goes on
        return


def _is_terminal(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def _styled(level: int, line: str) -> str:
    colour = next((code for least, code in _COLOURS if level >= least), "")
    return "\x1b[2mtenuto:\x1b[0m " + (f"\x1b[{colour}m{line}\x1b[0m" if colour else line)


os.register_at_fork(after_in_child=_deferred.clear)
