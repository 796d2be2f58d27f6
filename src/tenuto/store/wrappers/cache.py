"""A cache of data files on a local directory before a slow store, shared by all processes of a node.

A block of an object is one file, named by the object's identity (URL, name, length, time) and the block's number; it
appears by a rename, and ends with a digest over both, so that a truncated, damaged or misplaced file is noticed and
fetched anew. Reading a block sets its time; the blocks that nobody has read for longest go first. How much is there
stands in one small file under a lock, and room is taken before a block is written, so the limit holds at any time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import xxhash

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.errors import CorruptionError, StoreDenied, StoreError, typed
from tenuto.events import warn
from tenuto.model.sizes import parse_bytes
from tenuto.store.base import BaseReader
from tenuto.store.contract import Capabilities, Reader, Where
from tenuto.store.registry import open_store
from tenuto.store.wrappers.delegating import DelegatingStore

DATA_FILES: Final = (".safetensors", ".pack", ".index")
"""How the names of objects end that are never put twice with other bytes, and are large: packs and indexes. What
decides (claims, manifests, refs, notes) is always asked of the store itself."""
_DIGEST: Final = 16
_LOCKS: Final = 256
FETCH_WAIT_S: Final = 30.0
"""How long a block is waited for that another process is fetching. Then it is fetched once more."""
ROOM_WAIT_S: Final = 5.0
"""How long a block waits for room. Then it is not kept."""
_LOOK_S: Final = 0.005
_ROOM: Final = 0.9
"""The share of the limit that is left in use when room is made."""


class Cached(DelegatingStore):
    """A location whose data files are kept in a local `directory` too, once they have been read.

    For a slow store that one node reads more than once: ranks that need the same bytes, restores that are tried again,
    evaluations. All processes of the node may share the directory. It takes at most `limit` bytes; what has not been
    read for longest goes first. A block that several processes want at the same time is fetched once. Where the
    directory is full or fails, reads go to the location itself. Saves pass the cache by.
    """

    def __init__(self, where: Where, directory: str | os.PathLike[str], limit: int | str = "50GB") -> None:
        super().__init__(open_store(where))
        self.blocks: Final = Blocks(Path(os.path.abspath(os.path.expanduser(directory))), parse_bytes(limit, "limit"))

    def __repr__(self) -> str:
        return f"Cached({self.url!r}, {str(self.blocks.directory)!r}, limit={self.blocks.limit})"

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def holds(self, name: str) -> bool:
        """Returns whether objects of this name may be cached."""
        return name.endswith(DATA_FILES)

    def get(self, name: str, *, limit: int) -> bytes:
        if not self.holds(name):
            return self.inner.get(name, limit=limit)
        with self.open(name) as reader:
            if reader.length > limit:
                raise CorruptionError(f"{name} has {reader.length} bytes where at most {limit} belong", subject=name)
            data = bytearray(reader.length)
            reader.read_into(0, memoryview(data))
        return bytes(data)

    def open(self, name: str) -> Reader:
        if not self.holds(name):
            return self.inner.open(name)
        found = self.inner.stat(name)  # a damaged copy may have been written anew, with another time
        identity = f"{self.url}\0{name}\0{found.length}\0{found.modified_ns}"
        return CachedReader(self, name, found.length, hashlib.sha256(identity.encode()).hexdigest()[:40])


class CachedReader(BaseReader):
    """Opens the object itself only when a block of it is not in the cache."""

    def __init__(self, store: Cached, name: str, length: int, key: str) -> None:
        super().__init__(name, length)
        self._store = store
        self._key = key
        self._block = store.capabilities.part_bytes
        self._inner: Reader | None = None

    def fetch(self, offset: int, buffer: memoryview) -> None:
        def read(number: int) -> None:
            begin = number * self._block
            low, high = max(offset, begin), min(offset + len(buffer), begin + self._block)
            wanted = buffer[low - offset : high - offset]
            size = min(self._block, self.length - begin)
            block = wanted if len(wanted) == size else memoryview(bytearray(size))
            self._fill(number, block)
            if block is not wanted:
                wanted[:] = block[low - begin : high - begin]

        numbers = range(offset // self._block, (offset + len(buffer) - 1) // self._block + 1)
        parallel_for(read, numbers, self._store.capabilities.parallel)

    def _fill(self, number: int, block: memoryview) -> None:
        blocks, key = self._store.blocks, f"{self._key}-{number}"
        if blocks.read(key, block):
            return
        with blocks.fetching(key):
            if blocks.read(key, block):  # by another process, while this one waited
                return
            self._opened().read_into(number * self._block, block)
            blocks.write(key, block)

    def _opened(self) -> Reader:
        inner = self._inner
        if inner is None:
            inner = self._store.inner.open(self.name)
            if inner.length != self.length:
                inner.close()
                raise CorruptionError(
                    f"{self.name} had {self.length} bytes when it was opened and has {inner.length} now",
                    subject=self.name,
                )
            if self._inner is None:
                self._inner = inner
            else:
                inner.close()
                inner = self._inner
        return inner

    def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()


class Blocks:
    """The files of a cache. No error of the directory is raised by `read` and `write`: the store itself has it all."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory: Final = directory
        self.limit: Final = limit
        self._warned = False
        self._stuck = False

    def read(self, key: str, block: memoryview) -> bool:
        """Fills `block`. Returns False where there is no such block, or it is damaged, and then it is gone."""
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                descriptor, digest = file.fileno(), bytearray(_DIGEST)
                whole = os.fstat(descriptor).st_size == len(block) + _DIGEST and _filled(descriptor, block, 0)
                if whole and _filled(descriptor, memoryview(digest), len(block)) and digest == _digest(key, block):
                    os.utime(path)  # fails where another process removes it, and it counts as not found
                    return True
            path.unlink(missing_ok=True)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self._give_up(error)
        return False

    def write(self, key: str, block: memoryview) -> None:
        if self._stuck:
            return
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")
        try:
            if not self._take_room(len(block) + _DIGEST, temporary):
                return
            try:
                with open(temporary, "r+b", buffering=0) as file:
                    for part in (block, memoryview(_digest(key, block))):
                        done = 0
                        while done < len(part):
                            done += file.write(part[done:]) or 0
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
        except FileNotFoundError:
            pass  # another process made room meanwhile
        except BlockingIOError as error:
            self._stuck = True  # another process was stopped while it made room: no further block waits for it
            self._give_up(error)
        except OSError as error:
            self._give_up(error)

    @contextmanager
    def fetching(self, key: str) -> Iterator[None]:
        """Keeps others from fetching the same block meanwhile: processes of this node, and threads."""
        number = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % _LOCKS
        with ExitStack() as held:
            try:
                held.enter_context(self._locked(f"fetch-{number}", FETCH_WAIT_S))
            except BlockingIOError:
                pass  # who has it is stopped, or its read hangs: this one reads for itself
            except OSError as error:
                self._give_up(error)
            yield

    def _take_room(self, nbytes: int, temporary: Path) -> bool:
        """Counts `nbytes` as used, after making room for them. Returns False if they can never fit. `temporary` is made
        with that length at once: whoever makes room next counts what lies there."""
        if nbytes > self.limit:
            return False
        with self._locked("used", ROOM_WAIT_S) as descriptor:
            text = os.pread(descriptor, 32, 0).strip()
            used = int(text) if text.isdigit() else None
            if used is None or used + nbytes > self.limit:
                used = self._evict(min(self.limit - nbytes, int(self.limit * _ROOM)))
            os.pwrite(descriptor, f"{used + nbytes:<31}\n".encode(), 0)
            temporary.parent.mkdir(exist_ok=True)
            with open(temporary, "xb") as file:
                file.truncate(nbytes)
        return True

    def _evict(self, room: int) -> int:
        """Removes the blocks that were not read for longest until at most `room` bytes are used. Returns how many
        are."""
        found: list[tuple[int, int, str]] = []
        for directory in os.scandir(self.directory / "blocks"):
            for entry in os.scandir(directory):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
        used = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if used <= room:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            used -= size
        return used

    @contextmanager
    def _locked(self, name: str, wait_s: float) -> Iterator[int]:
        """Holds an exclusive lock, which ends with its process. Yields the lock file's descriptor. Raises
        BlockingIOError where another process has had it for `wait_s` seconds."""
        path = self.directory / "locks" / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileNotFoundError, NotADirectoryError):
            self._make()
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor, wait_s)
            try:
                yield descriptor
            finally:
                # Closing would not do: a child forked meanwhile has the descriptor too, and would keep the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def _make(self) -> None:
        for part in ("blocks", "locks"):
            try:
                (self.directory / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
                    raise
                raise StoreDenied(
                    f"there can be no cache at {self.directory}: {error.strerror}",
                    subject=str(self.directory),
                    hint=f"{typed('ls', '-ld', self.directory.parent)}  # give one of this node's own",
                ) from error

    def _path(self, key: str) -> Path:
        return self.directory / "blocks" / key[:2] / key

    def _give_up(self, error: OSError) -> None:
        if isinstance(error, StoreError):
            raise error
        if not self._warned:
            self._warned = True
            warn(f"the cache {self.directory} fails ({error.strerror or error}): reads go to the store itself")


def _lock(descriptor: int, wait_s: float) -> None:
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise
        time.sleep(_LOOK_S)


def _digest(key: str, block: memoryview) -> bytes:
    found = xxhash.xxh3_128(key.encode())
    found.update(block)
    return found.digest()


def _filled(descriptor: int, buffer: memoryview, offset: int) -> bool:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True
