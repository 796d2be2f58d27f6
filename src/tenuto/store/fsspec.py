"""Files of any file system that fsspec knows, below a directory.

An object is written under a temporary name and renamed. fsspec does not say what a rename onto a name that is taken
does, so the probe tries it: where it is refused the store commits, elsewhere it holds data and copies. No call of
fsspec flushes, so nothing here is known to survive power loss.
"""

from __future__ import annotations

import errno
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import fsspec

from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    MissingExtra,
    ObjectNotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TenutoError,
    UsageError,
)
from tenuto.model.records import Receipt
from tenuto.store.base import BaseReader
from tenuto.store.contract import (
    TEMPORARY,
    Bytes,
    Capabilities,
    Content,
    Stat,
    check_name,
    check_new_name,
    check_prefix,
    check_token,
)
from tenuto.store.trees import Node, TreeStore, strides

PREFIX: Final = "fsspec+"
"""Stands before a protocol of fsspec's, also before one that has a store of ours."""
Result = TypeVar("Result")


def knows(protocol: str) -> bool:
    """Returns whether fsspec serves a protocol, once what it needs is installed."""
    return protocol in fsspec.available_protocols()


def open_url(url: str) -> FsspecStore:
    """Opens the store of a URL, which may begin with `PREFIX`. Raises UsageError for one that names none, and
    MissingExtra if the protocol needs a package that is not there."""
    scheme, _, rest = url.partition("://")
    protocol = scheme.lower().removeprefix(PREFIX)
    place, _, path = rest.partition("/")
    if "?" in rest or "#" in rest or ":" in place.rpartition("@")[0]:
        raise UsageError(
            f"a {protocol}:// URL of checkpoints has a path and nothing behind it, and no password",
            subject=f"{protocol}://",
            hint="give options and credentials to fsspec by its configuration: ~/.config/fsspec/*.json or FSSPEC_*",
        )
    try:
        check_prefix(path.strip("/"))
    except StoreError:
        path = ""
    if not (place + path).strip("/"):
        raise UsageError(f"{url} names no directory", subject=url, hint=f"write {protocol}://HOST/the/directory")
    try:
        filesystem, root = fsspec.core.url_to_fs(f"{protocol}://{rest}", skip_instance_cache=True)
    except ImportError as error:
        raise MissingExtra(
            f"{protocol}:// needs a package more: {error}",
            subject=f"{protocol}://",
            hint="install the package that fsspec names",
        ) from None
    except ValueError:
        raise UsageError(
            f"fsspec knows no {protocol}://, or not this URL",
            subject=f"{protocol}://",
            hint="`python -c 'import fsspec; print(fsspec.available_protocols())'` shows what it knows",
        ) from None
    except Exception as error:  # noqa: BLE001 - some connect at once, and raise whatever their library does
        raise _unknown(error, "opening", "", f"{protocol}://{rest}") from None
    return FsspecStore(f"{PREFIX}{protocol}://{rest.rstrip('/')}", filesystem, root.rstrip("/"))


class FsspecStore(TreeStore):
    """The files of an fsspec file system below `root`."""

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self._url: Final = url
        self._filesystem: Final = filesystem
        self._root: Final = root
        self._commits = False
        self._lock: Final = threading.RLock()

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            commits=self._commits, persistent=False, part_bytes=8 << 20, parallel=8 if self._is_thread_safe else 1
        )

    @property
    def _is_thread_safe(self) -> bool:
        return bool(getattr(self._filesystem, "async_impl", False))

    def probe(self) -> Capabilities:
        """Renames a file onto another: most file systems replace it, and some refuse."""
        name = f"tenuto-probe-{secrets.token_hex(8)}"
        files = (name, f"{name}{TEMPORARY}1", f"{name}{TEMPORARY}2")
        try:
            for file, data in zip(files[1:], (b"first", b"second"), strict=True):
                self._write(file, name, Bytes(data))
                with suppress(StoreError):  # refused, or it cannot rename at all: what lies there now says which
                    self._do("renaming", name, self._filesystem.mv, self._path(file), self._path(name))
            self._commits = self._length(name) == len(b"first")
        finally:
            self.delete(files)
        return self.capabilities

    def _do(self, doing: str, name: str, call: Callable[..., Result], *arguments: object, **options: object) -> Result:
        """Calls the file system; one thread at a time, unless it is made for several."""
        with self._translated(doing, name):
            if self._is_thread_safe:
                return call(*arguments, **options)
            with self._lock:
                return call(*arguments, **options)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    # -- putting -----------------------------------------------------------------------------------------------------

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        check_new_name(name)
        check_token(token)
        if self._length(name) is not None:
            raise self._exists(name)
        temporary = f"{name}{TEMPORARY}{token}-{secrets.token_hex(4)}"
        try:
            self._write(temporary, name, content)
            self._rename(temporary, name)
        except BaseException:
            with suppress(StoreError):  # the put's own error counts; what stays behind is a leftover, for gc
                self.delete([temporary])
            raise
        if self._length(name) != content.length:
            raise StoreUnavailable(f"{name} is not whole after its put ({self.url})", subject=name)
        return Receipt(name, content.length, self.url)

    def _write(self, file: str, name: str, content: Content) -> None:
        path = self._path(file)
        self._do("putting", name, self._filesystem.makedirs, path.rpartition("/")[0], exist_ok=True)
        stream = self._do("putting", name, self._filesystem.open, path, "wb")
        try:
            for piece in strides(name, content):
                self._do("putting", name, stream.write, bytes(piece))  # a copy: some keep what they get
        finally:
            self._do("putting", name, stream.close)

    def _rename(self, temporary: str, name: str) -> None:
        try:
            self._do("renaming", name, self._filesystem.mv, self._path(temporary), self._path(name))
        except StoreError:
            if self._length(temporary) is None or self._length(name) is None:
                raise
        if self._length(temporary) is not None:  # refused, which some do without an error
            raise self._exists(name)

    def _length(self, name: str) -> int | None:
        """Returns the length of a file; None if there is none."""
        try:
            found = self._do("looking at", name, self._info, name)
        except ObjectNotFound:
            return None
        return None if found["type"] == "directory" else int(found["size"])

    def _info(self, name: str) -> dict[str, Any]:
        self._filesystem.invalidate_cache()
        found: dict[str, Any] = self._filesystem.info(self._path(name))
        return found

    def _exists(self, name: str) -> AlreadyExists:
        return AlreadyExists(f"{name} exists already ({self.url})", subject=name)

    # -- reading and listing -----------------------------------------------------------------------------------------

    def open(self, name: str) -> FsspecReader:
        length = self._length(check_name(name))
        if length is None:
            raise self._absent(name)
        return FsspecReader(self, name, length)

    def stat(self, name: str) -> Stat:
        length = self._length(check_name(name))
        if length is None:
            raise self._absent(name)
        modified = self._do("looking at", name, self._filesystem.modified, self._path(name))
        return Stat(length, int(modified.timestamp()) * 1_000_000_000 + modified.microsecond * 1000)

    def fetch(self, name: str, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        data = self._do("reading", name, self._filesystem.cat_file, self._path(name), offset, end)
        if len(data) != len(buffer):
            raise CorruptionError(f"{name} is shorter than when it was opened", subject=f"{name}@{offset}")
        buffer[:] = data

    def list_directory(self, directory: str) -> Iterable[Node]:
        path = self._path(directory)

        def listed() -> list[dict[str, Any]]:
            self._filesystem.invalidate_cache()
            found: list[dict[str, Any]] = self._filesystem.ls(path, detail=True)
            return found

        for found in self._do("listing", directory, listed):
            if (name := found["name"].strip("/")) != path.strip("/"):  # a file lists itself
                yield Node(name.rpartition("/")[2], found["type"] == "directory", int(found["size"] or 0))

    # -- removing ----------------------------------------------------------------------------------------------------

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        """Removes objects, and the directories that are empty then, but never the root's own."""
        emptied: dict[str, None] = {}
        for name in [check_name(name) for name in names]:
            if self._length(name) is not None:
                with suppress(ObjectNotFound):
                    self._do("removing", name, self._filesystem.rm_file, self._path(name))
                emptied[name.rpartition("/")[0]] = None
        for directory in sorted(emptied, key=len, reverse=True):
            while "/" in directory and not self._nodes(directory):
                with suppress(StoreError):  # a race: an empty directory that stays does no harm
                    self._do("removing", directory, self._remove_directory, self._path(directory))
                directory = directory.rpartition("/")[0]  # noqa: PLW2901 - upwards, while they are empty

    def _remove_directory(self, path: str) -> None:
        """Removes an empty directory. WebHDFS has no `rmdir` of its own, and removes one as it removes a file; it
        refuses where the directory is not empty."""
        webhdfs = "webhdfs" in self._filesystem.protocol
        (self._filesystem.rm if webhdfs else self._filesystem.rmdir)(path)

    # -- errors ------------------------------------------------------------------------------------------------------

    def _absent(self, name: str) -> ObjectNotFound:
        return ObjectNotFound(f"there is no object {name} ({self.url})", subject=name)

    @contextmanager
    def _translated(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except TenutoError:
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            if doing == "putting":
                raise _unknown(error, doing, name, self.url) from None
            raise self._absent(name) from None
        except FileExistsError:
            raise self._exists(name) from None
        except PermissionError:
            raise StoreDenied(
                f"{doing} {name} at {self.url}: permission denied",
                subject=name,
                hint="give credentials to fsspec by its configuration: ~/.config/fsspec/*.json or FSSPEC_*",
            ) from None
        except Exception as error:  # noqa: BLE001 - each file system raises what its own library does
            raise _unknown(error, doing, name, self.url) from None


class FsspecReader(BaseReader):
    """Reads ranges of a file. Nothing is kept open."""

    def __init__(self, store: FsspecStore, name: str, length: int) -> None:
        super().__init__(name, length)
        self._store = store

    def fetch(self, offset: int, buffer: memoryview) -> None:
        self._store.fetch(self.name, offset, buffer)


def _unknown(error: Exception, doing: str, name: str, url: str) -> StoreError:
    """What an error of a file system's library means. Its text may hold a signed URL or a password: only its kind is
    repeated, and what the operating system says."""
    says = (isinstance(error, OSError) and error.strerror) or type(error).__name__
    what = f"{doing} {name} at {url}: {says}".replace("  ", " ")
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(what, subject=name or url, hint="make room there")
    if isinstance(error, NotImplementedError):
        return StoreError(f"{what}: this file system cannot do it", subject=name or url, hint="use another place")
    if isinstance(error, (OSError, EOFError)) and not isinstance(error, (IsADirectoryError, NotADirectoryError)):
        return StoreUnavailable(what, subject=name or url, hint="check the URL, and that its server runs")
    return StoreError(what, subject=name or url)
