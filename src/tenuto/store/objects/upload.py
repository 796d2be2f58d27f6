"""The bytes of a put, copied out of a content's pieces: one object's, or part by part with few of them in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from tenuto.errors import StoreError
from tenuto.store.contract import Content

PART: Final = 16 << 20
"""Of a multipart upload. With `AT_ONCE`, what an upload takes of memory: one part more, which is being filled."""
AT_ONCE: Final = 4
_MOST_PARTS: Final = 10_000
_MIB: Final = 1 << 20


def part_length(length: int, part: int = PART) -> int:
    """Returns how long the parts of an object are: services take 10,000 of them."""
    return max(part, -(-length // _MOST_PARTS // _MIB) * _MIB)


class Parts:
    """The parts of `content`, each in memory of its own: a piece is valid only until the next is asked for.

    Iterated once, by the client, which aborts the upload if that raises. `failed` is what was raised: the client may
    fail too while it aborts, and then raises that.
    """

    def __init__(self, name: str, content: Content, part: int) -> None:
        self.failed: BaseException | None = None
        self._parts = self._cut(name, content, part)

    def __iter__(self) -> Parts:
        return self

    def __next__(self) -> memoryview:
        try:
            return next(self._parts)
        except StopIteration:
            raise
        except BaseException as error:
            self.failed = error
            raise

    @staticmethod
    def _cut(name: str, content: Content, length: int) -> Iterator[memoryview]:
        given = filled = 0
        part = memoryview(b"")
        for whole in content.pieces():
            piece = whole.cast("B") if whole.itemsize != 1 or whole.ndim != 1 else whole
            given += len(piece)
            if given > content.length:
                raise _of_another_length(name, content.length, f"more than {content.length}")
            while len(piece):
                if not filled:  # anew: the client still sends the last one
                    part = np.empty(min(length, content.length - given + len(piece)), np.uint8).data
                taken = min(len(piece), len(part) - filled)
                part[filled : filled + taken] = piece[:taken]
                piece = piece[taken:]
                filled += taken
                if filled == len(part):
                    yield part
                    filled = 0
        if given < content.length:
            raise _of_another_length(name, content.length, str(given))
        if filled:
            yield part[:filled]


def gathered(name: str, content: Content) -> bytes | memoryview:
    """Returns the bytes of a small object. Raises StoreError if there are not as many as announced."""
    return next(iter(list(Parts(name, content, content.length))), b"")


def _of_another_length(name: str, announced: int, has: str) -> StoreError:
    return StoreError(f"{name} was announced with {announced} bytes and has {has}", subject=name)
