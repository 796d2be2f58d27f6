"""Takes saves: several in flight, failures reported, retention after each commit, notes of late metrics."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from tenuto.concurrency.deadlines import within
from tenuto.concurrency.worker_threads import foreground_threads
from tenuto.engine.memory_tier.cadence import MemoryCadence
from tenuto.engine.read.choose import Restored
from tenuto.engine.save import handle as handles
from tenuto.engine.save.commit_protocol import CommitProtocol
from tenuto.engine.save.fenced_capture import FencedCapture
from tenuto.engine.save.handle import Save
from tenuto.engine.save.health import HealthWatch
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.rank_group import RankGroup
from tenuto.engine.save.saver import Saver
from tenuto.errors import (
    DeadlineExceeded,
    OwnershipError,
    RanksError,
    SaveTorn,
    StateError,
    TenutoError,
)
from tenuto.events import Emitter, Event, SaveDelayed, SaveFailedEvent
from tenuto.model.ids import CheckpointId, run_key
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.numbers import line_on_direction
from tenuto.policy.save import Decision, Moment, SaveHistory, split_by_agreement
from tenuto.ranks.contract import Ranks
from tenuto.repo.keys import unlock
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.replicated.places import all_places, followers_of, report_to
from tenuto.repo.repository import Repo
from tenuto.state.contract import Flattened
from tenuto.state.frameworks import gate
from tenuto.telemetry.heartbeat import ENDED, ENDING, TRAINING, Heartbeat
from tenuto.training.arguments import Settings
from tenuto.training.emergency import EmergencyPlaces
from tenuto.training.exit_status import ExitStatus
from tenuto.training.logged_metrics import DeferredNotes, SavedMetrics, UnloggedMetrics
from tenuto.training.retention_worker import RetentionWorker
from tenuto.training.save_admission import SaveAdmission
from tenuto.training.save_costs import OptimumFacts
from tenuto.training.stats import SaveTotals, Stats
from tenuto.training.tier_worker import TierWorker
from tenuto.training.unhealthy import HealthReports

SHARE_SPARE_BYTES = 1 << 20
LOSS_S: Final = 30.0
"""Once nothing can be saved any more: how long saves in flight may take to end, before it is told that the run is still
owned because of them."""
NOTE_DEADLINE_S = 60.0
"""How long the training thread waits for a note that it has to write itself."""


class RunSaver:
    """Takes the saves of one run, and does what follows their commits."""

    def __init__(
        self,
        repo: Repo,
        settings: Settings,
        emitter: Emitter,
        group: RankGroup,
        state: Mapping[str, Any],
        *,
        ranks: Ranks,
    ) -> None:
        """`group`: the ranks with which this process saves, as `ranks` has them. `state`: what it trains."""
        self.repo = repo
        self.run = run = settings.run
        report_to(repo.store, self.report)
        self.policy, self.policy_metrics = settings.save, settings.save.metrics()
        self._watched = settings.watched.keys()
        self.group, self._coordinates = group, group.coordinates
        self._divided_policy = split_by_agreement(settings.save)
        self.tiers = TierWorker(repo, run_key(run), settings.keep, emitter=emitter, report=self.report, group=group)
        self.retention = RetentionWorker(repo, emitter=emitter, warn=self.report, group=group, tiers=self.tiers)
        self._on_error, self._in_flight = settings.on_error, settings.in_flight
        self._emitter = emitter
        for metric in settings.by_name if group.coordinates else ():
            self.report(line_on_direction(metric))
        self.emergency = EmergencyPlaces(
            settings.emergency,
            settings.emergency_after_s,
            repo,
            run,
            ranks=ranks,
            group=group,
            report=self.report,
        )
        self.leaving = False
        """Whether training ends or leaves with the next save."""
        self.memory: MemoryCadence | None = None
        """States that are sealed in memory, with a cadence of its own."""
        if settings.memory is not None:
            self.memory = self._memory_of(settings)
        unlock(repo, settings.key, writing=True)
        places = [store.url for store in (*all_places(repo.store), *followers_of(repo.store))]
        self.heartbeat = Heartbeat.from_environment(group.rank, where=repo.url, run=run, places=places)
        self.heartbeat.trains(state)
        protocol = group.protocol(repo)
        self.saver = self._saver_of(settings, protocol)
        self.health = HealthReports(
            repo,
            run_key(run),
            settings.on_unhealthy,
            modes=settings.modes,
            report=self.report,
            acts=group.coordinates,
            ends=self.heartbeat.unhealthy,
        )
        self.admission = SaveAdmission(
            self.saver, run, emitter, skip=settings.on_busy == "skip", group=group, missed=protocol.missed
        )
        self.last: Save | None = None
        """The last save taken, or the restored checkpoint as a save that is committed already."""
        self.lock = threading.Lock()
        self._failure: TenutoError | None = None
        self.exit_status = ExitStatus(f"run {run}")
        self._notes = DeferredNotes(repo, warn=self.report)
        self._unlogged = UnloggedMetrics(settings.save, self.warn)
        self._saved_metrics = SavedMetrics(settings.save)
        self.totals = SaveTotals()
        self.first_step = 0
        """The step that training in this process began at."""
        self._started_s = time.monotonic()
        self._last_saved_s: float | None = None
        self._settled: SaveHistory | None = None
        """The saves so far, once none is in flight: nothing of it changes until another is taken or a metric noted."""
        self._optimum = OptimumFacts.of(settings.save)
        self._reported_stuck: Save | None = None
        self._loss: RanksError | None = None
        """The loss because of which the run is given back: for good, even if the ranks could meet again."""
        group.on_loss(self._lost)

    def _memory_of(self, settings: Settings) -> MemoryCadence:
        assert settings.memory is not None, "asked for"
        return MemoryCadence(
            self.repo,
            self.run,
            settings.memory,
            on_busy=settings.on_busy,
            budget=settings.memory_budget,
            in_flight=settings.in_flight,
            emitter=self._emitter,
            warn=self.report,
            group=self.group,
        )

    def _saver_of(self, settings: Settings, protocol: CommitProtocol) -> Saver:
        return Saver(
            self.repo,
            self.run,
            emitter=self._emitter,
            in_flight=settings.in_flight,
            memory_budget=settings.memory_budget,
            timed=True,
            on_end=self._ended,
            make_room=self._make_room,
            memory=self.memory.written_from if self.memory is not None else None,
            beside=self.memory.tier if self.memory is not None else None,
            protocol=protocol,
            encoding=settings.encoding,
            health=HealthWatch(self.repo, protocol.rank) if settings.health else None,
        )

    @property
    def attempt(self) -> Attempt | None:
        return self.saver.attempt

    def capture_fenced(self, state: Any) -> None:
        """Has what optimizers in `state` own copied in the background from now on."""
        found = gate(state, self.report)
        if found is None:
            self.warn('capture="fenced" finds no optimizer to wait for, since torch is not loaded: saves are eager')
        self.saver.fencing = FencedCapture(found, self._emitter, self.warn)
        if self.memory is not None:
            self.memory.capture_fenced(self.saver.fencing)

    def prewarm(self, now: Callable[[], Flattened]) -> float:
        """Plans and takes the memory that saves of the state need, as far as this process knows before the first save
        what it writes; returns the seconds it took. `now` gives the state."""
        return self.saver.prewarm(now()) if self.group.writes_all else 0.0

    def expect(self, restored: Restored | None) -> None:
        """Takes memory for this rank's share of what was restored, and a little more: who writes what is planned at
        the first save. Does nothing in a job that starts afresh, whose share is not known yet."""
        share = self.group.expected_share(restored.checkpoint.bytes) if restored is not None else None
        if share is not None:
            self.saver.expect(share + share // 32 + SHARE_SPARE_BYTES)

    def begin(
        self,
        attempt: Attempt,
        first_step: int,
        restored: CheckpointId | None,
        *,
        since_s: float | None = None,
        at: int | None = None,
    ) -> None:
        """Begins to take saves of the claimed run. `restored`: the newest durable checkpoint of the line of training;
        `since_s`, `at`: when a save of that line was last begun, and the step, where training resumes from a newer
        state in memory."""
        self.saver.attempt, self._settled = attempt, None
        self.first_step = first_step
        self._started_s = time.monotonic() if since_s is None else min(since_s, time.monotonic())
        self.totals.begin()
        self.heartbeat.beat(first_step if at is None else at)
        self.tiers.begin(attempt)
        self.emergency.announce(attempt)
        self.heartbeat.note_emergency(self.emergency.urls)
        if self._optimum is not None and self._coordinates:
            self._optimum.begin(self.repo, self.run, attempt.number)
        if restored is not None:
            self.last = Save(restored, "", reason="restored")
            self.last.end()
            self.totals.durable_s = self._started_s
            self._saved_metrics.begin(self.repo, self.run, attempt)
        if self._loss is not None:  # reported while the run was being claimed, when there was nothing to give back
            self._lost(self._loss)

    def decide(self, moment: Moment) -> Decision:
        asked, waits, self.leaving = None, not self.saver.free, moment.ending
        if self.heartbeat.on:
            sealed = self.memory is not None and self.memory.newest_s is not None
            self.heartbeat.sealed = self.group.world_size if sealed else 0
            self.heartbeat.beat(moment.step, ENDING if moment.ending else TRAINING)
            asked = None if waits else self.heartbeat.save_request()  # it stays until a save is not skipped
        self._unlogged.asked(moment, self.first_step, self._judging)
        if waits:
            self._report_standstill()
        history = self._settled
        if history is None or waits:
            history = SaveHistory(
                started_s=self._started_s,
                first_step=self.first_step,
                last_saved_step=self.last.step if self.last is not None else None,
                last_saved_s=self._last_saved_s,
                saved=self._saved_metrics.metrics(),
                stalls_s=self.totals.stalls_s,
                stalled_s=self.totals.stalled_s,
                persist_s=self.totals.persist_s,
                waits=waits,
                in_flight=self._in_flight,
            )
            if not waits and not self.saver.in_flight:
                self._settled = history
        if self._optimum is None:
            return self.group.decide(self._divided_policy, moment, history, self._torn, asked)
        history = self._optimum.added_to(history, moment, beside_a_save=bool(self.saver.in_flight))
        decision = self.group.decide(self._divided_policy, moment, history, self._torn, asked)
        self._optimum.continues()
        return decision

    def take(
        self,
        flattened: Flattened,
        step: int,
        about: ManifestDetails,
        *,
        wait: bool,
        must: bool = False,
        handle: Save | None = None,
        eager: bool = False,
        due_s: float | None = None,
    ) -> Save | None:
        """Takes a save; returns None if it was skipped because as many as may be are in flight.

        must: it is never skipped.
        eager: everything is copied before this returns.
        due_s: since when training has been blocked for it.

        Raises as `on_error` says, but always for ownership and for what cannot be represented.
        """
        began, self._settled = time.monotonic(), None
        due_s = began if due_s is None else due_s
        patience_s = self.emergency.patience_s if self.leaving and self.emergency.ready else None
        if patience_s is not None:
            wait = eager = True  # what becomes of it is known while the state is still there
        try:
            waited_s = self.admission.await_for(step, must=must, patience_s=patience_s)
        except (DeadlineExceeded, RanksError) as error:
            save = handle or self.saver.plan_save(step, reason=about.reason)
            self.totals.take(save, due_s)
            self.totals.hold(save, time.monotonic() - due_s)
            self._not_taken(save, error)
            if patience_s is not None:
                self.emergency.rescue(flattened, step, about, error)
            return save
        if waited_s is None:
            self.totals.skip(time.monotonic() - due_s)
            return None
        if waited_s:
            self.totals.delay(waited_s)
            self._emitter.emit(SaveDelayed(self.run, step, waited_s))
        self._last_saved_s = time.monotonic()
        if self.memory is not None:
            eager = self.memory.saved(step) or eager
        save = handle or self.saver.plan_save(step, reason=about.reason)
        save.patience_s = patience_s
        save.clock.put("look_s", began - due_s)
        save.clock.put("wait_s", waited_s)
        self.totals.take(save, due_s)
        try:
            eager = eager or self._torn is not None
            self.saver.save(flattened, step, wait=wait, about=about, handle=save, eager=eager)
        except (OwnershipError, StateError) as error:
            save.end(error)
            raise
        except TenutoError as error:
            self._not_taken(save, error)
        if self.memory is not None and save.done and not save.committed:
            self.memory.not_saved(step)
        self.last = save
        self._saved_metrics.add(save, about.metrics)
        if self._optimum is not None:
            self._optimum.continues()
        self.totals.hold(save, time.monotonic() - due_s)
        if patience_s is not None:
            self.emergency.rescue(flattened, step, about, save.error)
        return save

    def _report_standstill(self) -> None:
        """Reports, once, a save that makes no progress: a policy that skips never waits for it."""
        oldest = next(iter(self.saver.in_flight), None)
        if oldest is None or oldest is self._reported_stuck:
            return
        if time.monotonic() - oldest.moved_s >= handles.STANDSTILL_S:
            self._reported_stuck = oldest
            stuck = oldest.stuck()
            self.report(str(stuck))
            self._fail(stuck)

    def _not_taken(self, save: Save, error: TenutoError) -> Save:
        save.end(error)
        self._emitter.emit(SaveFailedEvent(save.id, error.message, save.phase, error.hint or ""))
        self._fail(error)
        self.last = save
        return save

    @property
    def _torn(self) -> Save | None:
        """The last save if its image was torn and no eager one has been taken in its place."""
        return self.last if self.last is not None and isinstance(self.last.error, SaveTorn) else None

    def stats(self) -> Stats:
        """Returns what saving has done and cost so far. No I/O."""
        return self.totals.stats(self.memory)

    def wait(self, timeout: float | None) -> None:
        """Waits for all saves in flight, notes and retention. Raises DeadlineExceeded after `timeout` seconds; without
        one, once the save that is being written has made no progress, or what follows has not ended, for ten minutes
        (I8)."""
        if self.emergency.rescued is not None:  # what is still in flight is older than what is safe
            self.saver.join(min(self.emergency.after_s, math.inf if timeout is None else timeout))
            return
        until = None if timeout is None else time.monotonic() + timeout

        def left() -> float:
            return handles.STANDSTILL_S if until is None else max(until - time.monotonic(), 0.0)

        self.saver.flush()
        for save in self.saver.in_flight:
            if not save.join(None if timeout is None else left()):
                raise save.stuck(timeout)
        for what, join in (("the last save of", self.saver.join), ("retention of", self.retention.join)):
            patience = left()
            if not join(patience):
                raise DeadlineExceeded(
                    f"{what} run {self.run!r} has not ended within {patience if timeout is None else timeout:g} s",
                    subject=self.run,
                    hint=f"look at {self.repo.url}: does it still answer? `tenuto ls` shows the last committed "
                    "checkpoint",
                )

    def leave(self, step: int) -> None:
        """Says that this process is about to give the run back, which others then wait for."""
        self.heartbeat.beat(step, ENDING)
        if self.attempt is not None:
            self.attempt.leave()

    def left(self, step: int) -> None:
        """Says that the run is given back, and that nothing here is waited for any more."""
        self.heartbeat.beat(step, ENDED)

    def wait_to_leave(self, timeout: float) -> None:
        """Waits as `wait`, and for the other ranks, which leave as well: the key-value store may be one's own."""
        self.wait(timeout)
        self.group.farewell(timeout)

    def part(self, timeout: float, *, well: bool) -> None:
        """Leaves the other ranks. Also removes from this node's places what the coordinator has removed by then."""
        self.group.part(timeout, well=well)
        if well and self.attempt is not None and not self._coordinates:
            self.retention.now(self.attempt)

    def raise_failure(self) -> None:
        """Raises the failure in the background since the last call, if `on_error` says so or ownership is lost."""
        with self.lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def raise_loss(self) -> None:
        """Raises the loss after which nothing can be saved any more, whatever `on_error` says: training on would only
        delay the restart."""
        loss = self._loss or self.group.loss
        if loss is not None:
            raise loss

    def _lost(self, error: RanksError) -> None:
        """Frees the run for the job that follows, in a thread of its own: training may hang in a collective."""
        self._loss = error
        self.exit_status.fail(error.message)
        try:
            foreground_threads.submit(partial(self._free_run, error), f"tenuto-lost-{self.run}")
        except RuntimeError:  # no thread can be started any more
            self._free_run(error)

    def _free_run(self, error: RanksError) -> None:
        self.report(str(error))
        # Nothing may be written or removed here once another process owns the run, however long that takes.
        told = False
        for join in (*(save.join for save in self.saver.in_flight), self.saver.join, self.retention.join):
            while not join(LOSS_S):
                if not told:
                    told = True
                    self.report("the run is not released yet: what is in flight has not ended")
        try:
            if self.attempt is not None:
                self.attempt.release()
        except TenutoError as trouble:
            self.report(f"the run is not released: {trouble.message}")

    def note(self, save: Save, metrics: Mapping[str, float]) -> None:
        """Notes metrics of a save that is taken already, once it is committed."""
        self._unlogged.seen(metrics)
        if self._coordinates:
            self._notes.note(save, metrics)
        self._settled = None
        self._saved_metrics.add(save, metrics)
        self._write_notes(NOTE_DEADLINE_S)

    def tag(self, save: Save, names: Sequence[str]) -> None:
        """Tags a checkpoint once its save, which may still be to come, is committed."""
        if self._coordinates:
            self._notes.tag(save, names)
        self._write_notes(NOTE_DEADLINE_S)

    def seen(self, metrics: Mapping[str, float], step: int) -> None:
        """Sees metrics of a step as they are logged."""
        self._unlogged.seen(metrics)
        if self.health.hears:
            self.health.logged(step, metrics)

    @property
    def logged(self) -> frozenset[str]:
        """The names of the metrics that this process has logged."""
        return self._unlogged.logged

    def warn_of_unlogged_metrics(self) -> None:
        """Warns of metrics that the policies read and nothing has logged."""
        self._unlogged.warn_of_missing(self._judging)

    def report_lost_metrics(self, left: Mapping[str, float]) -> None:
        """Reports, of what policies read, the metrics of steps behind which nothing was saved."""
        lost = sorted(left.keys() & self._watched) if self._coordinates and self.attempt is not None else []
        if lost:
            last = f"step {self.last.step}" if self.last is not None and self.last.committed else "none"
            self.report(f"{', '.join(lost)} logged since the last checkpoint ({last}) belong to none, and are lost")

    @property
    def _judging(self) -> KeepPolicy | None:
        """The policy that judges the saves of this process, once there is one."""
        saved = self.last is not None and self.last.reason != "restored"
        return self.tiers.keep if saved else None

    def give_back(self, timeout: float) -> None:
        """Writes the notes that are left and gives run and memory back, within `timeout` seconds. Raises errors of the
        store, and DeadlineExceeded."""
        if self.emergency.rescued is not None:
            timeout = min(timeout, self.emergency.after_s)
        until = time.monotonic() + timeout
        self.totals.end()
        self._write_notes(timeout / 2)
        try:
            if self.attempt is not None:
                self.attempt.release(max(until - time.monotonic(), timeout / 2))
        finally:
            self.saver.close()
            if self.memory is not None:
                durable = self.last.id if self.last is not None and self.last.committed else None
                self.memory.close(self.emergency.rescued or durable)

    def _write_notes(self, timeout: float) -> None:
        """Writes notes in the training thread, unless the writing thread is at work and will write them."""
        if self.saver.busy or not self._notes.waits:
            return
        try:
            within(timeout, f"noting metrics of run {self.run}", self._notes.write, subject=self.run)
        except DeadlineExceeded as error:
            self.report(str(error))

    def _ended(self, save: Save) -> None:
        """Follows each save, in the writing thread."""
        if save.error is not None:
            self._fail(save.error)
            self._notes.write()
            return
        self.exit_status.clear()
        self.heartbeat.saved(save.stall_s + save.seconds, save.bytes)
        manifest = self.saver.manifest
        if manifest is not None and manifest.id == save.id and self._coordinates:
            self.health.committed(save.id, manifest.health)
        self._notes.write()
        if self.attempt is not None:
            self.attempt.committed(save.step)
            self.tiers.after_commit(save.id, save.bytes)  # first: retention asks what is being copied
            self.retention.after_commit(self.attempt, save.step)

    def _fail(self, error: TenutoError) -> None:
        """Reports a failure by the exit status unless a later save commits, and at the next call where that is
        wanted."""
        self.exit_status.fail(error.message)
        raises = self._on_error == "raise" and not isinstance(error, SaveTorn)  # the next save takes its place
        if raises or isinstance(error, OwnershipError):
            with self.lock:
                self._failure = error

    def emit(self, event: Event) -> None:
        self._emitter.emit(event)

    def warn(self, message: str) -> None:
        """Warns of what the user's code does, at the line that it is about."""
        self._emitter.warn(message, self.run)

    def report(self, message: str) -> None:
        """Reports what happened to saves, to what was saved, or to training's time."""
        self._emitter.report(message, self.run)

    def _make_room(self) -> bool:
        return self.attempt is not None and self.retention.now(self.attempt, everybody=True) > 0
