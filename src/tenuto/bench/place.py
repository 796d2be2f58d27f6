"""The measured place: a hidden directory there; nothing else in it is touched."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tenuto.concurrency.memory_headroom import memory_headroom
from tenuto.errors import StoreDenied, StoreError, StoreFull, TenutoError, UsageError, typed
from tenuto.record import record
from tenuto.units import size

PREFIX: Final = ".tenuto-bench-"
SPACE: Final = 2
"""States on disk at once: the newer checkpoint exists before the older one is removed."""
MEMORY: Final = 2
"""States in memory at once: the state and its image."""
SPARE: Final = 256 << 20
"""Further bytes: buffers, small objects, a file system's reserve."""


@record
class FileSystemFacts:
    """A directory's file system: its name, whether it is in memory, whether it is on another machine."""

    name: str
    volatile: bool
    network: bool


def check_place(where: str, nbytes: int) -> Path:
    """Returns the directory to measure in, before anything is written.

    Raises UsageError if it is none, or memory cannot hold a state of `nbytes` and its image; StoreFull if the disk
    cannot.
    """
    if "://" in where and not where.startswith("file://"):
        raise UsageError(f"{where} is not a directory of this machine", subject=where, hint="tenuto bench /a/directory")
    path = Path(os.path.realpath(os.path.expanduser(where.removeprefix("file://"))))
    if not path.is_dir():
        raise UsageError(
            f"{where} is not a directory", subject=where, hint=typed("mkdir", "-p", where.removeprefix("file://"))
        )
    room = os.statvfs(path)
    free, needed = room.f_bavail * room.f_frsize, SPACE * nbytes + SPARE
    if free < needed:
        raise StoreFull(
            f"measuring with {size(nbytes)} takes {size(needed)} at {path}; {size(free)} are free",
            subject=str(path),
            hint="a smaller --size, or make room there: nothing has been written",
        )
    memory, taken = memory_headroom(), MEMORY * nbytes + SPARE
    if memory is not None and memory < taken:
        raise UsageError(
            f"measuring with {size(nbytes)} takes {size(taken)} of memory; {size(memory)} are free",
            subject=str(path),
            hint="a smaller --size",
        )
    return path


def leftovers(path: Path) -> list[str]:
    """Returns hidden directories of measurements that were killed before their cleanup."""
    with contextlib.suppress(OSError):
        return sorted(str(found) for found in path.glob(f"{PREFIX}*") if found.is_dir())
    return []


@contextlib.contextmanager
def workplace(path: Path) -> Iterator[Path]:
    """Yields a hidden directory inside `path` and removes it however the block ends. Raises StoreDenied if it cannot be
    created."""
    try:
        own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=path))
    except OSError as error:
        raise _store_error(error, path) from error
    try:
        yield own
    except OSError as error:
        if isinstance(error, TenutoError):
            raise
        raise _store_error(error, path) from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
        if own.exists():
            raise StoreError(
                f"{own} could not be removed",
                subject=str(own),
                hint=f"{typed('rm', '-r', own)}  # it holds measurements only",
            )


def file_system_of(path: Path) -> FileSystemFacts:
    """Reads the file system from the mount table; "unknown" if there is none."""
    best, name = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, mounted, kind, *_ = line.split(" ")
            at = mounted.replace("\\040", " ").rstrip("/")
            if len(at) >= len(best) and (str(path) + "/").startswith(at + "/"):
                best, name = at, kind
    network = name.startswith(("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "9p", "fuse"))
    return FileSystemFacts(name, name in ("tmpfs", "ramfs"), network)


def _store_error(error: OSError, path: Path) -> StoreError:
    """Converts an OSError of a raw loop, which bypasses the store, into a store error."""
    text = f"measuring in {path} failed: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(text, subject=str(path), hint="a smaller --size, or make room there")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreDenied(
            text, subject=str(path), hint=f"{typed('ls', '-ld', path)}  # who may write there, and is it mounted so"
        )
    return StoreError(text, subject=str(path), hint="dmesg  # what the kernel says of that disk")
