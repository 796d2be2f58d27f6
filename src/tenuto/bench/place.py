"""The place that is measured: its own hidden directory there, and nothing else of it is touched."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tenuto.engine.staging.arena import memory_headroom
from tenuto.errors import StoreDenied, StoreError, StoreFull, TenutoError, UsageError, typed
from tenuto.units import size

PREFIX: Final = ".tenuto-bench-"
SPACE: Final = 2
"""States that lie in the place at once: the newer checkpoint is there before the older one goes."""
MEMORY: Final = 2
"""States that lie in memory at once: the state and its image."""
SPARE: Final = 256 << 20
"""Bytes beside them: buffers, small objects, the reserve of a file system."""


@dataclass(frozen=True, slots=True)
class FileSystemFacts:
    """Where a directory lies: the file system's name, whether it is memory, whether it is on another machine."""

    name: str
    volatile: bool
    network: bool


def check_place(where: str, nbytes: int) -> Path:
    """The directory to measure in. UsageError if it is none, or if memory cannot hold a state of `nbytes` and its
    image; StoreFull if they do not fit there. Nothing has been written then."""
    if "://" in where and not where.startswith("file://"):
        raise UsageError(f"{where} is no directory of this machine", subject=where, hint="tenuto bench /a/directory")
    path = Path(os.path.realpath(os.path.expanduser(where.removeprefix("file://"))))
    if not path.is_dir():
        raise UsageError(
            f"{where} is no directory", subject=where, hint=typed("mkdir", "-p", where.removeprefix("file://"))
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
    """Hidden directories of measurements that were killed before they could clean up."""
    with contextlib.suppress(OSError):
        return sorted(str(found) for found in path.glob(f"{PREFIX}*") if found.is_dir())
    return []


@contextlib.contextmanager
def workplace(path: Path) -> Iterator[Path]:
    """A hidden directory inside `path`; gone afterwards, however the block ends. StoreDenied where none can be made."""
    try:
        own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=path))
    except OSError as error:
        raise _told(error, path) from error
    try:
        yield own
    except OSError as error:
        if isinstance(error, TenutoError):
            raise
        raise _told(error, path) from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
        if own.exists():
            raise StoreError(
                f"{own} could not be removed",
                subject=str(own),
                hint=f"{typed('rm', '-r', own)}  # it holds measurements only",
            )


def file_system_of(path: Path) -> FileSystemFacts:
    """By the mount table; "unknown" where there is none."""
    best, name = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, mounted, kind, *_ = line.split(" ")
            at = mounted.replace("\\040", " ").rstrip("/")
            if len(at) >= len(best) and (str(path) + "/").startswith(at + "/"):
                best, name = at, kind
    network = name.startswith(("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "9p", "fuse"))
    return FileSystemFacts(name, name in ("tmpfs", "ramfs"), network)


def _told(error: OSError, path: Path) -> StoreError:
    """An error of a bare loop, in the store's words: the loops stand beside the store, not behind it."""
    text = f"measuring in {path} failed: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(text, subject=str(path), hint="a smaller --size, or make room there")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreDenied(
            text, subject=str(path), hint=f"{typed('ls', '-ld', path)}  # who may write there, and is it mounted so"
        )
    return StoreError(text, subject=str(path), hint="dmesg  # what the kernel says of that disk")
