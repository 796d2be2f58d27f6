"""Translates an OSError of a file system into an error of the store."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tenuto.errors import ObjectNotFound, StoreDenied, StoreError, StoreFull, StoreUnavailable, StoreUnreliable

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
DENIED: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
PASSING: Final = frozenset({errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT})
# A path that runs through a file, or ends in a symbolic link, is none of our objects.
ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
UNSUPPORTED: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOTTY})


def meaning(error: OSError, doing: str, path: str, subject: str) -> StoreError:
    """Returns the store's error for `error`, met while `doing` something ("writing", ...) to `path`."""
    reason = error.strerror or str(error)
    found: StoreError
    if error.errno in FULL:
        found = StoreFull(
            f"no space while {doing} {path}: {reason}",
            subject=subject,
            hint="make room there: `tenuto gc WHERE --now` empties the trash, `tenuto keep WHERE --latest 1 --now` "
            "frees all but the newest checkpoint; each needs a few KiB of free space to begin with",
        )
    elif error.errno in DENIED:
        found = StoreDenied(
            f"not permitted: {doing} {path}: {reason}",
            subject=subject,
            hint=f"check who owns {path} and its directory (`ls -ld`), and that it is mounted writable",
        )
    elif error.errno in PASSING:
        found = StoreUnavailable(f"passing fault while {doing} {path}: {reason}", subject=subject)
    else:
        found = StoreError(f"{doing} {path} failed: {reason}", subject=subject)
    found.errno = error.errno
    return found


def absent(name: str, path: str) -> ObjectNotFound:
    return ObjectNotFound(f"there is no object {name} ({path})", subject=name)


def unflushed(error: OSError, path: str, subject: str) -> StoreUnreliable:
    """Returns the error for a failed flush, which is never retried: the kernel may have dropped the pages and marked
    them clean, so no later flush proves anything."""
    found = StoreUnreliable(
        f"flushing {path} to stable storage failed: {error.strerror or error}",
        subject=subject,
        hint="look at the kernel log (`dmesg`) and at the disk; what was acknowledged before is not concerned",
    )
    found.errno = error.errno
    return found


@contextmanager
def translated(doing: str, path: str, subject: str) -> Iterator[None]:
    """Translates an OSError of the block. The block may contain only file-system calls."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise meaning(error, doing, path, subject) from error
