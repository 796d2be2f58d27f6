"""The queue of saves in flight: each has a thread of its own, and one writes at a time, in the order of their taking.

A thread for each, and not one for all, because the thread of a save that training waits for must not stand back behind
training, and because a state can be sealed in memory while the one before it is still being written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.engine.handle import Save
from holdfast.state.parked import Work, behind, beside

Turn = Callable[[], None]
"""Returns when everything before has been written, and what follows that is done."""


class Queue:
    """The saves of one run, entered by one training thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saves: list[Save] = []
        self._images: set[str] = set()
        """The ids of the saves that have an image of their own still: a hung one that was given up among them."""
        self._work: Work | None = None

    @property
    def busy(self) -> bool:
        """Whether a thread is at work: on a save, or on what follows one."""
        return self._work is not None and self._work.is_alive()

    @property
    def in_flight(self) -> list[Save]:
        """The saves that have not ended, oldest first."""
        with self._changed:
            return [save for save in self._saves if not save.done]

    @property
    def images(self) -> int:
        """How many saves have an image of their own still."""
        with self._changed:
            return len(self._images)

    def enter(self, save: Save) -> None:
        """It is about to be captured, and will be written after those that are in flight."""
        before = self.in_flight
        with self._changed:
            save.wait_behind(before[-1] if before else None)
            self._saves.append(save)
            self._images.add(save.save_id)

    def start(self, save: Save, work: Callable[[Turn | None], None], *, stands_back: bool) -> None:
        """Runs `work` in a thread; `stands_back`: it lowers that thread's priority. It is given what to call before it
        writes; None where its turn has come."""
        before = self._work
        turn = before.join if before is not None and before.is_alive() else None
        pool = behind if stands_back else beside
        self._work = pool.hand(lambda: work(turn), f"holdfast-save-{save.step}")

    def give_back(self, save: Save) -> None:
        """Its image is needed no more. Before it is said to have ended: who waits for that finds room for the next."""
        with self._changed:
            self._images.discard(save.save_id)
            self._changed.notify_all()

    def leave(self, save: Save) -> None:
        """It has ended, or never will."""
        with self._changed:
            self._saves.remove(save)

    def await_room(self, most: Callable[[], int], timeout: float | None) -> bool:
        """Whether fewer than `most()` saves have an image of their own within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._images) < most(), timeout)

    def join(self, timeout: float | None) -> bool:
        """Whether all is over that has been started, within `timeout` seconds."""
        if self._work is not None:
            self._work.join(timeout)
        return not self.busy
