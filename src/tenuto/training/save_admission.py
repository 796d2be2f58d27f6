"""Whether a save that is due may be taken: at once, when one before has ended, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tenuto.engine.save.rank_group import RankGroup
from tenuto.engine.save.saver import Saver
from tenuto.errors import DeadlineExceeded, RanksDisagree, SaveFailed
from tenuto.events import Emitter, SaveSkipped
from tenuto.model import canonical_json

BUSY_DEADLINE_S: Final = 600.0
"""How long the training thread waits for the save before, where saves are not skipped."""
_LOOK_S: Final = 0.1
"""How often it looks whether that one makes progress, where it does not wait for long."""


class SaveAdmission:
    """Admits the saves of one run.

    skip: a save that is due while as many as may be are in flight is skipped. The coordinator decides that for all
        ranks, since each would find its own writer at work, or just done.
    missed: called with the step of a save that other ranks take and this one does not, so that none waits for it.
    """

    def __init__(
        self,
        saver: Saver,
        run: str,
        emitter: Emitter,
        *,
        skip: bool,
        group: RankGroup,
        missed: Callable[[int, BaseException], None],
    ) -> None:
        self._saver = saver
        self._run = run
        self._emitter = emitter
        self._skip = skip
        self._group = group
        self._missed = missed
        self._ahead: tuple[int, bool] | None = None
        """The coordinator's decision for a step that this rank has not reached yet."""

    def await_for(self, step: int, *, must: bool, patience_s: float | None = None) -> float | None:
        """Returns when the save may be taken, with the seconds that it has waited; None if it is skipped. `patience_s`:
        without progress for so long none before it is waited for.

        Raises DeadlineExceeded where none before it ends, and what waiting for the coordinator raises.
        """
        if self._skip and not must and self._all_skip(step):
            where = "" if self._group.coordinates else ", on the coordinator"
            self._emitter.emit(SaveSkipped(self._run, step, f"{self._busy_with()} still being written{where}"))
            return None
        if self._saver.free:
            return 0.0
        began = time.monotonic()
        if not self._is_free(patience_s):
            stuck = self._stuck(step, time.monotonic() - began)
            self._missed(step, stuck)
            raise stuck
        return time.monotonic() - began

    def _is_free(self, patience_s: float | None) -> bool:
        """Waits until another save may be taken; returns whether one may."""
        if patience_s is None:
            return self._saver.await_free(BUSY_DEADLINE_S)
        while not self._saver.await_free(_LOOK_S):
            oldest = next(iter(self._saver.in_flight), None)
            if oldest is None or time.monotonic() - oldest.moved_s > patience_s:
                return False
        return True

    def skipped(self, step: int) -> SaveFailed:
        """Returns the error of a requested save that was skipped."""
        return SaveFailed(
            f"step {step} was not saved: {self._busy_with()} still being written",
            subject=self._run,
            hint='on_busy="wait" waits for it',
        )

    def _all_skip(self, step: int) -> bool:
        """Returns whether all ranks skip it. Only the coordinator's own state counts, so it never waits here."""
        group = self._group
        if group.coordinates:
            skip = not self._saver.free
            with group.round("turn") as round:
                round.broadcast(canonical_json.dumps([step, skip]))
            return skip
        while True:
            if self._ahead is None:
                with group.round("turn") as round:
                    decision = canonical_json.loads(round.receive(group.timeout_s, f"whether step {step} is saved"))
                self._ahead = int(decision[0]), bool(decision[1])
            decided, skip = self._ahead
            if decided > step:
                raise self._disagreement(decided, step)
            self._ahead = None
            if decided == step:
                return skip
            if not skip:
                self._missed(decided, self._disagreement(decided, step))

    def _disagreement(self, decided: int, step: int) -> RanksDisagree:
        return RanksDisagree(
            f"the ranks do not agree about the step that is saved (rank 0: {decided}, this rank: {step})",
            subject="the step that is saved",
            hint="save at the same steps on all ranks: later steps are saved again",
            phase=f"the save of step {step}",
        )

    def _busy_with(self) -> str:
        number = len(self._saver.in_flight)
        return "the save before is" if number <= 1 else f"the {number} saves before are"

    def _stuck(self, step: int, waited_s: float) -> DeadlineExceeded:
        before = next(iter(self._saver.in_flight), None)
        return DeadlineExceeded(
            f"no save of step {step}: the one of step {before.step if before else 0} has been "
            f"{before.phase if before else 'at work'} for {waited_s:.3g} s",
            subject=str(before.id) if before else self._run,
            hint=f"look at {self._saver.repo.url}: does it still answer?",
        )
