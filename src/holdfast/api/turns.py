"""Whether a save that is due may be taken: at once, when one before has ended, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.api.company import Company
from holdfast.engine.save import Saver
from holdfast.errors import DeadlineExceeded, RanksDisagree, SaveFailed
from holdfast.events import Emitter, SaveSkipped
from holdfast.model import canonical

BUSY_DEADLINE_S: Final = 600.0
"""How long the training thread waits for the save before, where saves are not skipped."""


class Turns:
    """Of the saves of one run. `skip`: a save that is due while as many as may be are in flight is skipped. Of several
    ranks the coordinator decides it, and the others hear from it, at each save that may be skipped: each by itself
    would find its own writer at work, or just done.

    `missed` is called with the step of a save that other ranks take and this one does not, so that nobody waits for it.
    """

    def __init__(
        self,
        saver: Saver,
        run: str,
        emitter: Emitter,
        *,
        skip: bool,
        company: Company | None,
        missed: Callable[[int, BaseException], None],
    ) -> None:
        self._saver = saver
        self._run = run
        self._emitter = emitter
        self._skip = skip
        self._company = company if company is not None and company.world_size > 1 else None
        self._missed = missed
        self._ahead: tuple[int, bool] | None = None
        """What was decided, for a step that this rank has not come to yet."""

    def await_for(self, step: int, *, must: bool) -> float | None:
        """Returns when the save may be taken, with the seconds that it has waited; None if it is skipped.

        Raises DeadlineExceeded where none before it ends, and what waiting for the coordinator raises.
        """
        may_skip = self._skip and not must
        if may_skip and self._company is not None:
            skipped = self._agreed(self._company, step)
            where = "" if self._company.coordinates else ", on the coordinator"
        else:
            skipped, where = may_skip and not self._saver.free, ""
        if skipped:
            self._emitter.emit(SaveSkipped(self._run, step, f"{self._busy_with()} still being written{where}"))
            return None
        if self._saver.free:
            return 0.0
        began = time.monotonic()
        if not self._saver.await_free(BUSY_DEADLINE_S):
            stuck = self._stuck(step)
            self._missed(step, stuck)
            raise stuck
        return time.monotonic() - began

    def skipped(self, step: int) -> SaveFailed:
        """Why a save that was asked for was not taken."""
        return SaveFailed(
            f"step {step} was not saved: {self._busy_with()} still being written",
            subject=self._run,
            hint='on_busy="wait" waits for it',
        )

    def _agreed(self, company: Company, step: int) -> bool:
        """Whether all ranks skip it. Only the coordinator's own state counts, so it never waits here."""
        agreement = company.agreement
        if company.coordinates:
            skip = not self._saver.free
            with agreement.topic("turn") as topic:
                topic.announce(canonical.dumps([step, skip]))
            return skip
        while True:
            if self._ahead is None:
                with agreement.topic("turn") as topic:
                    heard = canonical.loads(topic.hear(company.timeout_s, f"whether step {step} is saved"))
                self._ahead = int(heard[0]), bool(heard[1])
            decided, skip = self._ahead
            if decided > step:
                raise self._apart(decided, step)
            self._ahead = None
            if decided == step:
                return skip
            if not skip:
                self._missed(decided, self._apart(decided, step))

    def _apart(self, decided: int, step: int) -> RanksDisagree:
        return RanksDisagree(
            f"the ranks do not agree about the step that is saved (rank 0: {decided}, this rank: {step})",
            subject="the step that is saved",
            hint="save at the same steps on all ranks: later steps are saved again",
            phase=f"the save of step {step}",
        )

    def _busy_with(self) -> str:
        number = len(self._saver.in_flight)
        return "the save before is" if number <= 1 else f"the {number} saves before are"

    def _stuck(self, step: int) -> DeadlineExceeded:
        before = next(iter(self._saver.in_flight), None)
        return DeadlineExceeded(
            f"no save of step {step}: the one of step {before.step if before else 0} has been "
            f"{before.phase if before else 'at work'} for {BUSY_DEADLINE_S:g} s",
            subject=str(before.id) if before else self._run,
            hint=f"look at {self._saver.repo.url}: does it still answer?",
        )
