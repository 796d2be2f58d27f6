"""The Checkpointer of a training loop."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from holdfast.api import ownership
from holdfast.api.claiming import Claiming, ResumeFrom
from holdfast.api.environment import check_platform
from holdfast.api.loops import Batches, Epochs, Steps
from holdfast.api.metrics import as_floats
from holdfast.api.position import Position
from holdfast.api.restored import Restored
from holdfast.api.saving import OnBusy, OnError, Saving
from holdfast.api.snapshot import Moment, Snapshots
from holdfast.engine.handle import Save
from holdfast.errors import ForkedProcess, UsageError
from holdfast.events import Emitter, Sink
from holdfast.guard.exitstatus import before_exit, leaving_with
from holdfast.guard.preempted import Preempted
from holdfast.guard.signals import SignalWatch
from holdfast.model.names import run_key
from holdfast.policy import every, on
from holdfast.policy import keep as keeping
from holdfast.policy import saving as asking
from holdfast.policy.keeping import KeepPolicy
from holdfast.policy.saving import SavePolicy
from holdfast.ranks.solo import solo
from holdfast.repo.repository import Repo
from holdfast.store.contract import Where
from holdfast.store.registry import open_store

CLOSE_DEADLINE_S = 600.0


class Checkpointer:
    """Saves and resumes one run of training.

    where: a directory, a URL, or a store; it is created if need be, and nothing foreign in it is touched.
    state: a mapping of names to models, optimizers, anything with `state_dict`/`load_state_dict`, tensors, plain values; held by
    reference and read at every save.
    run: the line of training, when several live in one place. data: the loader, whose position is saved too.
    save: when (`every(...)`, `on.end()`, `on.signal()`, combined with `|`). keep: what (`keep.latest(n)`, `keep.best(n, metric)`).
    resume_from: "latest", a step, or None to start afresh. on_busy: whether a save that is due while one is in flight waits or is
    skipped. on_error: whether a failed save warns (and makes the exit status tell) or also raises at the next call.
    takeover: claim the run even if its owner lives. memory_budget: bytes of host memory that saving may use. sinks: take events.

    Raises UsageError for arguments that make no sense, RanksNotSupported with more than one process, Unserialisable (naming the
    path) for a state that cannot be represented, and errors of the store.
    """

    def __init__(
        self,
        where: Where,
        state: Mapping[str, Any],
        *,
        run: str = "main",
        data: Any = None,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        resume_from: ResumeFrom = "latest",
        on_busy: OnBusy = "wait",
        on_error: OnError = "warn",
        takeover: bool = False,
        memory_budget: int | None = None,
        sinks: Iterable[Sink] = (),
    ) -> None:
        check_platform()
        self._closed = False
        self._pid = os.getpid()
        self._disarmed = ownership.imported_by_worker()
        self.position = Position(data)
        if self._disarmed:
            return
        solo()
        policy, kept = _policies(state, save, keep, on_busy, on_error, memory_budget)
        run_key(run)
        self._run = run
        self._emitter = Emitter.of(sinks)
        self._repo = Repo.create_or_open(open_store(where))
        self._snapshots = Snapshots(state, self.position)
        self._saving = Saving(
            self._repo,
            run,
            policy=policy,
            keep=kept,
            on_busy=on_busy,
            on_error=on_error,
            memory_budget=memory_budget,
            emitter=self._emitter,
        )
        self._claiming = Claiming(
            self._repo, run, state, self.position, resume_from=resume_from, takeover=takeover, emitter=self._emitter
        )
        self._signals = SignalWatch() if policy.catches_signals else None
        self._loop: Steps | Epochs | None = None
        self._open = False
        self._inside = False
        self._stopping = False
        self._requested: tuple[Save, bool] | None = None
        self._metrics: dict[str, float] = {}
        self._moment: Moment | None = None
        self.prewarm_s = self._saving.saver.prewarm(self._snapshots.now())
        self._withdraw = before_exit(_weakly(self))

    # -- what a loop sees ----------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.position.counters.step

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self.position.counters.epoch

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called, or a signal asked this process to leave."""
        return self._stopping

    def restore(self) -> Restored | None:
        """Restores what `resume_from` says, once; None if there is nothing to restore.

        Reads only: the run is claimed by `steps`, `epochs`, `step_done` or `save`. Raises NothingRestorable if checkpoints exist and none
        is whole, StateMismatch if the state's structure differs.
        """
        if self._disarmed:
            return None
        self._check_process()
        return self._claiming.restore()

    def steps(self, n: int | None = None) -> Steps:
        """A drop-in for `range(n)`: `n` is the total, resumed runs count on. Restores and claims when called."""
        total = _count(n, "steps") if n is not None else None
        self._enter()
        loop = Steps(self, 0 if self._disarmed else total)
        self._loop = loop
        return loop

    def epochs(self, n: int, accumulate: int = 1) -> Epochs:
        """Epochs up to the total `n`; inside one, coming back to `batches` completes a step (`accumulate=k`: k batches)."""
        total, group = _count(n, "epochs"), _count(accumulate, "epochs(accumulate=)", least=1)
        self._enter()
        loop = Epochs(self, 0 if self._disarmed else total, group)
        self._loop = loop
        return loop

    @property
    def batches(self) -> Batches:
        """`for`: the rest of this epoch; `next`: the next batch, rolling over. Only inside `steps` or `epochs`."""
        if self._loop is None and not self._disarmed:
            raise UsageError(
                "batches belongs inside steps() or epochs()",
                subject="batches",
                hint="for step in ckpt.steps(n): batch = next(ckpt.batches)",
            )
        return Batches(self, self._loop if isinstance(self._loop, Epochs) else None)

    def log(self, **metrics: Any) -> None:
        """Metrics of the step that is open; outside a step, of the last completed one (noted if it is taken already)."""
        if self._disarmed:
            return
        self._check_process()
        found = as_floats(metrics)
        if self._open:
            self._metrics.update(found)
            return
        last = self._saving.last
        if last is not None and last.step == self.step and not last.inside_step:
            self._saving.note(last.id, found)
        self._metrics.update(found)
        self._saving.seen(found)

    def step_done(self, step: int | None = None, **metrics: Any) -> None:
        """A step is completed, in a loop that somebody else owns; `step` is its number, one more than the last if not given."""
        if self._disarmed:
            return
        self._check_process()
        if self._loop is not None:
            raise UsageError("step_done is for loops that somebody else owns; steps() and epochs() count by themselves", subject="step_done")
        self._claim()
        number = self.step + 1 if step is None else _count(step, "step_done(step=)", least=0)
        if number <= self.step:
            raise UsageError(
                f"step {number} is not above the last completed one, {self.step}",
                subject="step_done",
                hint="pass the number of completed steps; after ckpt.restore() continue from ckpt.step",
            )
        self._metrics = as_floats(metrics) if metrics else {}
        self.position.counters.step = number - 1
        self._open = True
        self.complete_step()

    def save(self, wait: bool = False) -> Save:
        """Saves now, or at the end of the step that is open; `wait=True` returns (or ends the step) once it is committed.

        Where no step was completed since the last save, that save is returned, with a warning. Superseded and RunInUse always raise.
        """
        self._check_armed()
        if not self._claiming.done and self._claiming.exists():
            raise UsageError(
                f"run {self._run!r} has checkpoints, and nothing was restored: saving now would hide them behind a fresh start",
                subject=self._run,
                hint="call ckpt.restore() first, or pass resume_from=None to start afresh on purpose",
            )
        self._claim()
        self._saving.raise_failure()
        last = self._saving.last
        if self._open:
            handle = self._requested[0] if self._requested else self._saving.saver.plan_save(self.step + 1, reason="asked for")
            handle.inside_step = True
            self._requested = (handle, wait or bool(self._requested and self._requested[1]))
            return handle
        if last is not None and last.step >= self.step:
            warnings.warn(
                f"holdfast: no step was completed since the save of step {last.step}, which is returned; "
                "a loop of your own says ckpt.step_done() after each step",
                RuntimeWarning,
                stacklevel=2,
            )
            if wait:
                last.wait()
            return last
        taken = self._take("asked for", wait=wait)
        if taken is None:
            assert last is not None
            return last
        if wait:
            taken.wait()
        return taken

    def stop(self) -> None:
        """Finishes the step that is open, saves and ends the loop."""
        self._stopping = True

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the save in flight; raises what made it fail, and DeadlineExceeded after `timeout` seconds."""
        self._check_armed()
        self._saving.wait(timeout)
        last = self._saving.last
        if last is not None and last.error is not None:
            raise last.error

    def close(self, timeout: float = CLOSE_DEADLINE_S) -> None:
        """Waits for what is in flight, gives the run back, puts signal handlers back. Called by `with`; may be called twice."""
        self._close(timeout, ended_well=True)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(CLOSE_DEADLINE_S, ended_well=error is None)

    def __repr__(self) -> str:
        return f"Checkpointer({self._repo.url!r}, run={self._run!r}, step={self.step})" if not self._disarmed else "Checkpointer(disarmed)"

    # -- what the loops tell -------------------------------------------------------------------------------------------

    def open_step(self) -> None:
        """The body of a step begins."""
        if self._signal() is not None:
            self._consider(epoch_ended=False, ending=True)
        self._metrics = {}
        self._open = True
        self._moment = None

    def complete_step(self, *, epoch_ended: bool = False, ending: bool = False) -> None:
        """The body of a step has come to its end: it counts, and is saved if something asks for it."""
        with self._undisturbed():
            self._open = False
            self.position.counters.step += 1
            self._consider(epoch_ended=epoch_ended, ending=ending)

    def end_epoch(self, *, ending: bool) -> None:
        """An epoch's body has come to its end."""
        with self._undisturbed():
            if self._open:
                self._open = False
                self.position.counters.step += 1
            self.position.end_epoch()
            self._consider(epoch_ended=True, ending=ending)

    def leave_step(self) -> None:
        """The loop is over."""
        self._loop = None

    # -- inside --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """A signal that comes within the block is acted upon after it: it must not find a half-taken save."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        self._on_signal()

    def _signal(self) -> str | None:
        return self._signals.name if self._signals is not None else None

    def _consider(self, *, epoch_ended: bool, ending: bool) -> None:
        """Between two steps: takes the save that is due, and leaves if a signal came."""
        self._saving.raise_failure()
        signal = self._signal()
        epoch = self.position.counters.epoch if isinstance(self._loop, Epochs) else None
        moment = asking.Moment(
            step=self.step,
            now_s=time.monotonic(),
            epoch=epoch,
            epoch_ended=epoch_ended,
            ending=ending or signal is not None or self._stopping,
            signal=signal,
            metrics=self._metrics,
        )
        decision = self._saving.decide(moment)
        requested, self._requested = self._requested, None
        if requested is not None:
            handle, wait = requested
            handle.inside_step = False
            self._take(handle.reason, wait=wait, handle=handle)
            if wait:
                handle.wait()
        elif decision.save or (self._stopping and self._unsaved()):
            self._take(decision.reason if decision.save else "stop() was called", wait=signal is not None)
        if signal is not None and self._signals is not None:
            self._leave(self._signals)
        if isinstance(self._loop, Epochs) and self._signals is not None and self._unsaved():
            self._moment = self._snapshots.moment() if self._may_be_outside() else None

    def _may_be_outside(self) -> bool:
        """Whether what follows may be outside any step: the epoch's batches are used up, or nobody knows how many there are."""
        data = self.position.data
        length = data.batches_per_epoch if data is not None else None
        return length is not None and self.position.counters.batch >= length

    def _unsaved(self) -> bool:
        last = self._saving.last
        return last is None or last.step < self.step

    def _take(self, reason: str, *, wait: bool, handle: Save | None = None) -> Save | None:
        flattened = self._snapshots.now()
        about = self._snapshots.about(parent=self._parent(), metrics=self._metrics, reason=reason)
        return self._saving.take(flattened, self.step, about, wait=wait, handle=handle)

    def _parent(self) -> Any:
        last = self._saving.last
        return last.id if last is not None and last.committed else self._claiming.parent

    def _on_signal(self) -> None:
        """In the main thread, between two instructions: outside any step there is nothing to finish, so it acts at once."""
        name = self._signal()
        if name is None or self._inside or self._open or self._saving.attempt is None or self._closed or self._signals is None:
            return
        self._inside = True
        moment, self._moment = self._moment, None
        if moment is not None and moment.step == self.step and self._unsaved() and self._snapshots.untouched(moment):
            about = self._snapshots.about(parent=self._parent(), metrics=self._metrics, reason=f"{name} came", progress=moment.progress)
            self._saving.take(moment.flattened, moment.step, about, wait=True)
        self._leave(self._signals)

    def _leave(self, signals: SignalWatch) -> None:
        """Ends the process as the signal asked, with everything that is in flight committed."""
        self._inside = True
        self._saving.wait(CLOSE_DEADLINE_S)
        assert signals.received is not None
        if signals.deferred is not None:
            raise signals.deferred
        leaving = Preempted(signals.received)
        leaving_with(int(leaving.code or 0))
        raise leaving

    def _enter(self) -> None:
        """A loop begins: restored, claimed, and no step left open by an earlier one."""
        if self._disarmed:
            return
        self._check_process()
        if self._open:
            raise UsageError(
                f"step {self.step + 1} was left incomplete, so nothing after it can be saved",
                subject=self._run,
                hint="build a new Checkpointer: it resumes from the last checkpoint",
            )
        with self._undisturbed():
            self.restore()
            self._claim()

    def _claim(self) -> None:
        if self._saving.attempt is not None:
            return
        if not self._claiming.done and not self._claiming.exists():
            self.restore()
        attempt = self._claiming.claim()
        ownership.register((self._repo.id, run_key(self._run)), self)
        self._saving.begin(attempt, self.step, self._claiming.parent)
        if self._signals is not None:
            self._signals.notify = self._on_signal
            self._signals.install()

    def _check_armed(self) -> None:
        self._check_process()
        if self._disarmed:
            raise UsageError(
                "this Checkpointer was built while a worker imported the main module; it does nothing",
                hint='put the training under if __name__ == "__main__":',
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"this Checkpointer belongs to process {self._pid}; this is its forked child {os.getpid()}",
                subject=self._run,
                hint="use it in the process that built it, or build another one on another run",
            )
        if self._closed:
            raise UsageError("this Checkpointer is closed", subject=self._run, hint="build a new one: it resumes from the last checkpoint")

    def _close(self, timeout: float, *, ended_well: bool) -> None:
        if self._closed or self._disarmed or os.getpid() != self._pid:
            return
        self._inside = True
        try:
            if ended_well:
                self._last_save()
            self._saving.wait(timeout)
        finally:
            self._closed = True
            self._withdraw()
            if self._signals is not None:
                self._signals.restore()
            ownership.unregister((self._repo.id, run_key(self._run)), self)
            if self._saving.attempt is not None:
                self._saving.attempt.release()
            self._saving.close()
        self._say_what_is_left()
        if ended_well:
            self._saving.raise_failure()

    def _last_save(self) -> None:
        """A loop that somebody else owns ends here."""
        if self._saving.attempt is None or self._open or self._loop is not None or not self._unsaved():
            return
        moment = asking.Moment(step=self.step, now_s=time.monotonic(), ending=True, metrics=self._metrics)
        decision = self._saving.decide(moment)
        if decision.save:
            self._take(decision.reason, wait=False)

    def _say_what_is_left(self) -> None:
        self._saving.warn_of_unlogged_metrics()
        if self._open and self._saving.attempt is not None:
            last = self._saving.last
            since = f"the last checkpoint is step {last.step}" if last is not None and last.committed else "there is no checkpoint"
            warnings.warn(
                f"holdfast: step {self.step + 1} was left incomplete and is not saved; {since}",
                RuntimeWarning,
                stacklevel=4,
            )


def _weakly(owner: Checkpointer) -> Callable[[], None]:
    """Closes `owner` at the process's end if it still exists, without keeping it alive until then."""
    held = weakref.ref(owner)

    def close() -> None:
        found = held()
        if found is not None:
            found.close()

    return close


def _policies(
    state: object, save: object, keep: object, on_busy: object, on_error: object, memory_budget: object
) -> tuple[SavePolicy, KeepPolicy]:
    """The arguments checked, and the defaults where none was given."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f"state must be a mapping of names to what is to be saved, not {type(state).__name__}",
            subject="state",
            hint='write {"model": model, "optimizer": optimizer}',
        )
    policy = save if save is not None else every(minutes=10) | on.end() | on.signal()
    kept = keep if keep is not None else keeping.latest(3)
    if not isinstance(policy, SavePolicy):
        raise UsageError(f"save={save!r} does not say when to save", subject="save", hint="save=every(steps=200) | on.end()")
    if not isinstance(kept, KeepPolicy):
        raise UsageError(f"keep={keep!r} does not say what to keep", subject="keep", hint='keep=keep.latest(3) | keep.best(2, "val_loss")')
    if on_busy not in ("wait", "skip"):
        raise UsageError(f"on_busy={on_busy!r} is neither 'wait' nor 'skip'", subject="on_busy")
    if on_error not in ("warn", "raise"):
        raise UsageError(f"on_error={on_error!r} is neither 'warn' nor 'raise'", subject="on_error")
    if memory_budget is not None and (not isinstance(memory_budget, int) or memory_budget <= 0):
        raise UsageError(f"memory_budget={memory_budget!r} is no number of bytes", subject="memory_budget", hint="memory_budget=8 * 2**30")
    return policy, kept


def _count(value: object, what: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} takes a whole number of at least {least}, not {value!r}", subject=what)
    return value
