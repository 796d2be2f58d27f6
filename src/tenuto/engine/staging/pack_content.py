"""A pack as the content of a put: a part of an image that may still be filling up, and be overwritten behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from tenuto.engine.staging.buffer_layout import PackPlan
from tenuto.errors import DeadlineExceeded, SaveFailed, TenutoError

FIRST_PIECE_BYTES = 4 << 20
LAST_PIECE_BYTES = 64 << 20
"""Pieces double from the one to the other: the writer begins early, and large writes reach the disk's full speed."""
CAPTURE_DEADLINE_S = 600.0


class WriterGone(Exception):
    """The writing thread has ended before everything was captured; the handle of the save says why."""


class Filling:
    """How far an image is filled, which the writing thread awaits, and how far it has been written out, which the
    capturing thread awaits where `window` bytes are all the memory that the image has."""

    def __init__(self, window: int | None = None, patience_s: float | None = None) -> None:
        """`patience_s`: how long the capture waits for the store to take what makes room for more;
        None: CAPTURE_DEADLINE_S."""
        self._changed = threading.Condition()
        self._filled = 0
        self._written = 0
        self._failure: TenutoError | None = None
        self._abandoned = False
        self.window = window
        self._patience_s = CAPTURE_DEADLINE_S if patience_s is None else patience_s
        self.waited_s = 0.0
        """How long the writing thread has waited for the capture."""

    @property
    def gone(self) -> int:
        """Bytes of the image, from its beginning, that may have been overwritten: they cannot be written once more."""
        return self._written if self.window is not None else 0

    def advance(self, filled: int) -> None:
        with self._changed:
            self._filled = filled
            self._changed.notify_all()

    @property
    def failure(self) -> TenutoError | None:
        """The error that broke the capture off."""
        return self._failure

    def fail(self, failure: TenutoError) -> None:
        """Breaks the capture off: waiting for it raises `failure`, or an earlier one."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def abandon(self) -> None:
        """Ends the writing: a capture that waits for room raises WriterGone."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def wait(self, position: int) -> None:
        """Returns when the image is filled up to `position`."""
        with self._changed:
            began = time.perf_counter()
            reached = self._changed.wait_for(
                lambda: self._failure is not None or self._filled >= position, CAPTURE_DEADLINE_S
            )
            self.waited_s += time.perf_counter() - began
            if self._failure is not None:
                raise self._failure
            if not reached:
                raise DeadlineExceeded(
                    f"the capture did not go beyond byte {self._filled} of the image within {CAPTURE_DEADLINE_S:g} s"
                )

    def written(self, position: int) -> None:
        """Notes that everything below `position` is written out."""
        with self._changed:
            self._written = position
            self._changed.notify_all()

    def admit(self, position: int) -> None:
        """Returns when the image may be filled up to `position`: at once, unless its memory is a window."""
        window = self.window
        if window is None:
            return
        with self._changed:
            reached = self._changed.wait_for(
                lambda: self._abandoned or self._written >= position - window, self._patience_s
            )
            if self._abandoned:
                raise WriterGone
            if not reached:
                raise DeadlineExceeded(
                    f"the store took no byte of the image beyond {self._written} within {self._patience_s:g} s, and "
                    f"training waits for the room",
                    hint="raise memory_budget= so that the whole image fits, and training need not wait for the store",
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
        if begin < self._filling.gone:
            raise SaveFailed(
                f"{self._plan.name} would have to be written again, and its beginning has left memory",
                subject=self._plan.name,
                hint="the next save starts again; with memory for the whole image (memory_budget=) a save can continue",
            )
        window = self._filling.window
        largest = LAST_PIECE_BYTES if window is None else min(LAST_PIECE_BYTES, window // 4)
        size = min(FIRST_PIECE_BYTES, largest)
        while begin < stop:
            end = min(begin + size, stop)
            self._filling.wait(end)
            if self._before_piece is not None:
                self._before_piece(end)
            yield self._image[begin:end]
            self._filling.written(end)
            begin, size = end, min(size * 2, largest)
