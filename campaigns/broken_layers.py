"""File systems that leave out, reorder or falsify calls: the seeded protocol bugs below the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tenuto.store.contract import TEMPORARY
from tenuto.store.local.syscalls import FileSystem
from tenuto.testing.layers import Layer

R = TypeVar("R")


def parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


class SkipFileFlush(Layer):
    """fsync of files whose path contains `part` does nothing."""

    def __init__(self, inner: FileSystem, part: str = "") -> None:
        super().__init__(inner)
        self.part = part

    def fsync(self, descriptor: int) -> None:
        if self.part not in self.path_of(descriptor):
            super().fsync(descriptor)


class SkipDirectoryFlush(Layer):
    """fsync of a directory does nothing if `chosen(path, what was done last in it)` says so.

    What was done last: the call and the name, such as ("link", "manifest.json"), or ("", "").
    """

    def __init__(self, inner: FileSystem, chosen: Callable[[str, tuple[str, str]], bool]) -> None:
        super().__init__(inner)
        self.chosen = chosen
        self.last: dict[str, tuple[str, str]] = {}

    def around(self, call: str, path: str, act: Callable[[], R]) -> R:
        result = act()
        if call in ("create", "link", "unlink", "mkdir", "rmdir", "rename_noreplace"):
            self.last[parent(path)] = (call, path.rpartition("/")[2])
        return result

    def fsync_directory(self, path: str) -> None:
        if not self.chosen(path, self.last.get(path, ("", ""))):
            super().fsync_directory(path)


class FlushBeforeLink(Layer):
    """The directory is flushed before the file gets its name, and not after."""

    def link(self, source: str, target: str) -> None:
        super().fsync_directory(parent(target))
        super().link(source, target)
        self._linked = parent(target)

    def fsync_directory(self, path: str) -> None:
        if path != getattr(self, "_linked", None):
            super().fsync_directory(path)
        self._linked = ""


class LinkBeforeFlush(Layer):
    """The file's data is flushed only when its name is durable."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self._owed: list[int] = []

    def fsync(self, descriptor: int) -> None:
        self._owed.append(descriptor)

    def fsync_directory(self, path: str) -> None:
        super().fsync_directory(path)
        owed, self._owed = self._owed, []
        for descriptor in owed:
            super().fsync(descriptor)

    def close(self, descriptor: int) -> None:
        if descriptor in self._owed:
            self._owed.remove(descriptor)
            super().fsync(descriptor)
        super().close(descriptor)


class RenameForLink(Layer):
    """The file gets its name by a rename, which replaces what is there. The probe, which would find that out, is made
    with links."""

    def link(self, source: str, target: str) -> None:
        if "probe" in target:
            super().link(source, target)
        else:
            self.rename(source, target)

    def unlink(self, path: str) -> None:
        if TEMPORARY in path:
            try:
                super().unlink(path)
            except FileNotFoundError:
                return
        else:
            super().unlink(path)


class SharedTemporary(Layer):
    """All temporaries of a directory have one name, and what is found under it is written over."""

    def _shared(self, path: str) -> str:
        return f"{parent(path)}/put{TEMPORARY}0" if TEMPORARY in path else path

    def create(self, path: str, *, direct: bool = False) -> int:
        try:
            return super().create(self._shared(path), direct=direct)
        except FileExistsError:
            return self.reopen(self._shared(path))

    def link(self, source: str, target: str) -> None:
        super().link(self._shared(source), target)

    def unlink(self, path: str) -> None:
        super().unlink(self._shared(path))


class WriteInPlace(Layer):
    """No temporary: the file is written under its final name, over whatever is there. The probe is made as always."""

    def create(self, path: str, *, direct: bool = False) -> int:
        if "probe" in path:
            return super().create(path, direct=direct)
        final = path.partition(TEMPORARY)[0]
        try:
            return super().create(final, direct=direct)
        except FileExistsError:
            return self.reopen(final)

    def link(self, source: str, target: str) -> None:
        if "probe" in target:
            super().link(source, target)

    def unlink(self, path: str) -> None:
        if "probe" in path or TEMPORARY not in path:
            super().unlink(path)


class CutAfterFlush(Layer):
    """The padded tail is cut only after the flush."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self._cuts: dict[int, int] = {}

    def truncate(self, descriptor: int, length: int) -> None:
        self._cuts[descriptor] = length

    def fsync(self, descriptor: int) -> None:
        super().fsync(descriptor)
        if descriptor in self._cuts:
            super().truncate(descriptor, self._cuts.pop(descriptor))


class NeverCut(Layer):
    """The padding at the end of a direct write stays."""

    def truncate(self, descriptor: int, length: int) -> None:
        pass


class RetryFlush(Layer):
    """A flush that failed is tried again, and counts if that succeeds."""

    def fsync(self, descriptor: int) -> None:
        try:
            super().fsync(descriptor)
        except OSError:
            super().fsync(descriptor)

    def fsync_directory(self, path: str) -> None:
        try:
            super().fsync_directory(path)
        except OSError:
            super().fsync_directory(path)


class IgnoreFlushError(Layer):
    """A flush that failed counts as done."""

    def fsync(self, descriptor: int) -> None:
        try:
            super().fsync(descriptor)
        except OSError:
            return


class TakeShortWritesForWhole(Layer):
    """What a short write left out is never written."""

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        super().pwrite(descriptor, buffers, offset)
        return sum(buffer.nbytes for buffer in buffers)
