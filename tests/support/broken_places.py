"""Places that fail, and packs that are damaged, for tests of repositories in several places."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.store.wrappers.retry import Patience, RetryingStore


class Refusing(OperatingSystem):
    """A place that takes nothing of these files, as one whose disk has gone."""

    def __init__(self, *files: str) -> None:
        self.files = files

    def create(self, path: str) -> int:
        if any(file in path for file in self.files):
            raise OSError(errno.EIO, "no such device", path)
        return super().create(path)


def over(place: Path, filesystem: OperatingSystem) -> Any:
    """The store there, over this file system."""
    return RetryingStore(LocalStore(str(place), filesystem=filesystem), Patience(wait_s=0.0))


def damage(path: Path) -> None:
    """One bit near the end."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
