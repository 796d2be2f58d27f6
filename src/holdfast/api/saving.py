"""Taking saves: several in flight, failures made known, retention after each commit, metrics that come late."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from holdfast.api.company import Company
from holdfast.api.late import Late
from holdfast.api.line import Line
from holdfast.api.remembering import Remembering
from holdfast.api.remembering_together import remembering
from holdfast.api.restored import Restored
from holdfast.api.spent import Spent
from holdfast.api.stats import Stats
from holdfast.api.tally import Tally
from holdfast.api.tidying import Tidying
from holdfast.api.turns import Turns
from holdfast.api.unlogged import Unlogged
from holdfast.engine import handle as handles
from holdfast.engine.fenced import Fencing
from holdfast.engine.handle import Save
from holdfast.engine.job import About
from holdfast.engine.party import Alone
from holdfast.engine.save import Saver
from holdfast.errors import DeadlineExceeded, HoldfastError, OwnershipError, RanksError, SaveTorn, StateError
from holdfast.events import Emitter, SaveDelayed, SaveFailedEvent, Warned
from holdfast.guard.exitstatus import ExitStatus
from holdfast.model.names import CheckpointId
from holdfast.policy.keeping import KeepPolicy
from holdfast.policy.saving import Decision, Moment, SaveHistory, SavePolicy, divided
from holdfast.repo.attempts import Attempt
from holdfast.repo.copies import listen
from holdfast.repo.deadline import within
from holdfast.repo.repository import Repo
from holdfast.state.contract import Flattened
from holdfast.state.registry import gate

OnBusy = Literal["wait", "skip"]
OnError = Literal["warn", "raise"]
Capture = Literal["eager", "fenced"]

SHARE_SPARE_BYTES = 1 << 20
NOTE_DEADLINE_S = 60.0
"""How long the training thread waits for a note that it has to write itself."""


class Saving:
    """Everything between "a step is completed" and "a checkpoint is committed", for one run."""

    def __init__(
        self,
        repo: Repo,
        run: str,
        *,
        policy: SavePolicy,
        keep: KeepPolicy,
        on_busy: OnBusy,
        on_error: OnError,
        memory_budget: int | None,
        emitter: Emitter,
        in_flight: int = 1,
        memory: SavePolicy | None = None,
        company: Company | None = None,
    ) -> None:
        """`company`: the ranks with whom this process saves."""
        self.repo = repo
        self.run = run
        listen(repo.store, self.warn)
        self.policy = policy
        self.company = company
        self._coordinates = company is None or company.coordinates
        self._alike, self._ours = divided(policy)
        self.tidying = Tidying(repo, keep, emitter=emitter, warn=self.warn, company=company)
        self._on_error = on_error
        self._emitter = emitter
        self.memory: Remembering | None = None
        """States that are kept in memory, with a cadence of its own."""
        if memory is not None:
            self.memory = remembering(company)(
                repo,
                run,
                memory,
                on_busy=on_busy,
                budget=memory_budget,
                in_flight=in_flight,
                emitter=emitter,
                warn=self.warn,
            )
        party = None if company is None else company.party(repo)
        self.saver = Saver(
            repo,
            run,
            emitter=emitter,
            in_flight=in_flight,
            memory_budget=memory_budget,
            timed=True,
            on_end=self._ended,
            make_room=self._make_room,
            memory=self.memory.written_from if self.memory is not None else None,
            beside=self.memory.tier if self.memory is not None else None,
            party=party,
        )
        missed = (party or Alone(repo)).missed
        self.turns = Turns(self.saver, run, emitter, skip=on_busy == "skip", company=company, missed=missed)
        self.last: Save | None = None
        """The last save taken, or the restored checkpoint as a save that is committed already."""
        self.lock = threading.Lock()
        self._failure: HoldfastError | None = None
        self._exit_status = ExitStatus(f"run {run}")
        self._late = Late(repo, warn=self.warn)
        self._unlogged = Unlogged(policy, self.warn)
        self._line = Line(policy)
        self.spent = Spent()
        self.tally = Tally()
        self.first_step = 0
        """What training here began at."""
        self._started_s = time.monotonic()
        self._last_saved_s: float | None = None
        self._stands_still: Save | None = None

    @property
    def attempt(self) -> Attempt | None:
        return self.saver.attempt

    def capture_beside(self, state: Any) -> None:
        """From now on what optimizers in `state` own is copied beside training."""
        found = gate(state, lambda message: self._emitter.emit(Warned(message, self.run)))
        if found is None:
            self.warn('capture="fenced" finds no optimizer to wait for, since torch is not loaded: saves are eager')
        self.saver.fencing = Fencing(found, self._emitter, self.warn)
        if self.memory is not None:
            self.memory.capture_beside(self.saver.fencing)

    def expect(self, restored: Restored | None) -> None:
        """Memory for what one of several ranks saves of what was restored: an equal share, and a little more, for who
        writes what is planned at the first save. A job that starts afresh has no state yet to tell by, and where one
        rank writes all that several hold the shares are not equal."""
        if restored is not None and self.company is not None and self.company.writers != "one":
            share = restored.checkpoint.bytes // self.company.world_size
            self.saver.expect(share + share // 32 + SHARE_SPARE_BYTES)

    def begin(
        self, attempt: Attempt, first_step: int, restored: CheckpointId | None, *, since_s: float | None = None
    ) -> None:
        """The run is claimed: from here on saves may be taken. `restored`: the newest durable checkpoint of the line
        that training goes on with, and `since_s` when a save of it was last begun, where what was restored is newer."""
        self.saver.attempt = attempt
        self.first_step = first_step
        self._started_s = time.monotonic() if since_s is None else min(since_s, time.monotonic())
        self.tally.begin()
        if restored is not None:
            self.last = Save(restored, "", reason="restored")
            self.last.end()
            self.tally.durable_s = self._started_s
            self._line.begin(self.repo, self.run, attempt)

    def decide(self, moment: Moment) -> Decision:
        self._unlogged.asked(moment, self.first_step, self._judging)
        waits = not self.saver.free
        if waits:
            self._tell_standstill()
        history = SaveHistory(
            started_s=self._started_s,
            first_step=self.first_step,
            last_saved_step=self.last.step if self.last is not None else None,
            last_saved_s=self._last_saved_s,
            saved=self._line.metrics(),
            stalls_s=self.spent.stalls_s,
            stalled_s=self.spent.stalled_s,
            persist_s=self.spent.persist_s,
            waits=waits,
        )
        torn = self._torn
        if self.company is not None:
            return self.company.decide(self._alike, self._ours, moment, history, torn)
        decision = self.policy.decide(moment, history)
        if not decision.save and torn is not None and moment.step > torn.step:
            return Decision(True, f"in place of the torn save of step {torn.step}")
        return decision

    def take(
        self,
        flattened: Flattened,
        step: int,
        about: About,
        *,
        wait: bool,
        must: bool = False,
        handle: Save | None = None,
        eager: bool = False,
        due_s: float | None = None,
    ) -> Save | None:
        """Takes a save, or None if it was skipped because as many as may be are in flight (never where it `must` be
        taken).
        `eager`: with nothing left to be copied beside training. `due_s`: since when training has been held for it.

        What it raises follows `on_error`; ownership, and what cannot be represented, always raise.
        """
        began = time.monotonic()
        due_s = began if due_s is None else due_s
        try:
            waited_s = self.turns.await_for(step, must=must)
        except (DeadlineExceeded, RanksError) as error:
            save = handle or self.saver.plan_save(step, reason=about.reason)
            self.tally.take(save, due_s)
            self.spent.add(save, time.monotonic() - due_s)
            return self._not_taken(save, error)
        if waited_s is None:
            self.tally.skip(time.monotonic() - due_s)
            return None
        if waited_s:
            self.tally.delay(waited_s)
            self._emitter.emit(SaveDelayed(self.run, step, waited_s))
        self._last_saved_s = time.monotonic()
        if self.memory is not None:
            eager = self.memory.saved(step) or eager
        save = handle or self.saver.plan_save(step, reason=about.reason)
        save.clock.put("look_s", began - due_s)
        save.clock.put("wait_s", waited_s)
        self.tally.take(save, due_s)
        try:
            eager = eager or self._torn is not None
            self.saver.save(flattened, step, wait=wait, about=about, handle=save, eager=eager)
        except (OwnershipError, StateError) as error:
            save.end(error)
            raise
        except HoldfastError as error:
            self._not_taken(save, error)
        if self.memory is not None and save.done and not save.committed:
            self.memory.not_saved(step)
        self.last = save
        self._line.add(save, about.metrics)
        self.spent.add(save, time.monotonic() - due_s)
        return save

    def _tell_standstill(self) -> None:
        """Once of each save that does not get on: a policy that waits for none asks for nothing that would tell it."""
        oldest = next(iter(self.saver.in_flight), None)
        if oldest is None or oldest is self._stands_still:
            return
        if time.monotonic() - oldest.moved_s >= handles.STANDSTILL_S:
            self._stands_still = oldest
            self._fail(oldest.stuck())

    def _not_taken(self, save: Save, error: HoldfastError) -> Save:
        save.end(error)
        self._emitter.emit(SaveFailedEvent(save.id, error.message, save.phase))
        self._fail(error)
        self.last = save
        return save

    @property
    def _torn(self) -> Save | None:
        """A save whose image was torn, until an eager one is taken in its place."""
        return self.last if self.last is not None and isinstance(self.last.error, SaveTorn) else None

    def stats(self) -> Stats:
        """What saving has done and cost so far. No I/O."""
        return self.tally.stats(self.spent.stalled_s, self.memory)

    def wait(self, timeout: float | None) -> None:
        """Waits for all saves in flight and for what follows them: notes, and retention. DeadlineExceeded after
        `timeout` seconds; without one, once the save that is being written has not got on, or what follows has not
        ended, for ten minutes (I8)."""
        until = None if timeout is None else time.monotonic() + timeout

        def left() -> float:
            return handles.STANDSTILL_S if until is None else max(until - time.monotonic(), 0.0)

        self.saver.hurry()
        for save in self.saver.in_flight:
            if not save.join(None if timeout is None else left()):
                raise save.stuck(timeout)
        for what, join in (("the last save of", self.saver.join), ("retention of", self.tidying.join)):
            patience = left()
            if not join(patience):
                raise DeadlineExceeded(
                    f"{what} run {self.run!r} has not ended within {patience if timeout is None else timeout:g} s",
                    subject=self.run,
                    hint=f"look at {self.repo.url}: does it still answer? `holdfast ls` shows the last committed "
                    "checkpoint",
                )

    def wait_to_leave(self, timeout: float) -> None:
        """As `wait`; and for the other ranks, which leave as well: one of them may hold the board."""
        self.wait(timeout)
        if self.company is not None:
            self.company.farewell(timeout)

    def part(self, timeout: float, *, well: bool) -> None:
        """Leaves the other ranks. What the coordinator has removed by then goes from this node's places too."""
        if self.company is not None:
            self.company.part(timeout, well=well)
            if well and self.attempt is not None and not self._coordinates:
                self.tidying.now(self.attempt)

    def raise_failure(self) -> None:
        """Raises what failed in the background since the last call, if it is to be raised. Ownership always is."""
        with self.lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def note(self, save: Save, metrics: Mapping[str, float]) -> None:
        """Metrics of a checkpoint that is taken already: noted once it is committed."""
        self._unlogged.seen(metrics)
        if self._coordinates:
            self._late.note(save, metrics)
        self._line.add(save, metrics)
        self._write_late(NOTE_DEADLINE_S)

    def tag(self, save: Save, names: Sequence[str]) -> None:
        """Tags a checkpoint once its save, which may still be to come, is committed."""
        if self._coordinates:
            self._late.tag(save, names)
        self._write_late(NOTE_DEADLINE_S)

    def seen(self, metrics: Mapping[str, float]) -> None:
        self._unlogged.seen(metrics)

    @property
    def logged(self) -> frozenset[str]:
        """Names of the metrics that this process has logged."""
        return self._unlogged.logged

    def warn_of_unlogged_metrics(self) -> None:
        """Says which metrics the policies go by and nothing has logged."""
        self._unlogged.tell(self._judging)

    @property
    def _judging(self) -> KeepPolicy | None:
        """What judges the saves of this process, once there is one."""
        saved = self.last is not None and self.last.reason != "restored"
        return self.tidying.keep if saved else None

    def give_back(self, timeout: float) -> None:
        """Writes what is left to be noted and gives run and memory back, within `timeout` seconds. Raises what the
        store raises, and DeadlineExceeded."""
        until = time.monotonic() + timeout
        self.tally.end()
        self._write_late(timeout / 2)
        try:
            if self.attempt is not None:
                self.attempt.release(max(until - time.monotonic(), timeout / 2))
        finally:
            self.saver.close()
            if self.memory is not None:
                self.memory.close(self.last.id if self.last is not None and self.last.committed else None)

    def hangs(self, error: DeadlineExceeded) -> None:
        """What is in flight is given up: the exit status tells, unless it commits all the same."""
        if self.saver.in_flight:
            self._exit_status.fail(error.message)

    def _write_late(self, timeout: float) -> None:
        """In the training thread, unless the writing thread is at work and will see to it."""
        if self.saver.busy or not self._late.waits:
            return
        try:
            within(timeout, f"noting metrics of run {self.run}", self._late.write, subject=self.run)
        except DeadlineExceeded as error:
            self.warn(str(error))

    def _ended(self, save: Save) -> None:
        """In the writing thread, after each save."""
        if save.error is not None:
            self._fail(save.error)
            self._late.write()
            return
        self._exit_status.clear()
        self._late.write()
        if self.attempt is not None:
            self.tidying.after_commit(self.attempt, save.step)

    def _fail(self, error: HoldfastError) -> None:
        """A failure is known at once, and in the exit status unless a later save commits."""
        self._exit_status.fail(error.message)
        told = self._on_error == "raise" and not isinstance(error, SaveTorn)  # the next step's save takes its place
        if told or isinstance(error, OwnershipError):
            with self.lock:
                self._failure = error
        if not isinstance(error, OwnershipError):
            self.warn(str(error))

    def warn(self, message: str) -> None:
        """Something that a person should know; training goes on."""
        self._emitter.warn(message, self.run)

    def _make_room(self) -> bool:
        return self.attempt is not None and self.tidying.now(self.attempt, everybody=True) > 0
