"""The directories of a local store: made, flushed, pruned.

An object is durable only if every directory on its path is: the entry of each in its parent must be flushed, even if an
earlier process made the directory and died before its flush. Each directory is settled once per process and remembered,
so a put into a known directory costs no call here. One that is new is flushed together with the first name in it: the
object counts only once both are durable, and one commit of the journal serves both. Directories have names relative to
the root of the store; the root is "".
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tenuto.concurrency.worker_threads import BackgroundWork, foreground_threads
from tenuto.errors import StoreError, typed
from tenuto.store.local import os_errors
from tenuto.store.local.syscalls import FileSystem, Kind, OperatingSystem

_RACES: Final = 100
"""The number of times a directory may vanish between being made and used before that is an error."""


@dataclass(frozen=True)
class _Flush:
    """A directory to flush. `optional`: nothing is wrong where that is not permitted."""

    path: str
    optional: bool = False


@dataclass
class Directories:
    filesystem: FileSystem
    root: str
    create: bool
    """Whether to make the root."""
    persistent: bool = True
    """False once the file system refused to flush a directory."""
    _root_seen: bool = False
    _settled: set[str] = field(default_factory=set)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def are_ours(self, name: str) -> bool:
        """Returns False if the path of `name` runs through a symbolic link or a file: what is there is foreign."""
        for directory in _chain(parent(name)):
            if directory:
                try:
                    if self.filesystem.status(self.path(directory)).kind != "directory":
                        return False
                except OSError as error:
                    if error.errno in os_errors.ABSENT:
                        return True  # nothing is reachable through it, as the caller will find out
                    raise os_errors.meaning(error, "looking at", self.path(directory), name) from error
        return True

    def make(self, directory: str) -> None:
        """Makes `directory` and its parents, if this process has not settled them before; `settle_name` makes what is
        put there durable."""
        if directory in self._settled:
            return
        with self._lock:
            self._made_of(directory, lambda fresh: [list(self._make(ancestor)) for ancestor in fresh])

    def settle_name(self, directory: str, subject: str) -> None:
        """Makes the contents of `directory` durable, and the directory itself, which is made anew if it has vanished
        and was not settled. Raises StoreError if one that was settled is gone."""
        if directory in self._settled:
            self.flush_present(directory, subject)
            return

        def settle(fresh: list[str]) -> None:
            made = [flush for ancestor in fresh for flush in self._make(ancestor)]
            self._flush_all([*made, _Flush(self.path(directory))], subject)
            self._settled.update(fresh)

        # Locked across the flushes, and by `prune`: no thread may see a directory as settled that was made anew since.
        with self._lock:
            self._made_of(directory, settle)

    def _made_of(self, directory: str, make: Callable[[list[str]], object]) -> None:
        """Calls `make` with the directories down to this one that are not settled, until none vanishes meanwhile."""
        for _ in range(_RACES):
            try:
                make([ancestor for ancestor in _chain(directory) if ancestor not in self._settled])
                return
            except FileNotFoundError as error:
                if isinstance(error, StoreError):
                    raise
                self.forget(directory)
        raise StoreError(f"{self.path(directory)} keeps vanishing while objects are put there", subject=directory)

    def forget(self, directory: str) -> None:
        """Unsettles `directory` and its parents, after it was found missing."""
        with self._lock:
            self._settled.difference_update(_chain(directory))

    def _make(self, directory: str) -> list[_Flush]:
        """Makes one directory and returns what makes it durable. Lets FileNotFoundError pass: an ancestor has
        vanished."""
        path = self.path(directory)
        if not directory:
            return self._make_root()
        try:
            self.filesystem.mkdir(path)
        except FileExistsError:
            if self._kind(path, directory) != "directory":
                raise StoreError(
                    f"{path} is in the way: a symbolic link or a file where a directory belongs",
                    subject=directory,
                    hint=f"move {path} away; Tenuto follows no symbolic links inside a repository",
                ) from None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise os_errors.meaning(error, "making", path, directory) from error
        return [_Flush(self.path(parent(directory)))]

    def _kind(self, path: str, subject: str) -> Kind:
        """Returns the kind of `path`. Lets FileNotFoundError pass: another process pruned it in between."""
        try:
            return self.filesystem.status(path).kind
        except FileNotFoundError:
            raise
        except OSError as error:
            raise os_errors.meaning(error, "looking at", path, subject) from error

    def _make_root(self) -> list[_Flush]:
        made = self._make_above(self.root) if self._absent(self.root) else set()
        self._root_seen = True
        # A dead process may have made any directory above the root just before the power failed. Those made here must
        # be flushed; the others where permitted: one we may not open has been there for long.
        path, flushes = self.root, []
        while (above := path.rpartition("/")[0] or "/") != path:
            flushes.append(_Flush(above, optional=path not in made))
            path = above
        return flushes

    def _flush_all(self, flushes: list[_Flush], subject: str) -> None:
        """Flushes directories, at the same time where the file system is a real one: it then serves them with one
        commit of its journal instead of one for each."""

        def flush(what: _Flush) -> None:
            if not what.optional:
                self._flush_one(what.path, subject)
                return
            try:
                self.filesystem.fsync_directory(what.path)
            except OSError as error:
                if error.errno not in os_errors.DENIED | os_errors.ABSENT | os_errors.UNSUPPORTED:
                    raise os_errors.unflushed(error, what.path, subject) from error

        if not isinstance(self.filesystem, OperatingSystem):
            for what in flushes:
                flush(what)
            return
        failed: list[BaseException] = []

        def attempt(what: _Flush) -> None:
            try:
                flush(what)
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        # Daemon threads: a store that hangs does not keep the process from ending.
        works = [work for what in flushes[1:] if (work := _in_background(partial(attempt, what))) is not None]
        for what in flushes[:1]:
            attempt(what)
        for work in works:
            work.join()
        if failed:
            raise failed[0]

    def _absent(self, path: str) -> bool:
        try:
            self.filesystem.status(path)
        except FileNotFoundError:
            if self._root_seen:
                # Made anew, it might be on the disk below an unmounted file system.
                raise StoreError(
                    f"{path} has vanished", subject=path, hint="is its file system still mounted?"
                ) from None
            if self.create:
                return True
            raise StoreError(f"there is no directory {path}", subject=path, hint=typed("mkdir", "-p", path)) from None
        except OSError as error:
            raise os_errors.meaning(error, "looking at", path, path) from error
        return False

    def _make_above(self, path: str) -> set[str]:
        """Makes `path` and its missing parents. Returns those that were missing."""
        made: set[str] = set()
        missing = [path]
        while missing:
            above = missing[-1].rpartition("/")[0]
            try:
                self.filesystem.mkdir(missing[-1])
                made.add(missing.pop())
            except FileExistsError:
                made.add(missing.pop())  # by another process, a moment ago
            except FileNotFoundError as error:
                if not above or above in made:
                    raise StoreError(
                        f"{missing[-1]} cannot be made: {above or '/'} is there, and no directory that takes one",
                        subject=path,
                        hint=f"is it no place for files, or not mounted? {typed('ls', '-ld', above or '/')}",
                    ) from error
                missing.append(above)
            except OSError as error:
                raise os_errors.meaning(error, "making", missing[-1], path) from error
        return made

    def flush(self, directory: str, subject: str) -> None:
        """Flushes the contents of `directory`; if it is gone, its absence."""
        while True:
            try:
                self._flush_one(self.path(directory), subject)
                return
            except (FileNotFoundError, NotADirectoryError) as error:
                if isinstance(error, StoreError):
                    raise
                if not directory:
                    return  # no root, so nothing below it can reappear
                directory = parent(directory)

    def flush_present(self, directory: str, subject: str) -> None:
        """Flushes the contents of `directory`. Raises StoreError if it is gone."""
        try:
            self._flush_one(self.path(directory), subject)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise os_errors.meaning(error, "flushing", self.path(directory), subject) from error

    def settle(self, directory: str, subject: str) -> None:
        """Flushes the contents of `directory` and its presence, or its absence. Makes no directory. The caller has
        checked `are_ours`."""
        self.flush(directory, subject)
        with self._lock:
            for ancestor in _chain(directory):
                if ancestor in self._settled:
                    continue
                try:
                    if ancestor:
                        self.filesystem.status(self.path(ancestor))
                        self._flush_one(self.path(parent(ancestor)), subject)
                    elif not self._root_settled():
                        return
                except (FileNotFoundError, NotADirectoryError) as error:
                    if isinstance(error, StoreError):
                        raise
                    return
                except StoreError:
                    raise
                except OSError as error:
                    raise os_errors.meaning(error, "looking at", self.path(ancestor), subject) from error
                self._settled.add(ancestor)

    def _root_settled(self) -> bool:
        try:
            self.filesystem.status(self.root)
        except FileNotFoundError:
            return False
        self._flush_all(self._make_root(), "")
        return True

    def prune(self, directory: str) -> None:
        """Removes `directory` and its parents while they are empty; never the root or its direct children."""
        while parent(directory):
            with self._lock:
                try:
                    self.filesystem.rmdir(self.path(directory))
                except FileNotFoundError:
                    pass
                except OSError:
                    # Not empty, a race, or not permitted: an empty directory that stays does no harm.
                    return
                self._settled.discard(directory)
            directory = parent(directory)

    def _flush_one(self, path: str, subject: str) -> None:
        """Flushes one directory. Lets FileNotFoundError and NotADirectoryError pass: the callers interpret them."""
        try:
            self.filesystem.fsync_directory(path)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            if error.errno in os_errors.UNSUPPORTED:
                self.persistent = False  # reported by `capabilities`: this place cannot promise more
                return
            if error.errno in os_errors.DENIED or error.errno == errno.ELOOP:
                raise os_errors.meaning(error, "opening", path, subject) from error
            raise os_errors.unflushed(error, path, subject) from error


def _in_background(work: Callable[[], None]) -> BackgroundWork | None:
    """Runs `work` on another thread, or here where none can be started: at the end of the interpreter, for instance."""
    try:
        return foreground_threads.submit(work, "tenuto-flush")
    except RuntimeError:
        work()
        return None


def parent(name: str) -> str:
    return name.rpartition("/")[0]


def _chain(directory: str) -> Iterator[str]:
    """Yields the root and all directories down to `directory`."""
    yield ""
    end = 0
    while directory and end != -1:
        end = directory.find("/", end + 1)
        yield directory if end == -1 else directory[:end]
