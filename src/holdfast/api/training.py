"""One process's training of one run: what the loops tell it, and what follows from that.

A save is taken only between two steps; a signal that comes while one is being taken is acted upon after it.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence

from holdfast.api import ownership
from holdfast.api.claiming import Claiming
from holdfast.api.leaving import Leaving
from holdfast.api.loops import Epochs, Steps
from holdfast.api.position import Position
from holdfast.api.saving import Saving
from holdfast.api.snapshot import Moment, Snapshots
from holdfast.engine.handle import Save
from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.model.names import CheckpointId, run_key
from holdfast.policy import saving as asking
from holdfast.repo.attempts import Attempt

CLOSE_DEADLINE_S = 600.0
GIVE_BACK_S = 20.0
"""What `close` sets aside, of the time it is given, for giving the run back."""
STOPPED = "stop() was called"


class Training:
    """The state of one training: counters, what is open, what is to be saved. Used from the training thread alone."""

    def __init__(
        self, run: str, position: Position, snapshots: Snapshots, saving: Saving, claiming: Claiming, *, catch: bool
    ) -> None:
        self.run = run
        self.position = position
        self.saving = saving
        self.claiming = claiming
        self.loop: Steps | Epochs | None = None
        self.stopping = False
        self.on_step: Callable[[Training], None] | None = None
        """Called after each step, and after each epoch, before anything is saved for it."""
        self.open = False
        """Whether the body of a step is running, or was left before its end."""
        self.between = False
        """Whether a loop is on its way from one step to the next, and perhaps waits for a batch. It may have counted
        what nobody has trained on yet, so a signal waits: for the end of the next step, or of the loop."""
        self._snapshots = snapshots
        self._leaving = Leaving(self._signal_came, catch=catch)
        self._foreign_loop = False
        """Whether somebody else's loop tells when a step is done."""
        self._requested: tuple[Save, bool] | None = None
        self._metrics: dict[str, float] = {}
        self._tags: list[str] = []
        """Of the step that is open."""
        self._moment: Moment | None = None
        self._completed: Moment | None = None
        """The last completed step, where a metric that comes late may yet ask for its save."""

    @property
    def step(self) -> int:
        return self.position.counters.step

    @property
    def key(self) -> ownership.Key:
        return (self.saving.repo.id, run_key(self.run))

    # -- beginning -----------------------------------------------------------------------------------------------------

    def enter(self, owner: ownership.Closable) -> None:
        """A loop begins: restored, claimed, and no step left open by an earlier one."""
        if self.open:
            raise UsageError(
                f"step {self.step + 1} was left incomplete, so nothing after it can be saved",
                subject=self.run,
                hint="build a new Checkpointer: it resumes from the last checkpoint",
            )
        with self._leaving.undisturbed():
            self.claiming.restore()
            self.claim(owner)

    def claim(self, owner: ownership.Closable) -> None:
        """Makes this process the run's owner, once; from then on signals are watched."""
        if self.saving.attempt is not None:
            return
        if not self.claiming.done and not self.claiming.exists():
            self.claiming.restore()
        attempt = self.claiming.claim()
        ownership.register(self.key, owner)
        self._begin(attempt)
        self._leaving.install()

    def _begin(self, attempt: Attempt) -> None:
        """Saves may be taken. A step that is in memory alone counts as one that is not saved yet."""
        saving, parent, adopted = self.saving, self.claiming.parent, self.claiming.adopted
        if adopted is None or adopted.adoptable.durable:
            saving.begin(attempt, self.step, parent)
        else:
            since_s = adopted.footer.saved_us / 1e6
            saving.begin(attempt, parent.step if parent is not None else 0, parent, since_s=since_s)
        if saving.memory is not None:
            since_s = adopted.footer.saved_us / 1e6 if adopted is not None else time.monotonic()
            saving.memory.begin(attempt, self._snapshots.now(), self.step, since_s)

    # -- what the loops tell -------------------------------------------------------------------------------------------

    def open_step(self, *, given_batch: bool = False) -> None:
        """The body of a step begins. `given_batch`: one is counted that this step is still to be trained on."""
        if not given_batch:
            self._heed_signal()
        self._metrics = {}
        self.open = True
        self._moment = self._completed = None

    def complete_step(self, *, epoch_ended: bool = False, ending: bool = False) -> None:
        """The body of a step has come to its end: it counts, and is saved if something asks for it."""
        with self._leaving.undisturbed():
            self.open = False
            self.position.counters.step += 1
            self._consider(epoch_ended=epoch_ended, ending=ending)
            self._heed_signal()  # one that came meanwhile: the next step's batch may be long in coming

    def end_epoch(self, *, ending: bool) -> None:
        """An epoch's body has come to its end."""
        with self._leaving.undisturbed():
            if self.open:
                self.open = False
                self.position.counters.step += 1
            self.position.end_epoch()
            self._consider(epoch_ended=True, ending=ending)

    def leave_loop(self) -> None:
        """The loop is over."""
        self.saving.saver.lift()
        with self._leaving.undisturbed():
            self._heed_signal()
            self.between = False
        self.loop = None
        self._await_late_metrics()

    def leave_batches(self) -> None:
        """No step follows now: an evaluation may, which has weights of its own in the model for a while. A signal that
        came on the way here is acted upon, and one that comes there can still save the last step."""
        self.saving.saver.lift()
        with self._leaving.undisturbed():
            self._keep_moment()
            self.between = False

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is completed in a loop that somebody else owns."""
        self._metrics = dict(metrics)
        self.saving.seen(metrics)
        self._foreign_loop = True
        self.position.counters.step = step - 1
        self.open = True
        self._completed = None
        self.complete_step()
        self._await_late_metrics()

    # -- what the user asks for ----------------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float]) -> None:
        """Metrics of the open step; outside, of the last completed one, noted if its checkpoint is taken already."""
        last = self.saving.last
        if not self.open and last is not None and last.step == self.step:
            self.saving.note(last, metrics)
        self._metrics.update(metrics)
        self.saving.seen(metrics)
        if not self.open and metrics.keys() & self.saving.policy.metrics():
            self._consider_late()

    def tag(self, names: Sequence[str]) -> None:
        """Tags the open step, which is then saved at its end; outside, the last completed one, which is saved at once
        if it is not yet."""
        last = self.saving.last
        if self.open:
            self._tags.extend(names)
        elif last is not None and last.step >= self.step:
            self.saving.tag(last, names)
        else:
            with self._leaving.undisturbed():
                self._take_tagged(names)

    def save(self, *, wait: bool) -> Save:
        """Saves now; inside a step at its end; where nothing is new, the last save with a warning."""
        self.saving.raise_failure()
        if self.open:
            return self._at_end_of_step(wait)
        last = self.saving.last
        if last is None or last.step < self.step:
            with self._leaving.undisturbed():
                taken = self._take("asked for", wait=wait)
            last = taken or last
            assert last is not None, "a save is skipped only because of one before"
        else:
            warnings.warn(
                f"holdfast: no step was completed since the save of step {last.step}, which is returned; "
                "a loop of your own says ckpt.step_done() after each step",
                RuntimeWarning,
                stacklevel=3,
            )
        if wait:
            last.wait()
        return last

    def _at_end_of_step(self, wait: bool) -> Save:
        if self._requested is None:
            handle = self.saving.saver.plan_save(self.step + 1, reason="asked for")
            handle.inside_step = True
        else:
            handle, before = self._requested
            wait = wait or before
        self._requested = (handle, wait)
        return handle

    # -- ending --------------------------------------------------------------------------------------------------------

    def close(self, owner: ownership.Closable, timeout: float, *, ended_well: bool) -> None:
        """Waits for what is in flight, gives the run back, puts signal handlers back, and says what is left undone."""
        self._leaving.hold_back()
        until = time.monotonic() + timeout
        spare = min(GIVE_BACK_S, timeout / 4)
        try:
            self._wait_until(until - spare)  # first: the last save is not to wait for a store that hangs
            if ended_well:
                self._last_save()
                self._wait_until(until - spare)
        except BaseException:
            self._end(owner, spare, quietly=True)
            raise
        self._end(owner, spare, well=ended_well)
        self._say_what_is_left()
        if ended_well:
            self.saving.raise_failure()
            if self._leaving.owed and sys.exc_info()[0] is None:
                self._leaving.leave()  # for what came behind the last step of several ranks, or while this was closing

    def _wait_until(self, until: float) -> None:
        try:
            self.saving.wait(max(until - time.monotonic(), 0.0))
        except DeadlineExceeded as error:
            self.saving.hangs(error)
            raise

    def _end(self, owner: ownership.Closable, timeout: float, *, quietly: bool = False, well: bool = False) -> None:
        """Gives everything back. `quietly`: something worse is being raised already, and the rest is a warning."""
        self._leaving.restore()
        ownership.unregister(self.key, owner)
        try:
            self.saving.give_back(timeout)
        except HoldfastError as error:
            if not quietly:
                raise
            warnings.warn(f"holdfast: {error}", RuntimeWarning, stacklevel=5)
        finally:
            if self.saving.company is not None:
                self.saving.company.part(timeout, well=well)

    def _last_save(self) -> None:
        """A loop that somebody else owns ends here. The others have told so themselves, and what is done to the state
        after them belongs to no step."""
        if self.saving.attempt is None or not self._foreign_loop or not self._unsaved():
            return
        alone = self.saving.company is None
        moment = self._asked(ending=True, signal=self._leaving.signal if alone else None)
        decision = self.saving.decide(moment)
        if decision.save or self.stopping:
            self._take(decision.reason if decision.save else STOPPED, wait=False, must=True)

    def _say_what_is_left(self) -> None:
        self.saving.warn_of_unlogged_metrics()
        if self.open and self.saving.attempt is not None:
            last = self.saving.last
            since = (
                f"the last checkpoint is step {last.step}"
                if last is not None and last.committed
                else "there is no checkpoint"
            )
            warnings.warn(
                f"holdfast: step {self.step + 1} was left incomplete and is not saved; {since}",
                RuntimeWarning,
                stacklevel=5,
            )

    # -- between two steps ---------------------------------------------------------------------------------------------

    def _consider(self, *, epoch_ended: bool, ending: bool) -> None:
        """Takes the save that is due, and leaves if a signal came."""
        self.saving.raise_failure()
        if self.on_step is not None:
            self.on_step(self)
        signal, company = self._leaving.signal, self.saving.company
        if company is not None:
            signal = company.completed(self.step, signal, ending=ending or self.stopping)
        moment = self._asked(
            epoch_ended=epoch_ended, ending=ending or signal is not None or self.stopping, signal=signal
        )
        decision = self.saving.decide(moment)
        requested, self._requested = self._requested, None
        tags, self._tags = self._tags, []
        if requested is not None:
            self.saving.tag(requested[0], tags)
            self._take_requested(*requested)
        elif tags:
            self._take_tagged(tags, decision.reason if decision.save else "", wait=signal is not None)
        elif decision.save:
            self._take(decision.reason, wait=signal is not None, must=moment.ending, eager=moment.ending)
        elif self.stopping and self._unsaved():
            self._take(STOPPED, wait=False, must=True)
        self._remember(moment)
        if signal is not None:
            self._leave(signal)
        if isinstance(self.loop, Epochs) and (epoch_ended or self.position.at_end):
            self._keep_moment()

    def _asked(self, *, epoch_ended: bool = False, ending: bool, signal: str | None) -> asking.Moment:
        """What policies are asked by."""
        return asking.Moment(
            step=self.step,
            now_s=time.monotonic(),
            epoch=self.position.counters.epoch if isinstance(self.loop, Epochs) else None,
            epoch_ended=epoch_ended,
            ending=ending,
            signal=signal,
            metrics=self._metrics,
        )

    def _keep_moment(self) -> None:
        """Remembers how the state is now, so that a signal outside any step can still save it."""
        if self._leaving.watched and self._unsaved():
            self._moment = self._snapshots.moment()

    def _heed_signal(self) -> None:
        """Leaves if a signal came, with the last completed step saved. The other ranks tell when theirs counts."""
        signal = self._leaving.signal
        if signal is None or self.saving.company is not None:
            return
        moment = self._asked(ending=True, signal=signal)
        decision = self.saving.decide(moment)
        if decision.save:
            self._take(decision.reason, wait=True, must=True, eager=True)
        self._leave(signal)

    def _remember(self, moment: asking.Moment) -> None:
        """Keeps the step in memory, where that is due and no save has just done it."""
        memory = self.saving.memory
        if memory is None or moment.signal is not None:
            return
        decision = memory.decide(moment)
        if decision.save:
            about = self._snapshots.about(parent=self._parent(), metrics=self._metrics, reason=decision.reason)
            memory.take(self._snapshots.now(), self.step, about, eager=moment.ending)

    def _take_requested(self, handle: Save, wait: bool) -> None:
        handle.inside_step = False
        if self._take(handle.reason, wait=wait, handle=handle) is None:
            handle.end(self.saving.turns.skipped(handle.step))
        if wait:
            handle.wait()

    def _take_tagged(self, tags: Sequence[str], reason: str = "", *, wait: bool = False) -> None:
        """A tag asks for a save of its step, which is never skipped."""
        reason = "; ".join([*([reason] if reason else []), f"tagged {', '.join(tags)}"])
        handle = self.saving.saver.plan_save(self.step, reason=reason)
        self.saving.tag(handle, tags)
        if self._take(reason, wait=wait, must=True, handle=handle) is None:
            handle.end(self.saving.turns.skipped(handle.step))

    def _await_late_metrics(self) -> None:
        """Remembers how the state is now, where a metric that has not come yet may still ask for this step."""
        late = self.saving.policy.metrics() - self._metrics.keys()
        if late and self.saving.attempt is not None and self._unsaved():
            self._completed = self._snapshots.moment()

    def _consider_late(self) -> None:
        """A metric came after its step. Inside `epochs` the end of the epoch asks for the save; else it is taken now,
        unless the state has gone on from what it was at that step."""
        before = self._completed
        if before is None or before.step != self.step or not self._unsaved():
            return
        moment = asking.Moment(step=self.step, now_s=time.monotonic(), metrics=self._metrics)
        decision = self.saving.decide(moment)
        if not decision.save:
            return
        with self._leaving.undisturbed():
            if self._snapshots.same_state(before):
                self._take(decision.reason, wait=False)
            else:
                self._completed = None
                self.saving.warn(
                    f"step {self.step} is not saved, though {decision.reason}: the state has changed since that step; "
                    "log what belongs to a step before training goes on"
                )

    def _take(
        self, reason: str, *, wait: bool, must: bool = False, handle: Save | None = None, eager: bool = False
    ) -> Save | None:
        due_s = time.monotonic()
        flattened = self._snapshots.now()
        about = self._snapshots.about(parent=self._parent(), metrics=self._metrics, reason=reason)
        return self.saving.take(
            flattened, self.step, about, wait=wait, must=must, handle=handle, eager=eager, due_s=due_s
        )

    def _unsaved(self) -> bool:
        last = self.saving.last
        return last is None or last.step < self.step

    def _parent(self) -> CheckpointId | None:
        last = self.saving.last
        return last.id if last is not None and last.committed else self.claiming.parent

    # -- signals -------------------------------------------------------------------------------------------------------

    def _signal_came(self, name: str) -> None:
        """In the main thread, between two instructions: outside any step there is nothing to finish, so it acts. In a
        loop that somebody else owns nobody knows where a step begins: the next `step_done` sees it, or `close`."""
        if self.open or self.between or self.saving.attempt is None or self.saving.company is not None:
            return
        if self._foreign_loop and self.loop is None:
            return
        self._leaving.hold_back()
        moment, self._moment = self._moment, None
        if moment is not None and moment.step == self.step and self._unsaved() and self._snapshots.untouched(moment):
            reason = f"{name} came"
            about = self._snapshots.about(
                parent=self._parent(), metrics=self._metrics, reason=reason, progress=moment.progress
            )
            self.saving.take(moment.flattened, moment.step, about, wait=True, must=True)
        self._leave()

    def _leave(self, name: str | None = None) -> None:
        """Ends the process as the signal asked, with everything that is in flight committed."""
        self._leaving.hold_back()
        self.saving.wait_to_leave(CLOSE_DEADLINE_S)
        self._leaving.leave(name)
