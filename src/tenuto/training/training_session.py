"""One process's training of one run: what the loops tell it, and what follows from that.

A save is taken only between two steps; a signal that comes while one is being taken is acted upon after it.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence

from tenuto.engine.save.handle import Save
from tenuto.errors import SaveFailed, TenutoError, UsageError
from tenuto.model.ids import CheckpointId, run_key
from tenuto.policy import save as asking
from tenuto.repo.ownership.claim import Attempt
from tenuto.state.position.training_position import TrainingPosition
from tenuto.training import run_registry
from tenuto.training.loops import Epochs, Steps
from tenuto.training.preemption import PreemptionHandler, await_saves, say_what_is_left, warn_of_epochs
from tenuto.training.resume import RunClaim
from tenuto.training.saves import RunSaver
from tenuto.training.snapshot import Snapshots, StateMark

# --------------------------------------------------------------------------------------------------
# Taking a save of the state: as it is now, or as it was at a moment since which nothing has changed it.


class SaveTrigger:
    """What one training saves. `metrics` are those of the step that is open, or of the last completed one."""

    def __init__(self, saving: RunSaver, snapshots: Snapshots, claiming: RunClaim, position: TrainingPosition) -> None:
        self._saving = saving
        self._snapshots = snapshots
        self._claiming = claiming
        self._position = position
        self.metrics: dict[str, float] = {}

    @property
    def parent(self) -> CheckpointId | None:
        last = self._saving.last
        return last.id if last is not None and last.committed else self._claiming.parent

    @property
    def step(self) -> int:
        """The last completed step, which is what is saved."""
        return self._position.counters.step

    @property
    def unsaved(self) -> bool:
        last = self._saving.last
        return last is None or last.step < self.step

    def take(
        self, reason: str, *, wait: bool, must: bool = False, handle: Save | None = None, eager: bool = False
    ) -> Save | None:
        """Of the state as it is now; as `Saving.take`."""
        due_s = time.monotonic()
        flattened = self._snapshots.now()
        about = self._snapshots.about(parent=self.parent, metrics=self.metrics, reason=reason)
        return self._saving.take(
            flattened, self.step, about, wait=wait, must=must, handle=handle, eager=eager, due_s=due_s
        )

    def requested(self, handle: Save, *, wait: bool, must: bool, eager: bool) -> None:
        """What `save` has asked for inside the step. Where it is skipped, its handle tells."""
        handle.inside_step = False
        if self.take(handle.reason, wait=wait, must=must, handle=handle, eager=eager) is None:
            handle.end(self._saving.admission.skipped(handle.step))
        if wait:
            handle.wait()

    def tagged(self, tags: Sequence[str], reason: str = "", *, wait: bool = False) -> None:
        """A tag asks for a save of its step, which is never skipped."""
        reason = "; ".join([*([reason] if reason else []), f"tagged {', '.join(tags)}"])
        handle = self._saving.saver.plan_save(self.step, reason=reason)
        self._saving.tag(handle, tags)
        if self.take(reason, wait=wait, must=True, handle=handle) is None:
            handle.end(self._saving.admission.skipped(handle.step))

    def as_it_was(self, moment: StateMark, reason: str) -> None:
        """Of the last completed step, if it is the one of `moment`, is not saved yet, and nothing has changed its
        tensors; else that is said."""
        if moment.step != self.step or not self.unsaved:
            return
        if not self._snapshots.untouched(moment, plain=False):
            self._saving.warn(
                f"step {moment.step} is not saved, though {reason}: the state has changed since that step"
            )
            return
        about = self._snapshots.about(parent=self.parent, metrics=self.metrics, reason=reason, progress=moment.progress)
        self._saving.take(moment.flattened, moment.step, about, wait=True, must=True)

    def in_memory(self, moment: asking.Moment) -> None:
        """Keeps the step in memory, where that is due and no save has just done it."""
        memory = self._saving.memory
        if memory is None or moment.signal is not None:
            return
        decision = memory.decide(moment)
        if decision.save and not memory.skips(self.step):
            due_s = time.monotonic()
            about = self._snapshots.about(parent=self.parent, metrics=self.metrics, reason=decision.reason)
            memory.take(self._snapshots.now(), self.step, about, due_s=due_s, eager=moment.ending)


# --------------------------------------------------------------------------------------------------
# The completed step that a metric which comes late may yet ask to save.


class LateMetricTrigger:
    """Remembers how the state was at the end of a step, while a metric that the policy goes by is still to come."""

    def __init__(self, saving: RunSaver, snapshots: Snapshots, trigger: SaveTrigger) -> None:
        self._saving = saving
        self._trigger = trigger
        self._snapshots = snapshots
        self._completed: StateMark | None = None

    def forget(self) -> None:
        """Another step has begun, or is done."""
        self._completed = None

    def mark(self) -> None:
        """A step is done, with the metrics that there are so far."""
        missing = self._saving.policy.metrics() - self._trigger.metrics.keys()
        if missing and self._trigger.unsaved and self._saving.attempt is not None:
            self._completed = self._snapshots.passing_moment()

    def reason(self) -> str:
        """Why that step is to be saved now that more metrics have come; empty where it is not."""
        before, step = self._completed, self._trigger.step
        if before is None or before.step != step or not self._trigger.unsaved:
            return ""
        decision = self._saving.decide(asking.Moment(step, time.monotonic(), metrics=self._trigger.metrics))
        return decision.reason if decision.save else ""

    def still_there(self, reason: str) -> bool:
        """Whether the state is as it was at the end of that step; said where it has gone on, and asked no more."""
        before = self._completed
        assert before is not None, "there is a reason to save it"
        if self._snapshots.untouched(before):
            return True
        self._completed = None
        self._saving.warn(
            f"step {before.step} is not saved, though {reason}: the state has changed since that step; "
            "log what belongs to a step before training goes on"
        )
        return False


# --------------------------------------------------------------------------------------------------
# What a body has asked to be saved at its end: by `save`, by tags, or by both.
#
# Behind the batches of an epoch the rest of its body runs. A save taken there would say that the batches are used and
# the rest is still to come, so a resume would run all of that once more, the scheduler's step among it. It is taken
# where the body ends, as inside a step.


class PendingRequests:
    """Of one training. `between`, as an argument: whether no step is open, so that the last completed one is meant."""

    def __init__(self, saving: RunSaver, snapshots: Snapshots, trigger: SaveTrigger) -> None:
        self._saving = saving
        self._snapshots = snapshots
        self._trigger = trigger
        self._requested: tuple[Save, bool] | None = None
        self._tags: list[str] = []
        self._then: StateMark | None = None
        """How the state was when the last completed step was asked for."""

    def tag(self, names: Sequence[str], *, between: bool) -> None:
        self._tags.extend(names)
        self._mark(between)

    def save(self, *, wait: bool, between: bool) -> Save:
        """The handle of the save that will be taken. `wait`: the end of the body waits until it is committed."""
        if self._requested is None:
            step = self._trigger.step + (not between)
            handle = self._saving.saver.plan_save(step, reason="asked for")
            handle.inside_step = True
            self._mark(between)
        else:
            handle, before = self._requested
            wait = wait or before
        self._requested = (handle, wait)
        return handle

    def take(self, decision: asking.Decision, moment: asking.Moment) -> bool:
        """The body has ended: takes what it asked for; whether that was anything. `decision`: of the policy."""
        requested, tags = self._forget()
        if requested is not None:
            self._saving.tag(requested[0], tags)
            must = bool(tags) or moment.ending
            self._trigger.requested(requested[0], wait=requested[1], must=must, eager=moment.ending)
        elif tags:
            self._trigger.tagged(tags, decision.reason if decision.save else "", wait=moment.signal is not None)
        return requested is not None or bool(tags)

    def leave(self) -> None:
        """The loop was broken out of. What was asked for behind the batches is taken now, if the state is still what it
        was then; a step that was left incomplete is never saved."""
        then = self._then
        if then is None:
            return
        requested, tags = self._forget()
        if not self._snapshots.untouched(then):
            missed = f"step {then.step} is not saved, though it was asked for: the state has changed since"
            self._saving.warn(f"{missed} its loop was left")
            if requested is not None:
                requested[0].end(
                    SaveFailed(
                        missed,
                        subject=str(requested[0].id),
                        hint="change nothing in the state between asking for a save and leaving the loop",
                    )
                )
        elif requested is not None:
            self._saving.tag(requested[0], tags)
            self._trigger.requested(requested[0], wait=requested[1], must=True, eager=True)
        else:
            self._trigger.tagged(tags)

    def _mark(self, between: bool) -> None:
        if between and self._then is None:
            self._then = self._snapshots.moment()

    def _forget(self) -> tuple[tuple[Save, bool] | None, list[str]]:
        requested, tags = self._requested, self._tags
        self._requested, self._tags, self._then = None, [], None
        return requested, tags


CLOSE_DEADLINE_S = 600.0
GIVE_BACK_S = 20.0
"""What `close` sets aside, of the time it is given, for giving the run back."""
STOPPED = "stop() was called"


class TrainingSession:
    """The state of one training: counters, what is open, what is to be saved. Used from the training thread alone."""

    def __init__(
        self,
        run: str,
        position: TrainingPosition,
        snapshots: Snapshots,
        saving: RunSaver,
        claiming: RunClaim,
        *,
        catch: bool,
    ) -> None:
        self.run = run
        self.position = position
        self.saving = saving
        self.claiming = claiming
        self.loop: Steps | Epochs | None = None
        self.stopping = False
        self.on_step: Callable[[TrainingSession], None] | None = None
        """Called after each step, and after each epoch, before anything is saved for it."""
        self.closed = False
        self.open = False
        """Whether the body of a step is running, or was left before its end."""
        self.between = False
        """Whether a loop is on its way from one step to the next, and perhaps waits for a batch. It may have counted
        what nobody has trained on yet, so a signal waits: for the end of the next step, or of the loop."""
        self._snapshots = snapshots
        self._preemption = PreemptionHandler(self._signal_came, catch=catch)
        self._foreign_loop = False
        """Whether somebody else's loop tells when a step is done."""
        self._trigger = SaveTrigger(saving, snapshots, claiming, position)
        self._requests = PendingRequests(saving, snapshots, self._trigger)
        self._early: dict[str, float] = {}
        """Metrics of an epoch's body that has taken no batch yet: of the step before if it takes one, else its own."""
        self._moment: StateMark | None = None
        self._late_trigger = LateMetricTrigger(saving, snapshots, self._trigger)

    @property
    def step(self) -> int:
        return self.position.counters.step

    @property
    def key(self) -> run_registry.Key:
        return (self.saving.repo.id, run_key(self.run))

    # -- beginning -----------------------------------------------------------------------------------------------------

    def enter(self, checkpointer: object) -> None:
        """A loop begins: restored, claimed, and no step left open by an earlier one."""
        if self.open:
            raise UsageError(
                f"step {self.step + 1} was left incomplete, so nothing after it can be saved",
                subject=self.run,
                hint="build a new Checkpointer: it resumes from the last checkpoint",
            )
        with self._preemption.undisturbed():
            if self.loop is not None:
                self._requests.leave()
                self.loop, self.stopping = None, False  # what ended that loop ends no other one
            self.claiming.restore()
            self.claim(checkpointer)
        self._settle_early()

    def claim(self, checkpointer: object) -> None:
        """Makes this process the run's owner, once; from then on signals are watched."""
        if self.saving.attempt is not None:
            return
        if not self.claiming.done and not self.claiming.hidden_by_saving():
            self.claiming.restore()
        attempt = self.claiming.claim()
        run_registry.register(self.key, self, checkpointer)
        self._begin(attempt)
        self._preemption.install()

    def _begin(self, attempt: Attempt) -> None:
        """Saves may be taken. A step that is in memory alone counts as one that is not saved yet."""
        saving, parent, adopted = self.saving, self.claiming.parent, self.claiming.restored_image
        if adopted is None or adopted.verdict.durable:
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
        self._refuse_if_closed()
        if given_batch:
            self._settle_early()
        else:
            self._act_on_signal()
        self._trigger.metrics, self._early = self._early, {}
        self.open = True
        self._moment = None
        self._late_trigger.forget()

    def complete_step(self, *, epoch_ended: bool = False, ending: bool = False) -> None:
        """The body of a step has come to its end: it counts, and is saved if something asks for it."""
        self._refuse_if_closed()
        with self._preemption.undisturbed():
            self.open = False
            self.position.counters.step += 1
            self._consider(epoch_ended=epoch_ended, ending=ending)
            self._act_on_signal()  # one that came meanwhile: the next step's batch may be long in coming

    def end_epoch(self, *, ending: bool) -> None:
        """An epoch's body has come to its end."""
        self._refuse_if_closed()
        with self._preemption.undisturbed():
            if self.open:
                self.open = False
                self.position.counters.step += 1
            self.position.end_epoch()
            self._consider(epoch_ended=True, ending=ending)

    def _refuse_if_closed(self) -> None:
        """What the state is now, nobody knows: the Checkpointer that closed this one may have restored it."""
        if self.closed:
            hint = "build a new one: it resumes from the last checkpoint"
            raise UsageError("the Checkpointer of this loop is closed", subject=self.run, hint=hint)

    def leave_loop(self) -> None:
        """The loop is over."""
        self.saving.saver.release_fence()
        with self._preemption.undisturbed():
            self._act_on_signal()
            self.between = False
        self.loop, self.stopping = None, False
        self._late_trigger.mark()

    def leave_batches(self) -> None:
        """No step follows now: an evaluation may, which has weights of its own in the model for a while. A signal that
        came on the way here is acted upon, and one that comes there can still save the last step."""
        self.saving.saver.release_fence()
        with self._preemption.undisturbed():
            self._keep_moment()
            self.between = False

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is completed in a loop that somebody else owns."""
        self._trigger.metrics = dict(metrics)
        self.saving.seen(metrics)
        if not self._foreign_loop:
            warn_of_epochs(self.saving)
        self._foreign_loop = True
        self.position.counters.step = step - 1
        self.open = True
        self._late_trigger.forget()
        self.complete_step()
        self._late_trigger.mark()

    # -- what the user asks for ----------------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float]) -> None:
        """Metrics of the open step; outside, of the last completed one, noted if its checkpoint is taken already."""
        if isinstance(self.loop, Epochs) and self.loop.unused:
            self._early.update(metrics)
            self.saving.seen(metrics)
            return
        self._log(metrics)

    def _log(self, metrics: Mapping[str, float]) -> None:
        last = self.saving.last
        if not self.open and last is not None and last.step == self.step:
            self.saving.note(last, metrics)
        self._trigger.metrics.update(metrics)
        self.saving.seen(metrics)
        if not self.open and metrics.keys() & self.saving.policy.metrics():
            self._consider_late()

    def _settle_early(self) -> None:
        """Metrics that came before the first batch of an epoch belong to the step before it."""
        early, self._early = self._early, {}
        if early:
            self._log(early)

    def tag(self, names: Sequence[str]) -> None:
        """Tags the open step, which is then saved at its end; outside, the last completed one, which is saved as by
        `save` if it is not yet."""
        last = self.saving.last
        if self.open or self._finishing:
            self._requests.tag(names, between=not self.open)
        elif last is not None and last.step >= self.step:
            self.saving.tag(last, names)
        else:
            with self._preemption.undisturbed():
                self._trigger.tagged(names)

    def save(self, *, wait: bool) -> Save:
        """Saves now; inside a step, or behind the batches of an epoch, at the end of the body; where nothing is new,
        the last save with a warning."""
        self.saving.raise_failure()
        if self.open or self._finishing:
            return self._requests.save(wait=wait, between=not self.open)
        last = self.saving.last
        if last is None or last.step < self.step:
            with self._preemption.undisturbed():
                last = self._trigger.take("asked for", wait=wait) or last
            assert last is not None, "a save is skipped only because of one before"
        else:
            warnings.warn(
                f"tenuto: no step was completed since the save of step {last.step}, which is returned; "
                "a loop of your own says ckpt.step_done() after each step",
                RuntimeWarning,
                stacklevel=3,
            )
        if wait:
            last.wait()
        return last

    @property
    def _finishing(self) -> bool:
        """Whether the rest of an epoch's body runs, behind its batches, and its last step is not saved yet."""
        return isinstance(self.loop, Epochs) and self.loop.finishing and self._trigger.unsaved

    # -- ending --------------------------------------------------------------------------------------------------------

    def close_replaced(self) -> None:
        """Another Checkpointer of this process takes the run. As at the process's end nothing new is saved: nobody has
        said that training ended here, and its objects may have been changed since its last step."""
        self.close(CLOSE_DEADLINE_S, ended_well=True, replaced=True)

    def close(self, timeout: float, *, ended_well: bool, replaced: bool = False) -> None:
        """Waits for what is in flight, gives the run back, puts signal handlers back, and says what is left undone.
        Once."""
        if self.closed:
            return
        self.closed = True
        self._preemption.hold_back()
        until = time.monotonic() + timeout
        spare = min(GIVE_BACK_S, timeout / 4)
        try:
            await_saves(self.saving, until - spare)  # first: the last save is not to wait for a store that hangs
            self._settle_early()
            if ended_well and not replaced:
                self._requests.leave()
                self._last_save()
                await_saves(self.saving, until - spare)
        except BaseException:
            self._end(spare, quietly=True)
            raise
        self._end(spare, well=ended_well)
        incomplete = self.open and self.saving.attempt is not None
        lacks, left = replaced and self._lacks_last_save, self._left_behind and not replaced
        say_what_is_left(self.saving, self.step, incomplete=incomplete, replaced=lacks, left=left)
        if ended_well:
            self.saving.raise_failure()
            if self._preemption.owed and sys.exc_info()[0] is None:
                self._preemption.leave()  # for what came behind the last step of several ranks, or during this close

    def _end(self, timeout: float, *, quietly: bool = False, well: bool = False) -> None:
        """Gives everything back. `quietly`: something worse is being raised already, and the rest is a warning."""
        self._preemption.restore()
        run_registry.unregister(self.key, self)
        try:
            self.saving.give_back(timeout)
        except TenutoError as error:
            if not quietly:
                raise
            warnings.warn(f"tenuto: {error}", RuntimeWarning, stacklevel=5)
        finally:
            self.saving.part(timeout, well=well)

    def _last_save(self) -> None:
        """A loop that somebody else owns ends here. The others have told so themselves, and what is done to the state
        after them belongs to no step."""
        if not self._lacks_last_save:
            return
        signal = self._preemption.signal if self.saving.group.acts_at_once else None
        moment = self._asked(ending=True, signal=signal)
        decision = self.saving.decide(moment)
        if decision.save or self.stopping:
            self._trigger.take(decision.reason if decision.save else STOPPED, wait=False, must=True)

    @property
    def _left_behind(self) -> bool:
        """Whether a loop was broken out of between two steps, the last one not saved. A signal is told otherwise."""
        begun = self.loop is not None and not self.open and self.saving.attempt is not None
        return (
            begun and self._trigger.unsaved and self.step > self.saving.first_step and self._preemption.signal is None
        )

    @property
    def _lacks_last_save(self) -> bool:
        return self.saving.attempt is not None and self._foreign_loop and self._trigger.unsaved

    # -- between two steps ---------------------------------------------------------------------------------------------

    def _consider(self, *, epoch_ended: bool, ending: bool) -> None:
        """Takes the save that is due, and leaves if a signal came."""
        self.saving.raise_failure()
        if self.on_step is not None:
            self.on_step(self)
        group = self.saving.group
        signal = group.completed(self.step, self._preemption.signal, ending=ending or self.stopping)
        moment = self._asked(
            epoch_ended=epoch_ended, ending=ending or signal is not None or self.stopping, signal=signal
        )
        decision = self.saving.decide(moment)
        if not self._requests.take(decision, moment):
            if decision.save:
                self._trigger.take(decision.reason, wait=signal is not None, must=moment.ending, eager=moment.ending)
            elif self.stopping and self._trigger.unsaved:
                self._trigger.take(STOPPED, wait=False, must=True)
        self._trigger.in_memory(moment)
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
            metrics=self._trigger.metrics,
        )

    def _keep_moment(self) -> None:
        """Remembers how the state is now, so that a signal outside any step can still save it."""
        if self._preemption.watched and self._trigger.unsaved:
            self._moment = self._snapshots.moment()

    def _act_on_signal(self) -> None:
        """Leaves if a signal came, with the last completed step saved. The other ranks tell when theirs counts."""
        signal = self._preemption.signal
        if signal is None or not self.saving.group.acts_at_once:
            return
        moment = self._asked(ending=True, signal=signal)
        decision = self.saving.decide(moment)
        if decision.save:
            self._trigger.take(decision.reason, wait=True, must=True, eager=True)
        self._leave(signal)

    def _consider_late(self) -> None:
        """A metric came after its step. Inside `epochs` the end of the epoch asks for the save; else it is taken now,
        unless the state has gone on from what it was at that step."""
        reason = self._late_trigger.reason()
        if reason:
            with self._preemption.undisturbed():
                if self._late_trigger.still_there(reason):
                    self._trigger.take(reason, wait=False)

    # -- signals -------------------------------------------------------------------------------------------------------

    def _signal_came(self, name: str) -> None:
        """In the main thread, between two instructions: outside any step there is nothing to finish, so it acts. In a
        loop that somebody else owns nobody knows where a step begins: the next `step_done` sees it, or `close`."""
        if self.open or self.between or self.saving.attempt is None or not self.saving.group.acts_at_once:
            return
        if self._foreign_loop and self.loop is None:
            return
        self._preemption.hold_back()
        moment, self._moment = self._moment, None
        if moment is not None:
            self._trigger.as_it_was(moment, f"{name} came")
        self._leave()

    def _leave(self, name: str | None = None) -> None:
        """Ends the process as the signal asked, with everything that is in flight committed."""
        self._preemption.hold_back()
        self.saving.wait_to_leave(CLOSE_DEADLINE_S)
        self._preemption.leave(name)


# --------------------------------------------------------------------------------------------------
# Claiming a run for what is to be saved, where that neither hides checkpoints nor counts a step that is not there.


def claim_to_save(training: TrainingSession, checkpointer: object) -> None:
    """Claims the run, unless a save would then hide what nobody has restored (UsageError)."""
    if not training.claiming.done and training.claiming.hidden_by_saving():
        raise UsageError(
            f"run {training.run!r} has checkpoints, and nothing was restored: saving would hide them",
            subject=training.run,
            hint="call ckpt.restore() first, or pass resume_from=None to start afresh on purpose",
        )
    training.claim(checkpointer)


def claim_to_count(training: TrainingSession, checkpointer: object) -> bool:
    """As to save; whether the step that is done counts. It does not where another process has committed since the
    restore: what that one saved is in the state now, and training goes on from there."""
    before, step = training.claiming.restored, training.step
    claim_to_save(training, checkpointer)
    found = training.claiming.restored
    if found is before or found is None:
        return True
    training.saving.warn(
        f"step {step + 1} is dropped: another process had committed step {found.step} before this one owned the "
        "run, and training goes on from there"
    )
    return False
