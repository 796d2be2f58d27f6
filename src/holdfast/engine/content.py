"""A pack as the content of a put: a window of the image that may still be filling up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from holdfast.errors import DeadlineExceeded, HoldfastError
from holdfast.image.layout import PackPlan

FIRST_PIECE_BYTES = 4 << 20
LAST_PIECE_BYTES = 64 << 20
"""Pieces double from the one to the other: the writer begins early, and large writes reach the disk's full speed."""
CAPTURE_DEADLINE_S = 600.0


class Filling:
    """How far an image is filled; set by the capturing thread, awaited by the writing one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._filled = 0
        self._failure: HoldfastError | None = None

    def advance(self, filled: int) -> None:
        with self._changed:
            self._filled = filled
            self._changed.notify_all()

    def fail(self, failure: HoldfastError) -> None:
        """The capture broke off: whoever waits gets `failure`."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def wait(self, position: int) -> None:
        """Returns when the image is filled up to `position`."""
        with self._changed:
            reached = self._changed.wait_for(
                lambda: self._failure is not None or self._filled >= position, CAPTURE_DEADLINE_S
            )
            if self._failure is not None:
                raise self._failure
            if not reached:
                raise DeadlineExceeded(
                    f"the capture did not go beyond byte {self._filled} of the image within {CAPTURE_DEADLINE_S:g} s"
                )


class PackContent:
    """One pack of an image. `before_piece(end)` is called with the image position up to which bytes are about to go
    out."""

    def __init__(
        self,
        plan: PackPlan,
        image: memoryview,
        filling: Filling,
        before_piece: Callable[[int], None] | None = None,
    ) -> None:
        self._plan = plan
        self._image = image
        self._filling = filling
        self._before_piece = before_piece

    @property
    def length(self) -> int:
        return self._plan.length

    def pieces(self) -> Iterator[memoryview]:
        begin, stop = self._plan.start, self._plan.start + self._plan.length
        size = FIRST_PIECE_BYTES
        while begin < stop:
            end = min(begin + size, stop)
            self._filling.wait(end)
            if self._before_piece is not None:
                self._before_piece(end)
            yield self._image[begin:end]
            begin, size = end, min(size * 2, LAST_PIECE_BYTES)
