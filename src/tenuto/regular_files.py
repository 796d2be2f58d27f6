"""Opens files of the user's or of other tools: regular ones alone, and without waiting for anybody."""

from __future__ import annotations

import errno
import os
import stat


def opener(path: str, flags: int) -> int:
    """Opens a regular file, for `open(path, opener=opener)`. Raises OSError for what is none: a pipe would hold its
    reader until somebody writes, and a device may have bytes without end."""
    _check(os.stat(path).st_mode)  # opening a device may already do something
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def strange(mode: int) -> str | None:
    """Returns what is neither a regular file nor a directory, in words."""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _check(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if (kind := strange(mode)) is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
