"""Runs the command line in a forked child, on a terminal of a given size or on pipes, and returns all that it wrote."""

from __future__ import annotations

import fcntl
import gc
import os
import pty
import struct
import sys
import termios
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenuto.cli import main

DECIDING = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM", "TTY_COMPATIBLE", "PYTHONIOENCODING")
"""What decides how things are shown: taken out, so that the environment of the tests says nothing."""


@dataclass(frozen=True)
class Shown:
    """`stdout` of a terminal holds both streams, as they came."""

    status: int
    stdout: str
    stderr: str


def on_pipes(words: Sequence[str], *, where: Path, prepare: Callable[[], None], **environment: str) -> Shown:
    """Without any terminal."""
    out, err = os.pipe(), os.pipe()
    with open(os.devnull) as nothing:
        child = _start(words, (nothing.fileno(), out[1], err[1]), where, prepare, environment)
    os.close(out[1])
    os.close(err[1])
    told: list[bytes] = []
    reader = threading.Thread(target=lambda: told.append(_everything(err[0])))
    reader.start()
    stdout = _everything(out[0])
    reader.join()
    return Shown(_status(child), stdout.decode(), told[0].decode())


def on_terminal(
    words: Sequence[str],
    *,
    columns: int,
    where: Path,
    prepare: Callable[[], None],
    answer: bytes = b"",
    **environment: str,
) -> Shown:
    """With a terminal on all three streams, so many columns wide. `answer` is what the person there types."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {"TERM": "xterm-256color", **environment}
    child = _start(words, (follower, follower, follower), where, prepare, environment)
    os.close(follower)
    if answer:
        os.write(leader, answer)
    shown = _everything(leader)
    return Shown(_status(child), shown.decode().replace("\r\n", "\n"), "")


def _start(
    words: Sequence[str],
    streams: tuple[int, int, int],
    where: Path,
    prepare: Callable[[], None],
    environment: Mapping[str, str],
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        # What earlier tests have left uncollected may belong to threads of Rust, which a fork does not have.
        gc.freeze()
        _run(words, streams, where, prepare, environment)
    return child


def _run(
    words: Sequence[str],
    streams: tuple[int, int, int],
    where: Path,
    prepare: Callable[[], None],
    environment: Mapping[str, str],
) -> None:
    """In the child; never returns."""
    status: object = 99
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        for name in DECIDING:
            os.environ.pop(name, None)
        os.environ.update(environment)
        os.chdir(where)
        prepare()
        main(list(words))
    except SystemExit as leaving:
        status = leaving.code or 0
    except BaseException:  # noqa: BLE001 - a child of a test must not run on into the parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 98)


def _everything(stream: int) -> bytes:
    """Until the other end is closed, which a terminal tells as an error."""
    found = b""
    while True:
        try:
            piece = os.read(stream, 65536)
        except OSError:
            break
        if not piece:
            break
        found += piece
    os.close(stream)
    return found


def _status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
