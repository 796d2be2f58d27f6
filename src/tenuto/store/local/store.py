"""Objects as files under a directory: on a local disk or a mounted network file system.

A put writes `<name>.tmp-<token>` next to the final path, flushes it, and links it to its final name, which fails if the
name is taken (a rename would silently replace it). Without hard links, `renameat2` with RENAME_NOREPLACE does the same
if it proves to work; without either, puts fail.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

from tenuto.concurrency.interruption import undisturbed
from tenuto.errors import AlreadyExists, ObjectNotFound, StoreError
from tenuto.model.records import Receipt
from tenuto.store.contract import (
    TEMPORARY,
    Capabilities,
    Content,
    Entry,
    Listing,
    Stat,
    check_name,
    check_new_name,
    check_prefix,
    check_token,
    is_leftover,
    is_listable,
)
from tenuto.store.local import os_errors
from tenuto.store.local.directories import Directories, parent
from tenuto.store.local.reader import LocalReader, read_whole
from tenuto.store.local.syscalls import FileSystem, OperatingSystem, Status
from tenuto.store.local.writer import WORTH_DIRECT, FileWriter

_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS})
_RACES: Final = 100

_in_flight: set[str] = set()
_in_flight_lock = threading.Lock()


class LocalStore:
    """A store under the directory `path`, whose symbolic links the caller resolves. The first put makes directories,
    with `create` also the root."""

    def __init__(
        self, path: str | os.PathLike[str], *, filesystem: FileSystem | None = None, create: bool = True
    ) -> None:
        self.root: Final = os.path.abspath(path)
        self.filesystem: Final[FileSystem] = OperatingSystem() if filesystem is None else filesystem
        self._directories: Final = Directories(self.filesystem, self.root, create)
        self._naming: Literal["link", "rename"] | None = "link"
        self._naming_lock: Final = threading.Lock()

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    @property
    def url(self) -> str:
        return self.root

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            commits=self._naming is not None, persistent=self._directories.persistent, views=True, lists_times=True
        )

    def probe(self) -> Capabilities:
        # Without flushes, except for the last: nothing here has to outlive this call.
        name = f"tenuto-probe-{secrets.token_hex(8)}"
        final = self._path(name)
        try:
            self._try_name(final, name, b"1")
            try:
                self._try_name(final, name, b"")
                self._naming = None
            except AlreadyExists:
                if self.stat(name).length == 0:  # replaced all the same
                    self._naming = None
        except StoreError:
            if self._naming is not None:
                raise
        finally:
            self._remove_quietly(final)
        self._directories.flush("", name)
        return self.capabilities

    def _try_name(self, final: str, name: str, content: bytes) -> None:
        temporary = f"{final}{TEMPORARY}probe"
        descriptor = self._create(temporary, "", name)
        try:
            if content:
                with os_errors.translated("writing", temporary, name):
                    self.filesystem.pwrite(descriptor, [memoryview(content)], 0)
            self._give_name(descriptor, temporary, final, name)
        finally:
            self._close_quietly(descriptor)
            self._remove_quietly(temporary)

    # -- putting -----------------------------------------------------------------------------------------------------

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        final = self._path(check_new_name(name))
        # Avoids writing gigabytes in vain; the link below is what decides.
        if content.length >= WORTH_DIRECT and self._exists(final, name):
            raise _already_exists(name, final)
        directory = parent(name)
        with _temporary(f"{final}{TEMPORARY}{check_token(token)}") as temporary:
            descriptor = self._create(temporary, directory, name)
            try:
                self._fill(descriptor, temporary, name, content)
                self._give_name(descriptor, temporary, final, name)
                # Other threads may have pruned the directory, and made it anew, before the temporary lay in it.
                self._directories.settle_name(directory, name)
            finally:
                # The object is durable under its final name, or given up: errors here change neither, and a temporary
                # that stays is listed among the leftovers.
                self._close_quietly(descriptor)
                self._remove_quietly(temporary)
        return Receipt(name, content.length, self.url)

    def _create(self, temporary: str, directory: str, name: str) -> int:
        for _ in range(_RACES):
            self._directories.make(directory)
            try:
                return self.filesystem.create(temporary)
            except FileNotFoundError:
                self._directories.forget(directory)  # another process pruned it
            except FileExistsError:
                # Left by an earlier attempt of this writer. Never continued: its flush may have failed.
                self._remove(temporary, name)
            except OSError as error:
                raise os_errors.meaning(error, "creating", temporary, name) from error
        raise StoreError(f"{temporary} cannot be created: its directory keeps vanishing", subject=name)

    def _fill(self, descriptor: int, temporary: str, name: str, content: Content) -> None:
        writer = FileWriter(self.filesystem, descriptor, temporary, name, content.length)
        writer.start()
        for piece in content.pieces():
            writer.write(piece)
        writer.finish()

    def _give_name(self, descriptor: int, temporary: str, final: str, name: str) -> None:
        if self._naming == "link":
            try:
                self.filesystem.link(temporary, final)
                return
            except FileExistsError:
                if self._is_own_link(descriptor):
                    return
                raise _already_exists(name, final) from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise os_errors.meaning(error, "naming", final, name) from error
            self._naming = self._rename_support()
        if self._naming is None:
            raise StoreError(
                f"{self.root} has neither hard links nor renames that refuse to replace: nothing can be put safely",
                subject=name,
                hint="keep the repository on another file system",
            )
        try:
            self.filesystem.rename_noreplace(temporary, final)
        except FileExistsError:
            raise _already_exists(name, final) from None
        except OSError as error:
            raise os_errors.meaning(error, "naming", final, name) from error

    def _is_own_link(self, descriptor: int) -> bool:
        """Returns whether the existing name is the link just made: a network file system repeats a link whose reply was
        lost and then reports that it exists. Then the new file has two names."""
        try:
            return self.filesystem.fstatus(descriptor).links > 1
        except OSError:
            return False

    def _rename_support(self) -> Literal["rename"] | None:
        """Tests whether a rename refuses to replace here."""
        with self._naming_lock:
            if self._naming != "link":
                return self._naming
            name = f"{self.root}/tenuto-probe-{secrets.token_hex(8)}"
            try:
                for path in (f"{name}{TEMPORARY}1", f"{name}{TEMPORARY}2"):
                    self.filesystem.close(self.filesystem.create(path))
                self.filesystem.rename_noreplace(f"{name}{TEMPORARY}1", name)
                try:
                    self.filesystem.rename_noreplace(f"{name}{TEMPORARY}2", name)
                except FileExistsError:
                    return "rename"
                return None
            except OSError as error:
                if error.errno in os_errors.UNSUPPORTED:
                    return None
                raise os_errors.meaning(error, "naming", name, "") from error
            finally:
                for path in (name, f"{name}{TEMPORARY}1", f"{name}{TEMPORARY}2"):
                    self._remove_quietly(path)

    def _exists(self, final: str, name: str) -> bool:
        try:
            self.filesystem.status(final)
        except OSError as error:
            if error.errno in os_errors.ABSENT:
                return False
            raise os_errors.meaning(error, "looking at", final, name) from error
        return True

    # -- reading -----------------------------------------------------------------------------------------------------

    def open(self, name: str) -> LocalReader:
        path = self._path(check_name(name))
        if not self._directories.are_ours(name):
            raise os_errors.absent(name, path)
        try:
            descriptor = self.filesystem.open(path)
        except OSError as error:
            if error.errno in os_errors.ABSENT | {errno.ENXIO, errno.EISDIR}:
                raise os_errors.absent(name, path) from None
            raise os_errors.meaning(error, "opening", path, name) from error
        try:
            with os_errors.translated("opening", path, name):
                found = self.filesystem.fstatus(descriptor)
            if found.kind != "file":
                raise os_errors.absent(name, path)
        except StoreError:
            self._close_quietly(descriptor)
            raise
        return LocalReader(self.filesystem, descriptor, path, name, found.size, found.modified_ns)

    def get(self, name: str, *, limit: int) -> bytes:
        with self.open(name) as reader:
            return read_whole(reader, limit)

    def stat(self, name: str) -> Stat:
        path = self._path(check_name(name))
        if not self._directories.are_ours(name):
            raise os_errors.absent(name, path)
        try:
            found = self.filesystem.status(path)
        except OSError as error:
            if error.errno in os_errors.ABSENT:
                raise os_errors.absent(name, path) from None
            raise os_errors.meaning(error, "looking at", path, name) from error
        if found.kind != "file":
            raise os_errors.absent(name, path)
        return Stat(found.size, found.modified_ns)

    # -- listing -----------------------------------------------------------------------------------------------------

    def children(self, prefix: str, *, after: str = "") -> Listing:
        directories, files = self._level(prefix) if self._is_reachable(check_prefix(prefix)) else ([], [])
        found = Listing(tuple(directories), tuple(file for file in files if not is_leftover(file)))
        return found.behind(after) if after else found

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        return (entry for entry in self._files(prefix) if leftovers or not is_leftover(entry.name))

    def _files(self, prefix: str) -> Iterator[Entry]:
        """Yields the regular files below `prefix`, sorted by full name. Not recursive: foreign trees may be deep."""
        waiting = [f"{check_prefix(prefix)}/"] if prefix else [""]
        if not self._is_reachable(prefix):
            return
        while waiting:
            place = waiting.pop()
            if place and not place.endswith("/"):
                if (found := self._status(place)) is not None:
                    yield Entry(place, found.size, found.modified_ns)
                continue
            directories, files = self._level(place.rstrip("/"))
            below = [f"{place}{directory}/" for directory in directories]
            below += [f"{place}{file}" for file in files]
            waiting += sorted(below, reverse=True)

    def _is_reachable(self, prefix: str) -> bool:
        return not prefix or self._directories.are_ours(f"{prefix}/")

    def _status(self, name: str) -> Status | None:
        """Returns what is known of a file, None if it vanished since it was listed."""
        try:
            found = self.filesystem.status(self._path(name))
        except OSError as error:
            if error.errno in os_errors.ABSENT:
                return None
            raise os_errors.meaning(error, "looking at", self._path(name), name) from error
        return found if found.kind == "file" else None

    def _level(self, prefix: str) -> tuple[list[str], list[str]]:
        """Returns directories and files (with leftovers) directly below `prefix`, each sorted."""
        path = self._path(prefix)
        try:
            found = self.filesystem.listdir(path)
        except OSError as error:
            if error.errno in os_errors.ABSENT:
                return [], []
            raise os_errors.meaning(error, "listing", path, prefix) from error
        directories = sorted(name for name, kind in found if kind == "directory" and is_listable(name))
        return directories, sorted(name for name, kind in found if kind == "file" and is_listable(name))

    # -- removing and flushing -----------------------------------------------------------------------------------------

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        touched: dict[str, None] = {}
        for name in [check_name(name) for name in names]:
            if self._directories.are_ours(name):
                self._remove(self._path(name), name)
                touched[parent(name)] = None
        for directory in touched:
            self._directories.flush(directory, directory)
        for directory in touched:
            self._directories.prune(directory)

    def settle(self, name: str) -> None:
        try:
            with self.open(name) as reader:
                try:
                    self.filesystem.fsync(reader.descriptor)
                except OSError as error:
                    raise os_errors.unflushed(error, reader.path, name) from error
        except ObjectNotFound:
            if not self._directories.are_ours(name):
                return
        self._directories.settle(parent(name), name)

    def free_bytes(self) -> int | None:
        path = self.root
        while True:
            try:
                return self.filesystem.free_bytes(path)
            except FileNotFoundError:
                if path == "/":
                    return None
                path = path.rpartition("/")[0] or "/"
            except OSError as error:
                raise os_errors.meaning(error, "measuring", path, path) from error

    def close(self) -> None:
        """Does nothing: nothing is open."""

    def _path(self, name: str) -> str:
        return self._directories.path(name)

    def _remove(self, path: str, name: str) -> None:
        try:
            self.filesystem.unlink(path)
        except OSError as error:
            if error.errno not in os_errors.ABSENT:
                raise os_errors.meaning(error, "removing", path, name) from error

    def _remove_quietly(self, path: str) -> None:
        try:
            self.filesystem.unlink(path)
        except OSError:
            pass

    def _close_quietly(self, descriptor: int) -> None:
        try:
            self.filesystem.close(descriptor)
        except OSError:
            pass


def _already_exists(name: str, path: str) -> AlreadyExists:
    return AlreadyExists(f"{name} exists already ({path})", subject=name)


@contextmanager
def _temporary(wanted: str) -> Iterator[str]:
    """Yields a temporary path that no other put of this process uses.

    Otherwise two threads that put one name with one token would remove each other's file, and a half-written one could
    get the final name.
    """
    path, count = wanted, 1
    try:
        # A signal that comes here waits: what it saves is written by other threads, which need the lock.
        with undisturbed, _in_flight_lock:
            while path in _in_flight:
                count += 1
                path = f"{wanted}-{count}"
            _in_flight.add(path)
        yield path
    finally:
        with undisturbed, _in_flight_lock:
            _in_flight.discard(path)
