"""The host memory that images live in, within the stated budget and what the machine has (I9).

One image for each save that may be in flight. The first is as good as memory allows, be it a window. Another one exists
only where its whole image fits beside the others: fewer saves are in flight then, which is reported once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from tenuto.concurrency.memory_headroom import memory_headroom
from tenuto.engine.staging.arena import (
    Arena,
    acquire,
    acquire_moving_window,
    acquire_window,
    can_move,
)
from tenuto.engine.staging.capture import STEPS_IN_WINDOW
from tenuto.engine.staging.plan import SavePlan, StagingBuffer
from tenuto.errors import DeadlineExceeded, SaveFailed
from tenuto.events import Emitter, Warned
from tenuto.state.contract import Flattened

SPARE_BYTES: Final = 64 << 20
"""What is left to the rest of the job: indexes, buffers of libraries, the next allocation of training."""
WINDOW_BYTES: Final = 256 << 20
"""Memory of a save that takes no more than it must: four pieces that reach the disk's full speed."""
MOVING_WINDOW_BYTES: Final = (32 << 20, 64 << 20)
"""The same of a single save, where the memory moves along and its pages are touched for this save alone: for an image
below `LARGE_IMAGE_BYTES`, and for a larger one, which gains more from large writes than it loses by touching pages."""
LARGE_IMAGE_BYTES: Final = 256 << 20
WINDOW_UNIT: Final = 1 << 20
ROOM_DEADLINE_S: Final = 600.0
"""How long a state that has outgrown the memory waits until the images that are being written are."""


class ImageTooLarge(Exception):
    """A whole image does not fit beside the others; the message has the figures."""


class BudgetedArena:
    """Holds one arena for one run and rank, and exchanges it when the state no longer fits.

    lasting: it serves many saves, so it holds the whole image where budget and machine allow, is touched beforehand
    and lies in shared memory where there is room. A single large save takes a window and no more, whose memory moves
    along the image where the system can do that: it waits for the store anyway.

    slot: its number in shared memory, which no other has. others: returns the bytes of the budget that others take.
    """

    def __init__(
        self,
        repository: str,
        run: str,
        rank: int,
        *,
        budget: int | None,
        lasting: bool,
        slot: int = 0,
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        self._repository = repository
        self._run = run
        self._rank = rank
        self._budget = budget
        self._lasting = lasting
        self._slot = slot
        self._others = others
        self._arena: Arena | None = None
        self.whole = False
        """Whether nothing less than a whole image will do."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes now."""
        if self._arena is None:
            return 0
        return self._arena.nbytes if self._arena.window is None else self._arena.window

    def acquire(self, nbytes: int, *, step: int = 0) -> Arena:
        """Returns an arena of at least `nbytes`, or a window of it that holds four steps of `step` bytes; the one
        returned before is no longer valid. Raises SaveFailed if not even that fits into the budget and the machine's
        free memory, ImageTooLarge where it has to be `whole` and does not fit."""
        if self._arena is not None and self._arena.buffer.nbytes >= nbytes and _holds(self._arena, step):
            return self._arena
        self.release()
        room, whose = self._room()
        window = max(self._usual_window(nbytes), STEPS_IN_WINDOW * step)
        if (room is None or nbytes <= room) and (self._lasting or nbytes <= 2 * window):
            self._arena = acquire(
                nbytes,
                repository=self._repository,
                run=self._run,
                rank=self._rank,
                slot=self._slot,
                prewarm=self._lasting,
                shared=self._lasting,
            )
            return self._arena
        if self.whole:
            raise ImageTooLarge(f"one more image takes {_mib(nbytes)}, and {whose}")
        if room is not None:
            window = min(window, room // WINDOW_UNIT * WINDOW_UNIT)
        self._arena = self._window(nbytes, window, step, whose)
        if self._lasting:
            self._arena.note = (
                f"the whole image takes {_mib(nbytes)}, and {whose}; at each save training waits while the state goes "
                f"out through {_mib(window)}"
            )
        return self._arena

    def tight(self, nbytes: int) -> bool:
        """Returns whether an image of so many bytes would be more than there is room for, or is in a window now."""
        if self._arena is not None:
            return self._arena.window is not None
        room, _ = self._room()
        return room is not None and nbytes > room

    def release(self) -> None:
        if self._arena is not None:
            self._arena.release()
            self._arena = None

    @property
    def _moves(self) -> bool:
        """Whether the memory of a window moves along the image: in one direction, so it serves one save."""
        return not self._lasting and can_move()

    def _usual_window(self, nbytes: int) -> int:
        return MOVING_WINDOW_BYTES[nbytes >= LARGE_IMAGE_BYTES] if self._moves else WINDOW_BYTES

    def _window(self, nbytes: int, window: int, step: int, whose: str) -> Arena:
        least = max(WINDOW_UNIT, STEPS_IN_WINDOW * step)
        if window < least:
            raise SaveFailed(
                f"an image of this state takes {_mib(nbytes)} of host memory, and writing it piece by piece "
                f"{_mib(least)}; {whose}",
                subject=self._run,
                hint="raise memory_budget=, give the job more memory, or save less state",
            )
        try:
            return acquire_moving_window(nbytes, window) if self._moves else acquire_window(nbytes, window)
        except OSError as error:
            raise SaveFailed(
                f"an image of this state takes {_mib(nbytes)} of host memory; {whose}, and this system cannot write it "
                f"through less ({error.strerror})",
                subject=self._run,
                hint="raise memory_budget=, give the job more memory, or save less state",
            ) from error

    def _room(self) -> tuple[int | None, str]:
        """Returns the bytes that an image may take, None where they are unknown, and what limits them, in words."""
        free = memory_headroom()
        room = None if free is None else max(free - SPARE_BYTES, 0)
        others = self._others()
        if self._budget is not None and (room is None or self._budget - others <= room):
            taken = f", of which {_mib(others)} are taken" if others else ""
            return max(self._budget - others, 0), f"the budget is {_mib(self._budget)}{taken}"
        return room, "" if room is None else f"{_mib(free or 0)} are free here"


def _holds(arena: Arena, step: int) -> bool:
    return arena.window is None or arena.window >= STEPS_IN_WINDOW * step


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


class StagingPool:
    """The buffers of one run and rank, at most `count`. The training thread takes them; the writing thread gives back.

    most: how many saves of the present structure may be in flight.
    """

    def __init__(
        self,
        repository: str,
        run: str,
        *,
        rank: int,
        count: int,
        chunk_bytes: int,
        emitter: Emitter,
        budget: int | None,
        lasting: bool,
        others: Callable[[], int],
    ) -> None:
        """`others`: returns the bytes of the budget that are taken elsewhere; `lasting`: as `BudgetedArena`."""
        self.buffers: list[StagingBuffer[BudgetedArena]] = []
        self.most = count
        self._others = others
        self._emitter = emitter
        self._changed = threading.Condition()
        self._fingerprint: str | None = None
        self._warned = False
        for slot in range(count):
            taken = partial(self._taken_beside, slot)
            memory = BudgetedArena(repository, run, rank, budget=budget, lasting=lasting, slot=slot, others=taken)
            # Only the first one warns of where its image lies.
            self.buffers.append(StagingBuffer(memory, chunk_bytes, Emitter() if slot else emitter, rank=rank))

    def prepare(self, flattened: Flattened) -> None:
        """Takes the memory of all buffers for this state, as far as it fits, and touches it."""
        self._begin_structure(flattened)
        for buffer in self.buffers:
            if buffer.writing or sum(one.fits(flattened) for one in self.buffers) >= self.most:
                continue
            if self._plan(buffer, flattened) is None:
                break

    def expect(self, nbytes: int) -> None:
        """Takes the memory of all buffers for images of about `nbytes`, as far as it fits, and touches it. Where an
        image turns out to be larger, its buffer takes other memory."""
        for number, buffer in enumerate(self.buffers):
            if buffer.writing or buffer.memory.nbytes:
                return
            buffer.memory.whole = number > 0
            try:
                arena = buffer.memory.acquire(nbytes)
            except (ImageTooLarge, SaveFailed):
                return  # the first save reports it
            if arena.window is not None:
                return

    def tight(self, nbytes: int) -> bool:
        """Returns whether there is no room for an image of about `nbytes` as a whole, beside what others take."""
        return not self.buffers[0].writing and self.buffers[0].memory.tight(nbytes)

    def retry_room(self) -> None:
        """Gives unused windows back, since there is more room than there was."""
        for buffer in self.buffers:
            if not buffer.writing:
                buffer.release()

    def take(self, flattened: Flattened, timeout: float = ROOM_DEADLINE_S) -> SavePlan:
        """Returns the plan of a capture into a buffer that nobody uses until `give_back`. To be called while fewer than
        `most` are taken.

        Where the structure is new and its image does not fit beside those that are being written, it waits for them:
        DeadlineExceeded after `timeout` seconds. SaveFailed where there is no memory for it (I9).
        """
        self._begin_structure(flattened)
        until = time.monotonic() + timeout
        while True:
            with self._changed:
                free = [buffer for buffer in self.buffers if not buffer.writing]
            buffer = next((one for one in free if one.fits(flattened)), next(iter(free), None))
            if buffer is not None and (plan := self._plan(buffer, flattened)) is not None:
                buffer.writing = True
                return plan
            self._await_given_back(len(free), until)

    def give_back(self, plan: SavePlan) -> None:
        """Frees the buffer of this plan: nobody reads or fills its image any more."""
        with self._changed:
            for buffer in self.buffers:
                if buffer.plan is plan:
                    buffer.writing = False
            self._changed.notify_all()

    def release(self) -> None:
        """Gives the memory of all buffers back."""
        for buffer in self.buffers:
            buffer.release()

    def _begin_structure(self, flattened: Flattened) -> None:
        """Assumes that all buffers fit, where the structure is a new one."""
        if flattened.fingerprint != self._fingerprint:
            self._fingerprint, self.most = flattened.fingerprint, len(self.buffers)

    def _plan(self, buffer: StagingBuffer[BudgetedArena], flattened: Flattened) -> SavePlan | None:
        """Returns the plan over this buffer's memory; None where that does not fit beside the others."""
        while True:
            others = [other for other in self.buffers if other is not buffer and other.memory.nbytes]
            buffer.memory.whole = bool(others)
            try:
                plan = buffer.prepare(flattened)
            except ImageTooLarge as error:
                buffer.release()
                stale = [other for other in others if not other.writing and not other.fits(flattened)]
                for other in stale:
                    other.release()
                if stale:
                    continue
                if all(other.fits(flattened) for other in others):
                    self._limit(len(others), str(error))
                return None
            if plan.arena.window is not None:
                self._limit(1, "a window holds one image at a time")
            return plan

    def _limit(self, most: int, why: str) -> None:
        if most < self.most:
            self.most = most
            if not self._warned:
                self._warned = True
                self._emitter.emit(Warned(f"{most} of {len(self.buffers)} saves may be in flight at once: {why}"))

    def _await_given_back(self, free: int, until: float) -> None:
        with self._changed:
            given_back = self._changed.wait_for(
                lambda: sum(not buffer.writing for buffer in self.buffers) > free, max(until - time.monotonic(), 0.0)
            )
        if not given_back:
            raise DeadlineExceeded(
                "there is no room for another image before those in flight are written, and none was in time",
                hint="raise memory_budget=, give the job more memory, or pass a smaller in_flight=",
            )

    def _taken_beside(self, slot: int) -> int:
        """Returns the bytes of the budget that are taken outside of one buffer."""
        return self._others() + sum(one.memory.nbytes for number, one in enumerate(self.buffers) if number != slot)
