"""Catching the signals that ask this process to leave, so that the step under way can be finished and saved.

A handler here does two things: it notes which signal came, and calls the Python handler that was there before. The
training loop reads the note between steps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

from holdfast.guard.preempted import signal_name

Handler = Callable[[int, FrameType | None], Any] | int | None

_installed: list[SignalWatch] = []


class SignalWatch:
    """Notes SIGTERM, SIGUSR1 and, outside notebooks, SIGINT, between `install` and `restore`.

    - An earlier Python handler is called after the note is made, except the one that turns SIGINT into
      KeyboardInterrupt. If it leaves by SystemExit or KeyboardInterrupt, that waits in `deferred`: saving comes first.
      So it does where the earlier one is another watch, whose training has nothing left to finish.
    - A second SIGINT raises KeyboardInterrupt at once.
    - Where the process was told to ignore SIGINT (a background job of a shell), it stays ignored.
    - Watches may be nested and restored in any order. A forked child has the earlier handlers back.
    - Off the main thread nothing is installed, and a warning says so.
    """

    def __init__(self, signals: Iterable[int] | None = None) -> None:
        self._signals = tuple(signals) if signals is not None else leaving_signals()
        self._earlier: dict[int, Handler] = {}
        self._pid = 0
        self._interrupts = 0
        self.received: int | None = None
        """The first signal that came, or None."""
        self.deferred: BaseException | None = None
        """What an earlier handler raised in order to leave."""
        self.notify: Callable[[], None] | None = None
        """Called in the handler, last: for whoever can act at once. What it raises leaves the handler."""

    @property
    def name(self) -> str | None:
        """The name of the first signal that came, such as "SIGTERM", or None."""
        return None if self.received is None else signal_name(self.received)

    @property
    def installed(self) -> bool:
        return self in _installed

    def install(self) -> SignalWatch:
        """Puts the handlers in; does nothing if they are. Warns, and does nothing, off the main thread."""
        if self.installed:
            return self
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "signals are not watched: Python handles them in the main thread, and this is another one. If this "
                "process is told to leave, the last save stands, and the steps since then are lost",
                RuntimeWarning,
                stacklevel=2,
            )
            return self
        self._pid = os.getpid()
        _installed.append(self)
        for number in self._signals:
            if number in self._earlier:
                continue  # still in below a later watch, since a `restore` that could not take it out
            earlier = signal.getsignal(number)
            if number == signal.SIGINT and earlier == signal.SIG_IGN:
                continue
            if earlier is None:
                warnings.warn(
                    f"{signal_name(number)} is not watched: code outside Python handles it",
                    RuntimeWarning,
                    stacklevel=2,
                )
                continue
            # Noted first: the handler may run as soon as it is in.
            self._earlier[number] = earlier
            signal.signal(number, self._handle)
        return self

    def restore(self) -> None:
        """Puts the earlier handlers back; does nothing if nothing is installed.

        Where a later handler sits on top, or off the main thread, this one stays in and only passes on.
        """
        if self in _installed:
            _installed.remove(self)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in list(self._earlier):
            if signal.getsignal(number) == self._handle:
                signal.signal(number, _take_out(self, number))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        earlier = _live(self._earlier.get(number, signal.SIG_DFL), number)
        if self not in _installed or os.getpid() != self._pid:
            _pass_on(earlier, number, frame)
            return
        if self.received is None:
            self.received = number
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        if callable(earlier) and earlier is not signal.default_int_handler:
            try:
                earlier(number, frame)
            except (SystemExit, KeyboardInterrupt) as leaving:
                if number == signal.SIGINT and any(watch._interrupts > 1 for watch in _installed):
                    raise  # a second one, for a watch below this one
                self.deferred = self.deferred or leaving
        if self.notify is not None:
            self.notify()

    def __enter__(self) -> SignalWatch:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def leaving_signals() -> tuple[int, ...]:
    """What asks this process to leave. In a notebook SIGINT only stops a cell, and stays with the notebook."""
    signals = (signal.SIGTERM, signal.SIGUSR1)
    return signals if in_notebook() else (*signals, signal.SIGINT)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell is not None and hasattr(shell, "kernel")


def _live(handler: Handler, number: int) -> Handler:
    """`handler`, or, where it is that of a watch that was restored meanwhile, the one below it."""
    while isinstance(watch := getattr(handler, "__self__", None), SignalWatch) and watch not in _installed:
        handler = watch._earlier.get(number, signal.SIG_DFL)
    return handler


def _take_out(watch: SignalWatch, number: int) -> Handler:
    """The handler to put back for `watch`; watches below it that were restored meanwhile go with it."""
    handler = watch._earlier.pop(number)
    while isinstance(below := getattr(handler, "__self__", None), SignalWatch) and below not in _installed:
        handler = below._earlier.pop(number, signal.SIG_DFL)
    return handler


def _pass_on(handler: Handler, number: int, frame: FrameType | None) -> None:
    """Does what `handler` would have done."""
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _restore_in_child() -> None:
    """A loader worker is ended by SIGTERM: in a forked child the default must act again."""
    for watch in reversed(list(_installed)):
        watch.restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)
