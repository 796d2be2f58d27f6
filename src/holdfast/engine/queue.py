"""The queue of saves in flight: each has a thread of its own, and one writes at a time, in the order of their taking.

A thread for each, and not one for all, because the thread of a save that training waits for must not stand back behind
training, and because a state can be sealed in memory while the one before it is still being written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.engine.handle import Save

Turn = Callable[[], None]
"""Returns when everything before has been written, and what follows that is done."""


class Queue:
    """The saves of one run, entered by one training thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saves: list[Save] = []
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a thread is at work: on a save, or on what follows one."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def in_flight(self) -> list[Save]:
        """The saves that have not ended, oldest first."""
        with self._changed:
            return [save for save in self._saves if not save.done]

    def enter(self, save: Save) -> None:
        """It is about to be captured, and will be written after those that are in flight."""
        before = self.in_flight
        with self._changed:
            save.wait_behind(before[-1] if before else None)
            self._saves.append(save)

    def start(self, save: Save, work: Callable[[Turn | None], None]) -> None:
        """Runs `work` in a thread. It is given what to call before it writes; None where its turn has come."""
        before = self._thread
        turn = before.join if before is not None and before.is_alive() else None
        thread = threading.Thread(target=work, args=(turn,), name=f"holdfast-save-{save.step}", daemon=True)
        thread.start()
        self._thread = thread

    def leave(self, save: Save) -> None:
        """It has ended, or never will."""
        with self._changed:
            if save in self._saves:
                self._saves.remove(save)
            self._changed.notify_all()

    def await_room(self, most: Callable[[], int], timeout: float | None) -> bool:
        """Whether fewer than `most()` saves are in flight within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: sum(not save.done for save in self._saves) < most(), timeout)

    def join(self, timeout: float | None) -> bool:
        """Whether all is over that has been started, within `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.busy
