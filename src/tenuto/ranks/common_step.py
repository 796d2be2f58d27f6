"""The step that all ranks keep in memory, where each rank keeps its newest two and drops the older for the next.

A rank reports each step it has complete. From then on it drops neither that step nor the last common step until a
decision: once all ranks have the step it becomes the common one and its predecessor may go; once one rank is past the
step without having it, the step is useless and goes first. Only the coordinator decides. So from the first common step
on there is always a step that all ranks have, whichever ranks are killed.

This uses no collective of the training. Each rank puts one key for a step it keeps, the coordinator another, all in the
background. Training waits only where a rank would drop a step before the decision.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from tenuto.errors import DeadlineExceeded, RankStoreLost
from tenuto.ranks.contract import Deadline, KVStore
from tenuto.ranks.session import Session
from tenuto.record import record

NONE: Final = -1
"""No step."""
_FIRST_PAUSE_S: Final = 0.001
IDLE_S: Final = 60.0
"""The sleep of the thread between wake-ups while there is nothing to report."""
JOIN_S: Final = 1.0
"""The limit for joining the thread in `close`: nobody needs its last reports."""


@record
class StepReport:
    """The state of one rank.

    - `complete`: the newest step it has complete.
    - `past`: the newest step it is past, whether it has it or not; never below `complete`.
    - `off`: the reason why it keeps no steps any more.
    """

    complete: int = NONE
    past: int = NONE
    off: str = ""


@record
class StepDecision:
    """The decision of the coordinator.

    - `common`: the newest step that all ranks have; they keep it.
    - `past`: the newest step that some rank is past.
    - `hope`: the only step in (`common`, `past`] that may still become common.
    - `off`: the reason why no rank keeps steps any more.
    """

    common: int = NONE
    past: int = NONE
    hope: int = NONE
    off: str = ""

    def open(self, report: StepReport) -> bool:
        """Returns whether the step of a rank may still become the common one."""
        return report.complete > self.common and (report.complete > self.past or report.complete == self.hope)


def decide(before: StepDecision, report: Sequence[StepReport]) -> StepDecision:
    """Returns the decision that follows from all reports. Old reports are fine: a report holds until it is decided."""
    off = before.off or next((f"rank {rank}: {one.off}" for rank, one in enumerate(report) if one.off), "")
    newest = max(report, key=lambda one: one.past)
    step = newest.complete
    hope = step if all(one.complete == step for one in report if one.past >= step) else NONE
    common = step if all(one.complete == step for one in report) else NONE
    common = max(before.common, common)
    return StepDecision(common, max(before.past, newest.past), hope if hope > common else NONE, off)


class CommonStep:
    """The protocol on one rank. Safe to call from any thread."""

    def __init__(self, session: Session, common: int = NONE) -> None:
        """- `common`: the step that all ranks have already, `NONE` without one."""
        self._session = session
        self._own = StepReport(common, common)
        self._decided = StepDecision(common)
        self._others = [self._own] * session.world_size
        self._changed = threading.Condition()
        self._new = threading.Event()
        self._stopped = threading.Event()
        self._patient = True
        self._thread = threading.Thread(target=self._run, name="tenuto-kept-steps", daemon=True)
        self._thread.start()

    @staticmethod
    def keys(session: Session) -> list[str]:
        """Returns the keys it may leave in the key-value store."""
        return [session.key("common"), *(session.key("kept", rank) for rank in range(session.world_size))]

    @property
    def common(self) -> int:
        """The newest step that this rank knows to be common."""
        with self._changed:
            return self._decided.common

    @property
    def off(self) -> str:
        """The reason why no rank keeps steps any more, empty while they do."""
        with self._changed:
            return self._decided.off

    def sealed(self, step: int) -> None:
        """Reports that this rank has `step` complete."""
        self._report(lambda report: replace(report, complete=step, past=max(step, report.past)))

    def missed(self, step: int) -> None:
        """Reports that this rank is past `step` without having it."""
        self._report(lambda report: replace(report, past=max(step, report.past)))

    def turn_off(self, why: str) -> None:
        """Reports that this rank keeps no more steps."""
        self._report(lambda report: replace(report, off=report.off or why))

    def settle(self, timeout: float) -> int:
        """Waits for the decision on the newest step of this rank and returns the common step.

        The common step and the step of this rank stay; any other may go. Raises DeadlineExceeded after `timeout`
        seconds, or once no decision can come any more; from then on at once, until the decision comes.
        """
        session = self._session
        deadline = Deadline(timeout if self._patient else 0.0)  # a condition waits by the system's clock
        with self._changed:
            while not self._changed.wait_for(self._settled, min(deadline.remaining_s, session.settings.beat_s)):
                if deadline.passed or not session.decides:
                    self._patient = False
                    raise DeadlineExceeded(
                        f"it is not known whether all ranks have step {self._own.complete} in memory"
                    )
            self._patient = True
            return self._decided.common

    def _settled(self) -> bool:
        return not self._decided.open(self._own) or bool(self._decided.off)

    def close(self) -> None:
        """Stops sending reports and receiving decisions."""
        self._stopped.set()
        self._new.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    # -- background thread

    def _report(self, change: Callable[[StepReport], StepReport]) -> None:
        with self._changed:
            self._own = change(self._own)
            self._new.set()

    def _run(self) -> None:
        """Sends new reports, then polls until they are decided."""
        pause, sent = _FIRST_PAUSE_S, self._own
        while not self._stopped.is_set():
            if not self._new.wait(IDLE_S):
                continue
            with self._changed:
                report, decided = self._own, self._decided
                if report != sent:
                    pause = _FIRST_PAUSE_S
                elif not decided.open(report):
                    self._new.clear()
                    continue
            try:
                sent = self._advance(report, sent)
            except RankStoreLost as error:
                if error.lasting:
                    return  # no more decisions: the last common step stays
            self._stopped.wait(pause)
            pause = min(pause * 1.5, self._kv_store.longest_pause_s)

    def _advance(self, report: StepReport, sent: StepReport) -> StepReport:
        """Runs one exchange. Returns the report sent by now."""
        session, timeout = self._session, self._session.settings.answer_s
        if session.is_coordinator:
            self._receive_reports(report, timeout)
            self._announce(timeout)
        else:
            if report != sent:
                self._kv_store.put(session.key("kept", session.rank), _encode(report), timeout=timeout)
            raw = self._kv_store.get(session.key("common"), timeout=timeout)
            if raw is not None:
                self._follow(StepDecision(*json.loads(raw)))
        return report

    def _receive_reports(self, report: StepReport, timeout: float) -> None:
        """Reads, on the coordinator, the reports of the ranks that were behind. One that is lost will not have the step
        in time: the others need not wait."""
        session = self._session
        self._others[session.rank] = report
        behind = [rank for rank, one in enumerate(self._others) if rank and one.past < report.past]
        raws = self._kv_store.get_many([session.key("kept", rank) for rank in behind], timeout=timeout)
        for rank, raw in zip(behind, raws, strict=True):
            if raw is not None:
                self._others[rank] = StepReport(*json.loads(raw))
        for rank in session.watch.lost(rank for rank in behind if self._others[rank].past < report.past):
            self._others[rank] = replace(self._others[rank], past=report.past)

    def _announce(self, timeout: float) -> None:
        with self._changed:
            before = self._decided
        decided = decide(before, self._others)
        if decided != before:
            raw = json.dumps([decided.common, decided.past, decided.hope, decided.off]).encode()
            self._kv_store.put(self._session.key("common"), raw, timeout=timeout)
            self._follow(decided)

    def _follow(self, decided: StepDecision) -> None:
        with self._changed:
            self._decided = decided
            self._changed.notify_all()

    @property
    def _kv_store(self) -> KVStore:
        return self._session.kv_store


def _encode(report: StepReport) -> bytes:
    return json.dumps([report.complete, report.past, report.off]).encode()
