"""Catches what a reader must not do: take much memory or time, touch files, start programs, unpickle."""

from __future__ import annotations

import sys
import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from campaigns.fuzz.targets import Broken

SECONDS: Final = 5.0
"""For inputs of at most 64 KiB; on a busy machine too."""
MEMORY: Final = 24 << 20
"""Bytes that reading may take, beside `PER_BYTE` for each byte of the input."""
PER_BYTE: Final = 1200
"""A path of the tree names all that is above it, so deep trees of short keys take much for each of their bytes."""

_FORBIDDEN: Final = frozenset(
    {
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.startfile",
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "shutil.rmtree",
        "subprocess.Popen",
        "socket.connect",
        "pickle.find_class",
        "ctypes.dlopen",
    }
)
_IMPORTED_WHERE_USED: Final = ("tenuto.", "numpy.", "encodings.", "_strptime", "_pydatetime", "_pydecimal")
"""By code, in words of its own; whatever the bytes name is never imported. What valid inputs need is there before."""
_own: Final = tuple({sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")})
Allowed = Callable[[str, tuple[Any, ...]], bool]
_done: list[str] = []
_allowed: list[Allowed] = []
_hooks: list[bool] = []


@contextmanager
def recording(allowed: Allowed) -> Iterator[list[str]]:
    """What happens within the block that may not: `allowed` judges what is opened and imported."""
    if not _hooks:
        sys.addaudithook(_hook)  # which can never be taken off again
        _hooks.append(True)
    _done.clear()
    _allowed.append(allowed)
    try:
        yield _done
    finally:
        _allowed.pop()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _allowed:
        return
    if event in _FORBIDDEN:
        _done.append(f"{event}{arguments!r}"[:300])
    elif event in ("open", "import") and not _allowed[-1](event, arguments):
        _done.append(f"{event} {arguments[0]!r}"[:300])


def _is_read(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        return _is_code(arguments)
    return str(arguments[0]).startswith(_IMPORTED_WHERE_USED)


def _is_code(arguments: tuple[Any, ...]) -> bool:
    """A module that is imported where it is used; its text, or its compiled form."""
    path = str(arguments[0])
    return path.startswith(_own) or path.endswith((".py", ".pyc", ".so"))


def watched(run: Callable[[bytes], None], data: bytes, *, memory: bool = True) -> None:
    """Runs; raises Broken if anything was done that reading must not do. `memory`: its peak is measured, slowly."""
    if memory:
        tracemalloc.start()
    began = time.perf_counter()
    try:
        with recording(_is_read) as done:
            run(data)
    finally:
        seconds = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1] if memory else 0
        if memory:
            tracemalloc.stop()
    if done:
        raise Broken(f"reading did {done[0]}")
    if seconds > SECONDS:
        raise Broken(f"{len(data)} bytes took {seconds:.1f} s")
    if peak > MEMORY + PER_BYTE * len(data):
        raise Broken(f"{len(data)} bytes took {peak / 2**20:.1f} MiB")
