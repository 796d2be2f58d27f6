"""The session of one training: what its loops and its user ask for, and the saves that follow from that.

A save is taken only between two steps; a signal that comes while a call of ours is under way is acted upon after it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tenuto import events, log_lines
from tenuto.concurrency.interruption import undisturbed
from tenuto.engine.group.group import leave_on_error, training_group
from tenuto.engine.save.handle import Save
from tenuto.errors import TenutoError, UsageError
from tenuto.events import Emitter
from tenuto.model.ids import CheckpointId, run_key
from tenuto.policy.save import Moment
from tenuto.ranks.contract import Ranks
from tenuto.state.declarations import Late
from tenuto.state.position.training_position import TrainingPosition
from tenuto.store.contract import Where
from tenuto.training import fresh_start, run_registry
from tenuto.training.arguments import Settings
from tenuto.training.logged_metrics import CarriedMetrics
from tenuto.training.loops import Epochs, Steps
from tenuto.training.pending_saves import LateMetricTrigger, PendingRequests
from tenuto.training.preemption import PreemptionHandler, await_saves, send_again, warn_of_unsaved
from tenuto.training.resume import RunClaim
from tenuto.training.saves import RunSaver
from tenuto.training.session_probe import SessionProbe, known_proof, session_probe
from tenuto.training.snapshot import Snapshots, StateMark
from tenuto.training.stale_counts import StaleCounts
from tenuto.training.uncounted import FirstSave, UncountedBatches, warn_of_epochs

CLOSE_DEADLINE_S = 600.0
REST_S = 10.0
"""How long the rest of an epoch's body may take once a signal has come: less than most give to leave."""
GIVE_BACK_S = 20.0
"""The part of the time given to `close` that is reserved for giving the run back."""
STOPPED = "stop() was called"


class TrainingSession:
    """The state of one training: counters, what is open, what is to be saved. Used from the training thread only."""

    def __init__(
        self,
        run: str,
        position: TrainingPosition,
        snapshots: Snapshots,
        saving: RunSaver,
        claiming: RunClaim,
        *,
        catch: bool,
        probe: SessionProbe | None = None,
    ) -> None:
        self.run = run
        self.position = position
        self.saving = saving
        self.claiming = claiming
        self.loop: Steps | Epochs | None = None
        self.stopping = False
        self.metrics: dict[str, float] = {}
        """Those of the open step, or of the last completed one."""
        self.closed = False
        self.open = False
        """Whether the body of a step is running, or was left before its end."""
        self.stays = False
        """Whether signals still end the process with their status once this one is closed."""
        self.prewarm_s = 0.0
        """Seconds that planning and taking memory took. 0 with several ranks: each takes its share of what was restored
        when training begins."""
        self._prepared = self._fenced = False
        self._probe = probe
        self._snapshots = snapshots
        self._preemption = PreemptionHandler(self._signal_came, catch=catch)
        self._foreign_loop = False
        """Whether a loop of the user's own calls `step_done`."""
        self._uncounted = UncountedBatches(saving, position)
        self.first_save = FirstSave(self)
        self._stale_counts = StaleCounts(snapshots.state)
        self._requests = PendingRequests(self, saving, snapshots)
        self._late_metrics = LateMetricTrigger(self, saving, snapshots)
        self._carried = CarriedMetrics()
        self._early: dict[str, float] = {}
        """Metrics of an epoch's body that has taken no batch yet: of the step before if it takes one, else its own."""
        self._mark: StateMark | None = None
        """The last completed step, which a signal outside any step can still save."""
        self._postponed = ""
        self._again: threading.Timer | None = None
        """What sends a signal once more, while the rest of an epoch's body is waited for."""
        """Why the last step of an epoch is to be saved, until its batches have come to their end."""

    @classmethod
    def create(
        cls, where: Where, state: Mapping[str, Any], data: Any, *, ranks: Ranks, settings: Settings, emitter: Emitter
    ) -> TrainingSession:
        """Meets the other ranks, opens the repository, which is created where there is none, and takes memory for
        saves. Restores and claims nothing."""
        probe = session_probe(ranks.rank, ranks.world_size)
        if probe is not None:
            where, settings = probe.replace(where, settings)
        run, patience_s = settings.run, settings.ranks_timeout_s
        group, repo = training_group(
            ranks,
            where,
            run,
            emitter,
            patience_s,
            memory=settings.memory,
            writers=settings.writers,
            facts=settings.alike(),
            before_create=None
            if settings.resume_from is None
            else lambda store: fresh_start.check_new_repository(store, run, emitter),
            silence_s=settings.ranks_silence_s,
        )
        fresh_start.opened(repo.url)
        with leave_on_error(group):
            position = TrainingPosition(data, ranks.rank, ranks.world_size)
            snapshots = Snapshots(state, position, settings.watched, settings.modes, keep=repr(settings.keep))
            saving = RunSaver(repo, settings, emitter, group, state, ranks=ranks)
            tier = saving.memory.tier if saving.memory is not None else None
            claiming = RunClaim(repo, settings, state, position, emitter=emitter, group=group, memory=tier)
            catch = settings.save.catches_signals
            session = cls(run, position, snapshots, saving, claiming, catch=catch, probe=probe)
            claiming.on_claimed = saving.expect
            claiming.tiers, claiming.emergency = saving.tiers, saving.emergency
            session._fenced = settings.fenced
            if not any(type(value) is Late for value in state.values()):  # else once they are there
                session.prepare()
            if group.coordinates:
                snapshots.proof = known_proof(repo, snapshots)
            if probe is not None:
                probe.attach(session, snapshots, (state, data))
                claiming.on_restored = probe.restored
                position.on_batch = probe.batch_given
        return session

    @property
    def step(self) -> int:
        """The last completed step, which is what is saved."""
        return self.position.counters.step

    @property
    def unsaved(self) -> bool:
        last = self.saving.last
        return last is None or last.step < self.step

    @property
    def key(self) -> run_registry.Key:
        return (self.saving.repo.id, run_key(self.run))

    def prepare(self) -> None:
        """Plans saves of the state as it is now, and takes memory for them."""
        self._prepared = True
        self.prewarm_s += self.saving.prewarm(self._snapshots.now)
        if self._fenced:
            self.saving.capture_fenced(self._snapshots.state)

    # -- beginning -----------------------------------------------------------------------------------------------------

    def enter(self, checkpointer: object) -> None:
        """Begins a loop: restored, claimed, and no step left open by an earlier one."""
        if self.open:
            raise UsageError(
                f"step {self.step + 1} was left incomplete, so nothing after it can be saved",
                subject=self.run,
                hint="build a new Checkpointer: it resumes from the last checkpoint",
            )
        if self.loop is not None:
            self._requests.leave()
            self.loop, self.stopping = None, False  # what ended that loop ends no other one
        self.claiming.restore()
        self.claim(checkpointer)
        self._settle_early()

    def claim(self, checkpointer: object) -> None:
        """Makes this process the run's owner, once; from then on signals are watched."""
        saving, claiming = self.saving, self.claiming
        if saving.attempt is not None:
            return
        if not claiming.done and not claiming.hidden_by_saving():
            claiming.restore()
        attempt = claiming.claim()
        claiming.report()
        if not self._prepared:
            self.prepare()
        run_registry.register(self.key, self, checkpointer)
        parent, image = claiming.parent, claiming.restored_image
        since_s = image.footer.saved_us / 1e6 if image is not None else None
        if claiming.only_in_memory:  # counts as not saved yet
            saving.begin(attempt, parent.step if parent is not None else 0, parent, since_s=since_s, at=self.step)
        else:
            saving.begin(attempt, self.step, parent)
        if saving.memory is not None:
            since_s = time.monotonic() if since_s is None else since_s
            saving.memory.begin(attempt, self._snapshots.now(), self.step, since_s)
        self._preemption.install()

    def claim_to_save(self, checkpointer: object) -> None:
        """Claims the run; raises UsageError if a save would then hide checkpoints that were not restored."""
        if not self.claiming.done and self.claiming.hidden_by_saving():
            raise UsageError(
                f"run {self.run!r} has checkpoints, and nothing was restored: saving would hide them",
                subject=self.run,
                hint="call ckpt.restore() first, or pass resume_from=None to start afresh on purpose",
            )
        self.claim(checkpointer)

    def claim_to_count(self, checkpointer: object) -> bool:
        """Claims as `claim_to_save`; returns whether the step that is done counts. It does not where another process
        has committed since the restore: what that one saved is in the state now, and training resumes from there."""
        before, step = self.claiming.restored, self.step
        self.claim_to_save(checkpointer)
        found = self.claiming.restored
        if found is before or found is None:
            return True
        self.saving.report(
            f"step {step + 1} is dropped: another process committed step {found.step} before this one owned the run, "
            "and training resumes from there"
        )
        return False

    # -- what the loops report -----------------------------------------------------------------------------------------

    def open_step(self, *, given_batch: bool = False) -> None:
        """Begins the body of a step. `given_batch`: one is counted that this step is still to be trained on."""
        self._refuse_if_closed()
        if given_batch:
            self._settle_early()
        else:
            self._act_on_signal()
        self._leave_metrics()
        self.first_save.begin()
        self.metrics, self._early = self._early, {}
        self.open = True
        self._mark, self._postponed = None, ""
        self._late_metrics.clear()

    def complete_step(self, *, epoch_ended: bool = False, ending: bool = False, rest_follows: bool = False) -> None:
        """Counts the step whose body has ended, and saves it if something asks for it. `rest_follows`: it was the last
        of its epoch, whose body has a rest that belongs to it; the save is then taken where that ends."""
        self._refuse_if_closed()
        self.open = False
        self.position.complete_step(own_loop=self._foreign_loop and self.loop is None)
        self.first_save.end()
        self._consider(epoch_ended=epoch_ended, ending=ending, rest_follows=rest_follows)
        if not rest_follows:
            self._act_on_signal()  # one that came meanwhile: the next step's batch may be long in coming

    def end_epoch(self, *, ending: bool) -> None:
        """Ends an epoch, whose body has ended."""
        self._refuse_if_closed()
        if self.open:
            self.open = False
            self.position.complete_step()
            self.first_save.end()
        self.position.end_epoch()
        self._consider(epoch_ended=True, ending=ending)
        self._act_on_signal()

    def _refuse_if_closed(self) -> None:
        """Raises UsageError once closed: the Checkpointer that closed this one may have restored another state."""
        if self.closed:
            hint = "build a new one: it resumes from the last checkpoint"
            raise UsageError("the Checkpointer of this loop is closed", subject=self.run, hint=hint)

    def leave_loop(self) -> None:
        self.first_save.end()
        self.saving.saver.release_fence()
        self._act_on_signal()
        self.loop, self.stopping = None, False
        self._late_metrics.mark()

    def leave_batches(self, *, none_left: bool = False) -> None:
        """Prepares for what follows an epoch's batches, such as an evaluation, which has weights of its own in the
        model for a while. `none_left`: training resumed behind the last of them."""
        self.saving.saver.release_fence()
        self._mark_state()
        reason, self._postponed = self._postponed, ""
        if reason:
            self._requests.save(wait=False, between=True, reason=reason, mark=self._mark)
        if none_left:
            self.saving.report(
                f"epoch {self.position.counters.epoch + 1} has no batches left behind step {self.step}, from which "
                "training resumed: ckpt.batches is empty there, and the rest of the body is run"
            )

    def step_done(self, step: int, metrics: Mapping[str, float], told: int | None, epoch_ended: bool | None) -> None:
        """Completes a step of a loop of the user's own. `epoch_ended`: None in a loop that does not say."""
        counters = self.position.counters
        epoch = counters.epoch + bool(epoch_ended) if told is None else told
        if epoch < counters.epoch:
            raise UsageError(
                f"epoch {epoch} is below the completed ones, {counters.epoch}",
                subject="step_done",
                hint="epoch= is the number of completed epochs, the one that this step ends among them",
            )
        self._leave_metrics()
        self.metrics = dict(metrics)
        self.saving.seen(metrics, step)
        if not self._foreign_loop and epoch_ended is None:
            warn_of_epochs(self.saving)
        self._foreign_loop = True
        if epoch_ended is not None or told is not None:
            self.position.epochs_told = True
        counters.step, counters.epoch = step - 1, epoch
        self.open = True
        self._late_metrics.clear()
        self.complete_step(epoch_ended=bool(epoch_ended))
        self._late_metrics.mark()

    def epoch_was_one_step(self) -> None:
        self._uncounted.warn_of_one_step()

    # -- what the user asks for ----------------------------------------------------------------------------------------

    def restore_random_state(self) -> None:
        """Restores the random state of what was restored, before the first step."""
        if not self.claiming.done:
            raise UsageError("nothing was restored yet", subject=self.run, hint="call ckpt.restore() first")
        restored = self.claiming.restored
        if self.step > (restored.step if restored is not None else 0):
            raise UsageError(
                f"step {self.step} is completed since the restore, and the random state belongs before the first step",
                subject=self.run,
                hint="call it once everything is ready to train, before the first step",
            )
        self.position.restore_random_state()

    def _leave_metrics(self) -> None:
        """Leaves the metrics of the last completed step to the next checkpoint, if that step has none."""
        if self.metrics and self.unsaved:
            self._carried.add(self.metrics)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Logs metrics of the open step; outside, of the last completed one, as a note if its checkpoint is taken.
        Those of a step without a checkpoint belong to the next one."""
        if isinstance(self.loop, Epochs) and self.loop.unused:
            self._early.update(metrics)
            self.saving.seen(metrics, self.step)
            return
        self._log(metrics)

    def _log(self, metrics: Mapping[str, float]) -> None:
        last = self.saving.last
        if not self.open and last is not None and last.step == self.step:
            self.saving.note(last, metrics)
            self._carried.noted(last, metrics)
        self.metrics.update(metrics)
        self.saving.seen(metrics, self.step + self.open)
        if not self.open and metrics.keys() & self.saving.policy_metrics:
            self._consider_late()

    def _settle_early(self) -> None:
        """Logs metrics that came before the first batch of an epoch: they belong to the step before it."""
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
            self.take_tagged(names)

    def save(self, *, wait: bool) -> Save:
        """Saves now; inside a step, or behind the batches of an epoch, at the end of the body; where nothing is new,
        returns the last save with a warning."""
        self.saving.raise_loss()
        self.saving.raise_failure()
        if self.open or self._finishing:
            return self._requests.save(wait=wait, between=not self.open)
        last = self.saving.last
        if last is None or last.step < self.step:
            last = self.take("asked for", wait=wait) or last
            assert last is not None, "a save is skipped only because of one before"
        else:
            events.warn(
                f"no step was completed since the save of step {last.step}, which is returned; "
                "a loop of your own says ckpt.step_done() after each step"
            )
        if wait:
            last.wait()
        return last

    @property
    def _finishing(self) -> bool:
        """Whether the rest of an epoch's body runs, behind its batches, and its last step is not saved yet."""
        return isinstance(self.loop, Epochs) and self.loop.finishing and self.unsaved

    # -- taking saves --------------------------------------------------------------------------------------------------

    def take(
        self, reason: str, *, wait: bool, must: bool = False, handle: Save | None = None, eager: bool = False
    ) -> Save | None:
        """Takes a save of the state as it is now; the rest as in `RunSaver.take`."""
        due_s = time.monotonic()
        self._uncounted.warn()
        flattened = self._snapshots.now()
        metrics = self._carried.with_those_of(self.metrics)
        about = self._snapshots.about(parent=self._parent, metrics=metrics, reason=reason)
        if stale := self._stale_counts.check(self.step, self.position.counters.epoch, flattened.sources):
            self.saving.warn(stale)
        save = self.saving.take(
            flattened, self.step, about, wait=wait, must=must, handle=handle, eager=eager, due_s=due_s
        )
        if save is not None:
            self._carried.taken(save, metrics)
        return save

    def take_requested(self, handle: Save, *, wait: bool, must: bool, eager: bool) -> None:
        """Takes what `save` has requested inside the step. If it is skipped, its handle ends with the reason."""
        handle.inside_step = False
        if self.take(handle.reason, wait=wait, must=must, handle=handle, eager=eager) is None:
            handle.end(self.saving.admission.skipped(handle.step))
        if wait:
            handle.wait()

    def take_tagged(self, tags: Sequence[str], reason: str = "", *, wait: bool = False) -> None:
        """Takes a save because its step is tagged; it is never skipped."""
        reason = "; ".join([*([reason] if reason else []), f"tagged {', '.join(tags)}"])
        handle = self.saving.saver.plan_save(self.step, reason=reason)
        self.saving.tag(handle, tags)
        if self.take(reason, wait=wait, must=True, handle=handle) is None:
            handle.end(self.saving.admission.skipped(handle.step))

    def _take_marked(self, mark: StateMark, reason: str) -> None:
        """Saves the last completed step, if it is the one of `mark`, is not saved yet, and nothing has changed its
        tensors, of which it warns."""
        if mark.step != self.step or not self.unsaved:
            return
        if not self._snapshots.untouched(mark, plain=False):
            self.saving.report(f"step {mark.step} is not saved, though {reason}: the state has changed since that step")
            return
        metrics = self._carried.with_those_of(self.metrics)
        about = self._snapshots.about(parent=self._parent, metrics=metrics, reason=reason, progress=mark.progress)
        save = self.saving.take(mark.flattened, mark.step, about, wait=True, must=True)
        if save is not None:
            self._carried.taken(save, metrics)

    def _take_in_memory(self, moment: Moment) -> None:
        """Seals the step in memory, where that is due and no save has just done it."""
        memory = self.saving.memory
        if memory is None or moment.signal is not None:
            return
        decision = memory.decide(moment)
        if decision.save and not memory.skips(self.step):
            due_s = time.monotonic()
            metrics = self._carried.with_those_of(self.metrics)
            about = self._snapshots.about(parent=self._parent, metrics=metrics, reason=decision.reason)
            memory.take(self._snapshots.now(), self.step, about, due_s=due_s, eager=moment.ending)

    @property
    def _parent(self) -> CheckpointId | None:
        last = self.saving.last
        return last.id if last is not None and last.committed else self.claiming.parent

    # -- ending --------------------------------------------------------------------------------------------------------

    def close_replaced(self) -> None:
        """Closes because another Checkpointer of this process takes the run. As at the process's end nothing new is
        saved: no `close` has ended the training, and its objects may have been changed since its last step."""
        self.close(CLOSE_DEADLINE_S, ended_well=True, replaced=True)

    def close(
        self, timeout: float, *, ended_well: bool, replaced: bool = False, failed: BaseException | None = None
    ) -> None:
        """Waits for what is in flight, gives run and signal handlers back, warns of what is left undone. Once."""
        if self.closed:
            return
        self.closed = True
        self._not_again()
        self._preemption.hold_back()
        self.first_save.end(closed=ended_well and not replaced)
        self.saving.leave(self.step)
        until = time.monotonic() + timeout
        spare = min(GIVE_BACK_S, timeout / 4)
        try:
            await_saves(self.saving, until - spare)  # first: the last save is not to wait for a store that hangs
            self._settle_early()
            if ended_well and not replaced:
                self._requests.leave()
                self._take_last()
                await_saves(self.saving, until - spare)
        except BaseException:
            self._end(spare, quietly=True)
            raise
        self._end(spare, well=ended_well)
        if self.saving.attempt is not None:
            self.saving.tiers.finish(max(until - time.monotonic(), 0.0))
        self.saving.left(self.step)
        incomplete = self.open and self.saving.attempt is not None
        lacks, left = replaced and self._lacks_last_save, self._left_behind and not replaced
        alone = self.saving.attempt is None and self.claiming.only_in_memory
        warn_of_unsaved(self.saving, self.step, incomplete=incomplete, replaced=lacks, left=left, alone=alone)
        if ended_well and not (replaced or incomplete or left):
            self.saving.warn_of_unlogged_metrics()
            self._leave_metrics()
            self.saving.report_lost_metrics(self._carried.waiting)
        if leaves := ended_well and self._preemption.owed and sys.exc_info()[0] is None:
            self._preemption.prepare_to_leave()  # it came behind the last step of several ranks, or during this close
        self._preemption.report_leaving(self.saving, self.step, failed)
        if ended_well:
            self.saving.raise_failure()
            if leaves:
                self._preemption.leave()

    def _end(self, timeout: float, *, quietly: bool = False, well: bool = False) -> None:
        """Gives everything back. `quietly`: something worse is being raised already, and the rest is a warning."""
        run_registry.unregister(self.key, self)
        if self.saving.saver.busy:
            run_registry.still_writes(self.key, self.saving.saver.join)
        try:
            self.saving.give_back(timeout)
        except TenutoError as error:
            if not quietly and self.saving.emergency.rescued is None:
                raise
            self.saving.report(str(error))
        finally:
            try:
                self.saving.part(timeout, well=well)
            finally:  # last: an interrupt in the middle would leave the run claimed by a process that trains it no more
                self._preemption.restore(stays=self.stays)

    def end_where_it_resumed(self, *, epoch_ended: bool) -> None:
        """Takes the save of the end where whoever completed the last step was killed before it: memory alone has it."""
        found = self.claiming.restored
        if found is not None and self.claiming.only_in_memory and self.unsaved and self.step == found.checkpoint.step:
            self.metrics = dict(found.checkpoint.metrics)
            self._take_at_the_end(self._moment(epoch_ended=epoch_ended, ending=True, signal=None), eager=True)

    def _take_at_the_end(self, moment: Moment, *, wait: bool = False, eager: bool = False) -> None:
        """Takes a save of the last completed step if the policy wants it at this end, or if `stop` left it unsaved."""
        decision = self.saving.decide(moment)
        if decision.save or (self.stopping and self.unsaved):
            self.take(decision.reason if decision.save else STOPPED, wait=wait, must=True, eager=eager)

    def _take_last(self) -> None:
        """Takes the last save of a loop of the user's own, if the policy wants it. Our own loops have reported their
        end themselves, and what is done to the state after them belongs to no step."""
        if self._lacks_last_save:
            signal = self._preemption.signal if self.saving.group.acts_at_once else None
            self._take_at_the_end(self._moment(ending=True, signal=signal))

    @property
    def _left_behind(self) -> bool:
        """Whether a loop was broken out of between two steps, the last not saved. A signal is reported otherwise."""
        begun = self.loop is not None and not self.open and self.saving.attempt is not None
        return begun and self.unsaved and self.step > self.saving.first_step and self._preemption.signal is None

    @property
    def _lacks_last_save(self) -> bool:
        return self.saving.attempt is not None and self._foreign_loop and self.unsaved

    # -- between two steps ---------------------------------------------------------------------------------------------

    def _consider(self, *, epoch_ended: bool, ending: bool, rest_follows: bool = False) -> None:
        """Takes the save that is due, and leaves if a signal came; with `rest_follows` only requests it."""
        self.saving.raise_loss()
        self.saving.raise_failure()
        if self._probe is not None and not rest_follows:  # what is saved of this step is what its body's end leaves
            self._probe.completed()
        log_lines.flush()
        group, unwell = self.saving.group, self.saving.health.hears and self.saving.health.act()
        signal = group.completed(self.step, self._preemption.signal, ending=ending or self.stopping)
        self.stopping = group.stops(unwell) or self.stopping
        if rest_follows:
            self._consider_postponed(signal)
            return
        moment = self._moment(
            epoch_ended=epoch_ended, ending=ending or signal is not None or self.stopping, signal=signal
        )
        decision = self.saving.decide(moment)
        if not self._requests.take(decision, moment):
            if decision.save:
                self.take(decision.reason, wait=signal is not None, must=moment.ending, eager=moment.ending)
            elif self.stopping and self.unsaved:
                self.take(STOPPED, wait=False, must=True)
        self._take_in_memory(moment)
        if signal is not None:
            self._leave(signal)
        if type(self.loop) is Epochs and epoch_ended:
            self._mark_state()

    def _consider_postponed(self, signal: str | None) -> None:
        """Notes the save that is due behind the last batch of an epoch. A signal that all ranks act upon here is still
        there where the body ends."""
        self.saving.heartbeat.beat(self.step)
        if signal is None:
            decision = self.saving.decide(self._moment(ending=False, signal=None))
            self._postponed = decision.reason if decision.save else ""

    def _moment(self, *, epoch_ended: bool = False, ending: bool, signal: str | None) -> Moment:
        return Moment(
            step=self.step,
            now_s=time.monotonic(),
            epoch=self.position.counters.epoch if self.position.epochs_told or type(self.loop) is Epochs else None,
            epoch_ended=epoch_ended,
            ending=ending,
            signal=signal,
            metrics=self.metrics,
        )

    def _mark_state(self) -> None:
        """Marks how the state is now, so that a signal outside any step can still save it."""
        if self._preemption.watched and self.unsaved:
            self._mark = self._snapshots.mark()

    def _act_on_signal(self) -> None:
        """Leaves if a signal came, with the last step saved. Of several ranks the round after a step decides that."""
        signal = self._preemption.signal
        if signal is not None and self.saving.group.acts_at_once:
            self._take_at_the_end(self._moment(ending=True, signal=signal), wait=True, eager=True)
            self._leave(signal)

    def _consider_late(self) -> None:
        """Considers a save for a metric that came after its step. Inside `epochs` the end of the epoch asks for it;
        else it is taken now, unless the state has changed since that step."""
        reason = self._late_metrics.reason()
        if reason and self._late_metrics.still_there(reason):
            self.take(reason, wait=False)

    # -- signals -------------------------------------------------------------------------------------------------------

    def _signal_came(self, name: str) -> None:
        """Acts on a signal, in the main thread between two instructions of the user's code, where no step is open. In a
        loop of the user's own it is not known where a step begins: the next `step_done` sees the signal, or `close`.
        The rest of an epoch's body belongs to the last step, and is finished first; a second signal, or `REST_S`, saves
        that step at once, if nothing has changed the state."""
        if self.saving.attempt is None:
            return
        in_step = self.open or (self._foreign_loop and self.loop is None)
        in_rest = not in_step and isinstance(self.loop, Epochs) and self.loop.finishing
        first = self._preemption.report_signal(self.saving, self.step - in_rest, in_step=in_step or in_rest)
        if in_step or not self.saving.group.acts_at_once:
            return
        if in_rest and first:
            self._again = send_again(name, REST_S)
            if self.unsaved:
                with undisturbed:
                    self._requests.save(wait=True, between=True, reason=f"{name} came", mark=self._mark)
            return
        self._preemption.hold_back()
        with undisturbed:
            mark, self._mark, self.saving.leaving = self._mark, None, True
            if mark is not None:
                self._take_marked(mark, f"{name} came")
            self._leave()

    def _not_again(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def _leave(self, name: str | None = None) -> None:
        """Ends the process as the signal asked, with everything that is in flight committed."""
        self._not_again()
        self._preemption.hold_back()
        self._preemption.prepare_to_leave(name)
        self.saving.wait_to_leave(CLOSE_DEADLINE_S)
        self._preemption.leave()
