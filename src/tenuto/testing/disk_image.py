"""A disk at one instant: a frozen tree of directories and file contents in blocks of 4096 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import xxhash

BLOCK: Final = 4096
ZEROES: Final = bytes(BLOCK)
ROOT: Final = 0
"""The inode of `/`, which always exists."""


@dataclass(frozen=True, slots=True)
class Contents:
    """A file's bytes: `size` of them, in blocks of 4096; blocks beyond the tuple read as zeroes."""

    blocks: tuple[bytes, ...] = ()
    size: int = 0

    def data(self) -> bytes:
        content = b"".join(self.blocks)
        return content[: self.size] + bytes(max(0, self.size - len(content)))


@dataclass(frozen=True, slots=True)
class DiskImage:
    """Directories (name -> inode) and files, by inode. Only what is reachable from ROOT counts."""

    directories: Mapping[int, Mapping[str, int]]
    files: Mapping[int, Contents]

    def tree(self) -> dict[str, Contents | None]:
        """Returns every reachable path with its contents, None for a directory; sorted by path."""
        return {path: self.files.get(inode) for path, inode in self.inodes().items()}

    def inodes(self) -> dict[str, int]:
        """Returns every reachable path with its inode, sorted by path."""
        found: dict[str, int] = {}
        pending = [("", ROOT)]
        while pending:
            prefix, directory = pending.pop()
            for name, inode in self.directories[directory].items():
                path = f"{prefix}/{name}"
                found[path] = inode
                if inode in self.directories:
                    pending.append((path, inode))
        return dict(sorted(found.items()))

    def fingerprint(self) -> bytes:
        """Returns 16 bytes that are equal for disks with the same names and bytes, whatever the inode numbers."""
        content = xxhash.xxh3_128()
        for path, inode in self.inodes().items():
            contents = self.files.get(inode)
            content.update(f"{path}\0".encode() + (b"directory" if contents is None else _digest(contents)))
        return content.digest()


@lru_cache(maxsize=65536)
def _digest(contents: Contents) -> bytes:
    return xxhash.xxh3_128_digest(contents.data())
