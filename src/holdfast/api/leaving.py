"""Leaving on a signal: between two steps, with what is in flight committed.

A signal that comes while a save is being taken is acted upon after it: it must not find a half-taken save.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Never

from holdfast.guard.exitstatus import leaving_with
from holdfast.guard.preempted import Preempted
from holdfast.guard.signals import SignalWatch


class Leaving:
    """The signals that end one training. `act` is called in the main thread, between two instructions, with each that
    comes while nothing must be left half done. Without `catch` none is watched."""

    def __init__(self, act: Callable[[str], None], *, catch: bool) -> None:
        self._act = act
        self._watch = SignalWatch() if catch else None
        self._busy = False
        self._left = False

    @property
    def watched(self) -> bool:
        return self._watch is not None

    @property
    def signal(self) -> str | None:
        """The name of the first signal that came."""
        return self._watch.name if self._watch is not None else None

    @property
    def owed(self) -> bool:
        """Whether a signal has come that nobody has left for."""
        return self.signal is not None and not self._left

    def install(self) -> None:
        if self._watch is not None:
            self._watch.notify = self._came
            self._watch.install()

    def restore(self) -> None:
        """The handlers that were there before are there again."""
        if self._watch is not None:
            self._watch.restore()

    def hold_back(self) -> None:
        """From here on no signal is acted upon by itself any more."""
        self._busy = True

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """A signal that comes within the block is acted upon after it."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        self._came()

    def leave(self, name: str | None = None) -> Never:
        """Ends the process as the signal asked: the one that came here, or the one called `name` that came to another
        process of the job."""
        self._left = True
        watch = self._watch
        if watch is not None and watch.deferred is not None:
            raise watch.deferred
        number = watch.received if watch is not None else None
        assert number is not None or name is not None
        leaving = Preempted(number if number is not None else signal.Signals[name or ""].value)
        leaving_with(128 + leaving.signum)
        raise leaving

    def _came(self) -> None:
        name = self.signal
        if name is not None and not self._busy:
            self._act(name)
