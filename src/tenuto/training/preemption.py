"""Catches the signals that ask this process to leave, so that the step under way can be finished and saved.

A handler here records which signal came, and calls the Python handler that was there before. The training loop reads
the record between steps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Never

from tenuto import events, log_lines
from tenuto.concurrency.interruption import interrupt, when_undone
from tenuto.errors import DeadlineExceeded, TenutoError, typed
from tenuto.events import Leaving, NothingToDo, SignalReceived
from tenuto.training import exit_status
from tenuto.training.exit_status import leaving_with
from tenuto.training.saves import RunSaver

if TYPE_CHECKING:
    from tenuto.training.training_session import TrainingSession

# --------------------------------------------------------------------------------------------------
# The end of a training: it waits for what is in flight, and warns of what is not saved.


def await_saves(saving: RunSaver, until: float) -> None:
    """Waits for what is in flight, until this time of the monotonic clock at most. Raises DeadlineExceeded, which the
    exit status reports as well unless the saves commit all the same."""
    try:
        saving.wait(max(until - time.monotonic(), 0.0))
    except DeadlineExceeded as error:
        if saving.saver.in_flight:
            saving.exit_status.fail(error.message)
        raise


def save_sealed(saving: RunSaver) -> None:
    """Saves the newest state that is sealed in memory, where an error ends a training with emergency places: in the
    run's own store, else in one of them. Does nothing in a job of several ranks, which cannot agree any more, and under
    a supervisor, which resumes from memory, or saves from there. What goes wrong is reported."""
    memory, places = saving.memory, saving.emergency
    if memory is None or saving.attempt is None or saving.heartbeat.on or saving.group.world_size > 1:
        return
    if not places.ready or places.rescued is not None:
        return
    from tenuto.maintenance.save_images import part_of  # seldom needed

    for save in saving.saver.in_flight:
        save.patience_s = places.patience_s
        save.join()
    last = saving.last
    try:
        image = memory.newest_image()
        if image is None:
            return
        try:
            if last is None or not last.committed or last.step < image.footer.id.step:
                saving.leaving = True
                part = part_of(image)
                saving.take(part.flattened, part.step, part.about, wait=True, must=True)
        finally:
            image.close()
    except TenutoError as error:
        saving.report(f"what lies in memory is not saved: {error.message}")


def warn_of_unsaved(
    saving: RunSaver, step: int, *, incomplete: bool, replaced: bool, left: bool, alone: bool = False
) -> None:
    """Reports what a training leaves unsaved, and warns where its code is the cause.

    step: the last completed one; incomplete: one more was begun.
    replaced: `step` is not saved, since another Checkpointer took the run before `close` ended the training.
    left: `step` is not saved, since its loop was broken out of.
    alone: `step` was restored from memory and is in no checkpoint, and no step followed.
    """
    last = saving.last
    known = f"the last checkpoint is step {last.step}" if last is not None and last.committed else ""
    known = known or "there is no checkpoint"
    if incomplete:
        saving.report(f"step {step + 1} was left incomplete and is not saved; {known}")
    elif replaced:
        saving.report(
            f"step {step} is not saved ({known}): another Checkpointer of this process takes run {saving.run!r}, and "
            "no close() has said that training ended there"
        )
    elif alone:
        command = typed("tenuto", "flush", saving.repo.url)
        saving.report(f"step {step} of run {saving.run!r} lies in this machine's memory alone: `{command}` saves it")
    elif left:
        saving.warn(
            f"step {step} is not saved ({known}): its loop was left before it came to its end; ckpt.stop() ends one "
            "and saves"
        )


def end_at_once(training: TrainingSession, done: int, total: int, unit: str) -> None:
    """Reports a run that was complete before its loop began, and saves it if only memory has it."""
    if 0 < done >= total:
        training.saving.emit(NothingToDo(training.saving.run, done, total, unit))
        training.end_where_it_resumed(epoch_ended=unit == "epoch")


# --------------------------------------------------------------------------------------------------
# How training leaves when a signal asked it to.


class Preempted(SystemExit):
    """A signal asked this process to leave, and what was to be saved is saved.

    Not an error: uncaught, it ends the process with the exit status 128 + n that shells and schedulers know.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = int(signum)

    @property
    def signal_name(self) -> str:
        """The signal that asked, such as "SIGTERM"."""
        return signal_name(self.signum)

    def __reduce__(self) -> tuple[type[Preempted], tuple[int]]:
        return (type(self), (self.signum,))

    def __repr__(self) -> str:
        return f"Preempted({self.signal_name})"


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


Handler = Callable[[int, FrameType | None], Any] | int | None

_installed: list[SignalWatch] = []
_handling: list[SignalWatch] = []
"""Those whose handlers have called the ones before them."""


class SignalWatch:
    """Records SIGTERM, SIGHUP, SIGUSR1 and, outside notebooks, SIGINT, between `install` and `restore`.

    - An earlier Python handler is called after that, except the one that turns SIGINT into KeyboardInterrupt. If it
      leaves by SystemExit or KeyboardInterrupt, that waits in `deferred`: saving comes first. The same holds for an
      earlier watch, whose training has nothing left to finish.
    - A second SIGINT raises KeyboardInterrupt: at once, or, where Tenuto is at work, as soon as nothing is left half
      done; a third one wherever it is.
    - A signal that the process was told to ignore (by nohup, or in a background job of a shell) stays ignored.
    - Watches may be nested and restored in any order. A forked child has the earlier handlers back.
    - Off the main thread nothing is installed, and a warning says so.
    """

    def __init__(self, signals: Iterable[int] | None = None, *, interrupts: bool = False) -> None:
        """`interrupts`: a SIGINT that is none of `signals` still raises KeyboardInterrupt, but, where Tenuto is at
        work, as soon as nothing is left half done."""
        self._signals = tuple(signals) if signals is not None else leaving_signals()
        self._delays_interrupts = interrupts and signal.SIGINT not in self._signals
        self._earlier: dict[int, Handler] = {}
        self._pid = 0
        self._interrupts = 0
        self.received: int | None = None
        """The first signal that came, or None."""
        self.deferred: BaseException | None = None
        """The exception that an earlier handler raised in order to leave."""
        self.notify: Callable[[], None] | None = None
        """Called last, to act: in the handler, or, where Tenuto is at work, after that."""

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
            events.warn(
                "signals are not watched: Python handles them in the main thread, and this is another one. If this "
                "process is asked to leave, the last save stands, and the steps since then are lost"
            )
            return self
        self._pid = os.getpid()
        _installed.append(self)
        for number in (*self._signals, *((signal.SIGINT,) if self._delays_interrupts else ())):
            if number in self._earlier:
                continue  # still in below a later watch, since a `restore` that could not take it out
            earlier = signal.getsignal(number)
            if number not in self._signals and earlier is not signal.default_int_handler:
                continue
            if earlier == signal.SIG_IGN:
                continue
            if earlier == exit_status.end_with_status:
                earlier = signal.SIG_DFL
            if earlier is None:
                events.warn(f"{signal_name(number)} is not watched: code outside Python handles it")
                continue
            # Recorded first: the handler may run as soon as it is in.
            self._earlier[number] = earlier
            signal.signal(number, self._handle)
        return self

    def restore(self, default: Handler = signal.SIG_DFL) -> None:
        """Puts the earlier handlers back, `default` where there was none; does nothing if nothing is installed.

        Where a later handler sits on top, or off the main thread, this one stays in and only passes on.
        """
        if self in _installed:
            _installed.remove(self)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in list(self._earlier):
            if signal.getsignal(number) == self._handle:
                handler, passed = _beneath(self, number)
                ended = number in exit_status.ENDED_BY and handler == signal.SIG_DFL
                signal.signal(number, default if ended else handler)
                for watch in passed:  # only now: until then a signal may still come to this watch's handler
                    watch._earlier.pop(number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        earlier = _live(self._earlier.get(number, signal.SIG_DFL), number)
        if self not in _installed or os.getpid() != self._pid:
            _pass_on(earlier, number, frame)
            return
        if number not in self._signals:
            interrupt()
            return
        if self.received is None:
            self.received = number
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                interrupt()
                return
        if callable(earlier) and earlier is not signal.default_int_handler:
            _handling.append(self)
            try:
                earlier(number, frame)
            except (SystemExit, KeyboardInterrupt) as leaving:
                if number == signal.SIGINT and any(watch._interrupts > 1 for watch in _installed):
                    raise  # a second one, for a watch below this one
                self.deferred = self.deferred or leaving
            finally:
                _handling.pop()
        if not _handling:  # else the one above does
            when_undone(partial(self._act, number))

    def _act(self, number: int) -> None:
        """Acts for the watches below, and for this one."""
        below = _live(self._earlier.get(number, signal.SIG_DFL), number)
        if isinstance(watch := getattr(below, "__self__", None), SignalWatch):
            try:
                watch._act(number)
            except (SystemExit, KeyboardInterrupt) as leaving:
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
    """Returns the signals that ask this process to leave. In a notebook SIGINT only stops a cell, and is not one."""
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return signals if in_notebook() else (*signals, signal.SIGINT)


def send_again(name: str, after_s: float) -> threading.Timer | None:
    """Has this process sent the signal once more, unless what it returns is cancelled by then. Never SIGINT: a second
    one is taken for that of a person who wants to break off."""
    if name == "SIGINT":
        return None
    again = threading.Timer(after_s, os.kill, (os.getpid(), signal.Signals[name]))
    again.daemon = True
    again.start()
    return again


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell is not None and hasattr(shell, "kernel")


def _live(handler: Handler, number: int) -> Handler:
    """Returns `handler`, or the one below it where it is that of a watch that was restored meanwhile."""
    while isinstance(watch := getattr(handler, "__self__", None), SignalWatch) and watch not in _installed:
        handler = watch._earlier.get(number, signal.SIG_DFL)
    return handler


def _beneath(watch: SignalWatch, number: int) -> tuple[Handler, list[SignalWatch]]:
    """Returns the handler to put back for `watch`, with `watch` and those below it that were restored meanwhile."""
    handler, passed = watch._earlier[number], [watch]
    while isinstance(below := getattr(handler, "__self__", None), SignalWatch) and below not in _installed:
        handler = below._earlier.get(number, signal.SIG_DFL)
        passed.append(below)
    return handler, passed


def _pass_on(handler: Handler, number: int, frame: FrameType | None) -> None:
    """Does what `handler` would have done."""
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _restore_in_child() -> None:
    """Restores the defaults in a forked child: a loader worker is ended by SIGTERM."""
    for watch in reversed(list(_installed)):
        watch.restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)


# --------------------------------------------------------------------------------------------------
# Leaving on a signal: between two steps, with what is in flight committed, and never within a save that is being taken.


class PreemptionHandler:
    """Watches the signals that end one training, if `catch`. `act` is called in the main thread, between two
    instructions, with each that comes: where Tenuto is at work, after that."""

    def __init__(self, act: Callable[[str], None], *, catch: bool) -> None:
        self._act = act
        self._catch = catch
        self._watch = SignalWatch(None if catch else (), interrupts=True)
        self._held_back = False
        self._reported = False
        self._left_for: str | None = None
        """The name of the signal for which the process leaves: here, or in another process of the job."""

    @property
    def watched(self) -> bool:
        return self._catch

    @property
    def signal(self) -> str | None:
        """The name of the first signal that came."""
        return self._watch.name

    @property
    def _status(self) -> int | None:
        """The exit status with which it leaves; None where an earlier handler of the signal decides that."""
        if self._watch.deferred is not None or self._left_for is None:
            return None
        return 128 + signal.Signals[self._left_for].value

    @property
    def owed(self) -> bool:
        """Whether a signal has come that the process has not left for."""
        return self.signal is not None and self._left_for is None

    def install(self) -> None:
        if self._catch or threading.current_thread() is threading.main_thread():
            self._watch.notify = self._came
            self._watch.install()
        if self._catch:
            exit_status.catch_to_the_end()

    def restore(self, *, stays: bool = False) -> None:
        """Puts the earlier handlers back. `stays`: where there was none, as also while the interpreter ends, a signal
        still ends the process with the status that says so."""
        stays = self._catch and (stays or exit_status.interpreter_ends())
        self._watch.restore(exit_status.end_with_status if stays else signal.SIG_DFL)

    def hold_back(self) -> None:
        """Stops acting on signals as they come."""
        self._held_back = True

    def prepare_to_leave(self, name: str | None = None) -> None:
        """Decides that the process leaves because of the signal that came here, or of `name`, which came to another
        process of the job."""
        self._left_for = self._left_for or self.signal or name

    def report_signal(self, saving: RunSaver, step: int, *, in_step: bool) -> bool:
        """Reports, once, the signal that came, also to processes that wait for the run; returns whether it did."""
        name, attempt = self.signal, saving.attempt
        if name is None or attempt is None or self._reported:
            return False
        self._reported = True
        attempt.leave()
        saving.emit(SignalReceived(saving.run, name, step, in_step))
        return True

    def report_leaving(self, saving: RunSaver, step: int, failed: BaseException | None) -> None:
        """Reports what is saved where a signal ends the training; or that `failed` ends it, though a signal came."""
        if self._left_for is not None:
            last = saving.last
            saved = last.id if last is not None and last.committed else None
            saving.emit(Leaving(saving.run, self._left_for, step, saved, saving.repo.url, self._status))
            if self._status is not None:
                saving.heartbeat.left(self._status - 128, step)
        elif self.owed and isinstance(failed, Exception):
            saving.report(f"{self.signal} came as well as {type(failed).__name__}, which ends the training")

    def leave(self) -> Never:
        """Ends the process as the signal asked."""
        watch = self._watch
        if watch.deferred is not None:
            raise watch.deferred
        assert self._left_for is not None
        leaving = Preempted(signal.Signals[self._left_for].value)
        leaving_with(128 + leaving.signum)
        raise leaving

    def _came(self) -> None:
        name = self.signal
        if name is not None and exit_status.interpreter_ends():
            exit_status.end_by(signal.Signals[name])
        elif name is not None and not self._held_back:
            with log_lines.deferred():
                self._act(name)
