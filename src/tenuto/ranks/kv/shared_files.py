"""Ranks that meet in a directory that all of them see, such as one on a network file system.

A value is one small file. A rename puts it under its name, or a hard link where only the first may put it: both are
atomic on every file system that nodes share. Nothing relies on time stamps or notifications.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tenuto.concurrency.deadlines import DeadlineWorker
from tenuto.errors import RankStoreLost, UsageError
from tenuto.ranks.contract import KVStore
from tenuto.record import record

_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@record
class SharedFiles:
    """The ranks of a job that meet in `directory`, for jobs whose processes do not meet in torch.distributed.

    Each process gives its own `rank`, 0 to `world_size` - 1. The same job may use the directory again after a restart;
    only one job may use it at a time.
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
    host_rank: Final = None
    longest_pause_s: Final = 0.1

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = f"the directory {root}"
        self._worker = DeadlineWorker(self.name, self._lost)

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        self._worker.call(lambda: self._put(key, value), timeout)

    def put_if_absent(self, key: str, value: bytes, *, timeout: float) -> bytes:
        return self._worker.call(lambda: self._put_if_absent(key, value), timeout)

    def get(self, key: str, *, timeout: float) -> bytes | None:
        return self._worker.call(lambda: self._get(key), timeout)

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes | None]:
        return self._worker.call(lambda: [self._get(key) for key in keys], timeout)

    def delete(self, keys: Sequence[str], *, timeout: float) -> None:
        self._worker.call(lambda: self._delete(keys), timeout)

    def close(self) -> None:
        self._worker.close()

    def _path(self, key: str) -> Path:
        return self.root.joinpath(*key.split("/"))

    def _temporary(self, path: Path, value: bytes) -> Path:
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        tries = 4  # another rank may remove the directory, with its last key, between the two calls
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
            pass  # or the reply of a network file system was lost: the value that is there decides
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
        except FileNotFoundError:
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
                except OSError:  # not empty, or gone already
                    break
                parent = parent.parent

    def _lost(self, error: Exception) -> RankStoreLost:
        return RankStoreLost(
            f"{self.name}, where the ranks meet, fails: {error}",
            subject=str(self.root),
            hint="look at the directory: may this process write there, is the file system mounted?",
        )
