"""What stores over file systems on a network have in common: how they list, and the bytes of a put."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Final

from tenuto.errors import ObjectNotFound, StoreError
from tenuto.record import record
from tenuto.store.base import BaseStore
from tenuto.store.contract import Content, Entry, Listing, check_prefix, is_leftover, is_listable

STRIDE: Final = 4 << 20
"""The longest piece that is handed to a client at once: it copies each."""


@record
class Node:
    """What a directory has under one name."""

    segment: str
    is_directory: bool
    length: int = 0
    modified_ns: int | None = None


class TreeStore(BaseStore):
    """A store whose names are paths of files."""

    @abstractmethod
    def list_directory(self, directory: str) -> Iterable[Node]:
        """Lists one directory, in any order. Raises ObjectNotFound if it is none."""

    def _nodes(self, directory: str) -> list[Node]:
        """Lists a directory in the order of the full names below it; nothing if it is none."""
        try:
            found = [node for node in self.list_directory(directory) if is_listable(node.segment)]
        except ObjectNotFound:
            return []
        return sorted(found, key=lambda node: f"{node.segment}/" if node.is_directory else node.segment)

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        for node in self._nodes(check_prefix(prefix)):
            name = f"{prefix}/{node.segment}" if prefix else node.segment
            if node.is_directory:
                yield from self.walk(name, leftovers=leftovers)
            elif leftovers or not is_leftover(name):
                yield Entry(name, node.length, node.modified_ns)

    def children(self, prefix: str, *, after: str = "") -> Listing:
        found = self._nodes(check_prefix(prefix))
        return Listing(
            tuple(sorted(node.segment for node in found if node.is_directory)),
            tuple(sorted(node.segment for node in found if not node.is_directory and not is_leftover(node.segment))),
        ).behind(after)


def strides(name: str, content: Content) -> Iterator[memoryview]:
    """Yields the bytes of a content in pieces of bounded length. Raises StoreError once there are more or fewer than
    announced."""
    given = 0
    for whole in content.pieces():
        piece = whole.cast("B") if whole.itemsize != 1 or whole.ndim != 1 else whole
        given += len(piece)
        if given > content.length:
            break
        for start in range(0, len(piece), STRIDE):
            yield piece[start : start + STRIDE]
    if given != content.length:
        raise StoreError(f"{name} was announced with {content.length} bytes and has another length", subject=name)
