"""Ranks that meet in a directory which all of them see, such as one on a network file system.

A value is one small file, put under its name by a rename, or by a hard link where only the first may put it: both are
whole or not at all on every file system that nodes share. No time stamp and no notification is relied on.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tenuto.concurrency.deadlines import DeadlineWorker
from tenuto.errors import RankStoreLost, UsageError
from tenuto.ranks.contract import KVStore

_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """The ranks of a job that meet in `directory`, for a job whose processes do not meet in torch.distributed.

    Each process gives its own `rank`, 0 to `world_size` - 1. The directory may be used again by the same job after a
    restart, and by one job at a time.
    """

    directory: str | os.PathLike[str]
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} of {self.world_size} ranks makes no sense",
                subject=f"rank={self.rank}",
                hint="number the processes from 0 to world_size - 1",
            )

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def kv_store(self) -> KVStore:
        return SharedFilesKVStore(Path(self.directory))


class SharedFilesKVStore:
    holder: Final = None
    longest_pause_s: Final = 0.1

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = f"the directory {root}"
        self._line = DeadlineWorker(self.name, self._lost)

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        self._line.call(lambda: self._put(key, value), timeout)

    def put_if_absent(self, key: str, value: bytes, *, timeout: float) -> bytes:
        return self._line.call(lambda: self._put_if_absent(key, value), timeout)

    def get(self, key: str, *, timeout: float) -> bytes | None:
        return self._line.call(lambda: self._get(key), timeout)

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes | None]:
        return self._line.call(lambda: [self._get(key) for key in keys], timeout)

    def delete(self, keys: Sequence[str], *, timeout: float) -> None:
        self._line.call(lambda: self._delete(keys), timeout)

    def close(self) -> None:
        self._line.close()

    def _path(self, key: str) -> Path:
        return self.root.joinpath(*key.split("/"))

    def _temporary(self, path: Path, value: bytes) -> Path:
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        tries = 4  # the directory may be removed, with the last key in it, between the two calls
        while True:
            tries -= 1
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(value)
            except FileNotFoundError:
                if not tries:
                    raise
            except BaseException:
                temporary.unlink(missing_ok=True)  # a full disk takes names, and no bytes
                raise
            else:
                return temporary

    def _put(self, key: str, value: bytes) -> None:
        path = self._path(key)
        temporary = self._temporary(path, value)
        try:
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _put_if_absent(self, key: str, value: bytes) -> bytes:
        path = self._path(key)
        found = self._get(key)
        if found is not None:
            return found
        temporary = self._temporary(path, value)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass  # also what a network file system says whose first answer was lost: what is there tells
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            lost = RankStoreLost(
                f"{self.name} has no hard links, so ranks cannot meet there",
                subject=str(self.root),
                hint="choose a directory on a file system with hard links, or initialise torch.distributed",
            )
            lost.lasting = True
            raise lost from error
        finally:
            temporary.unlink(missing_ok=True)
        found = self._get(key)
        return value if found is None else found

    def _get(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _delete(self, keys: Sequence[str]) -> None:
        parents = set()
        for key in keys:
            path = self._path(key)
            path.unlink(missing_ok=True)
            parents.add(path.parent)
        for emptied in parents:
            parent = emptied
            while parent != self.root:
                try:
                    parent.rmdir()
                except OSError:  # something is in it, or it is gone already
                    break
                parent = parent.parent

    def _lost(self, error: Exception) -> RankStoreLost:
        return RankStoreLost(
            f"{self.name}, where the ranks meet, fails: {error}",
            subject=str(self.root),
            hint="look at the directory: may this process write there, is the file system mounted?",
        )
