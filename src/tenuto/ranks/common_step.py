"""Which step all ranks keep, where each keeps the newest two and lets go of the older for the next.

A rank that has a step whole says so, and from then on lets go neither of it nor of the last step that all have, until
it is decided: once all have the step it is the one that all keep, and the one before may go; once one rank is past it
without having it, it is of no use, and goes first. Only the coordinator decides. So at any moment, whichever ranks are
killed, there is a step that all have, from the first that all had on.

Nothing here is asked of the training's collectives, nor at a step of all: each rank puts one key for a step that it
keeps, the coordinator another, all of it beside training. Training waits only where a rank would let go of a step
before it is decided.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tenuto.errors import DeadlineExceeded, RankStoreLost
from tenuto.ranks.contract import KVStore
from tenuto.ranks.session import Session

NONE: Final = -1
"""No step."""
_FIRST_PAUSE_S: Final = 0.001
IDLE_S: Final = 60.0
"""How long the thread sleeps at a time where nothing is to be told."""
JOIN_S: Final = 1.0
"""How long the end waits for the thread: what it still tells nobody needs."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one rank says: the newest step that it has whole, the newest that it is past, having it or not (never below
    `whole`), and why it keeps none any more."""

    whole: int = NONE
    past: int = NONE
    off: str = ""


@dataclass(frozen=True, slots=True)
class StepDecision:
    """`common`: the newest step that all have had, which they keep. Of those above it, up to `past`, which some rank is
    past, at most one may still become one that all have: `hope`. `off`: why nobody keeps any more."""

    common: int = NONE
    past: int = NONE
    hope: int = NONE
    off: str = ""

    def open(self, told: StepReport) -> bool:
        """Whether the step that a rank has may still become the one that all keep."""
        return told.whole > self.common and (told.whole > self.past or told.whole == self.hope)


def decide(before: StepDecision, told: Sequence[StepReport]) -> StepDecision:
    """What follows from what all ranks say. `told` may be old: what a rank has said stands until it is decided."""
    off = before.off or next((f"rank {rank}: {one.off}" for rank, one in enumerate(told) if one.off), "")
    newest = max(told, key=lambda one: one.past)
    step = newest.whole
    hope = step if all(one.whole == step for one in told if one.past >= step) else NONE
    common = step if all(one.whole == step for one in told) else NONE
    common = max(before.common, common)
    return StepDecision(common, max(before.past, newest.past), hope if hope > common else NONE, off)


class CommonStep:
    """The same on each rank. To be called by any thread."""

    def __init__(self, session: Session, common: int = NONE) -> None:
        """`common`: the step that all have already, `NONE` if there is none."""
        self._session = session
        self._told = StepReport(common, common)
        self._decided = StepDecision(common)
        self._others = [self._told] * session.world_size
        self._changed = threading.Condition()
        self._new = threading.Event()
        self._stopped = threading.Event()
        self._patient = True
        self._thread = threading.Thread(target=self._run, name="tenuto-kept-steps", daemon=True)
        self._thread.start()

    @staticmethod
    def keys(session: Session) -> list[str]:
        """What it may leave on the board."""
        return [session.key("common"), *(session.key("kept", rank) for rank in range(session.world_size))]

    @property
    def common(self) -> int:
        """The newest step of which it is known here that all ranks have it."""
        with self._changed:
            return self._decided.common

    @property
    def off(self) -> str:
        """Why nobody keeps any step any more, where a rank has said so."""
        with self._changed:
            return self._decided.off

    def sealed(self, step: int) -> None:
        """This rank has `step`."""
        self._report(lambda told: replace(told, whole=step, past=max(step, told.past)))

    def missed(self, step: int) -> None:
        """This rank is past `step` and does not have it."""
        self._report(lambda told: replace(told, past=max(step, told.past)))

    def turn_off(self, why: str) -> None:
        """This rank keeps none any more."""
        self._report(lambda told: replace(told, off=told.off or why))

    def settle(self, timeout: float) -> int:
        """Returns once it is decided what becomes of the newest step that this rank has: the step that all keep, and
        this one with them. Any other may go. DeadlineExceeded after `timeout` seconds; from then on at once, until it
        is decided after all."""
        with self._changed:
            patience = timeout if self._patient else 0.0
            self._patient = self._changed.wait_for(self._settled, patience)
            if not self._patient:
                raise DeadlineExceeded(f"it is not known whether all ranks have step {self._told.whole} in memory")
            return self._decided.common

    def _settled(self) -> bool:
        return not self._decided.open(self._told) or bool(self._decided.off)

    def close(self) -> None:
        """Tells no more, and hears no more."""
        self._stopped.set()
        self._new.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    # -- beside training -----------------------------------------------------------------------------------------------

    def _report(self, change: Callable[[StepReport], StepReport]) -> None:
        with self._changed:
            self._told = change(self._told)
            self._new.set()

    def _run(self) -> None:
        """Tells what is new, then looks until it is decided."""
        pause, said = _FIRST_PAUSE_S, self._told
        while not self._stopped.is_set():
            if not self._new.wait(IDLE_S):
                continue
            with self._changed:
                told, decided = self._told, self._decided
                if told != said:
                    pause = _FIRST_PAUSE_S
                elif not decided.open(told):
                    self._new.clear()
                    continue
            try:
                said = self._advance(told, said)
            except RankStoreLost as error:
                if error.lasting:
                    return  # nothing is decided any more: what all had last stays
            self._stopped.wait(pause)
            pause = min(pause * 1.5, self._kv_store.longest_pause_s)

    def _advance(self, told: StepReport, said: StepReport) -> StepReport:
        """One exchange. What this rank has said by now."""
        session, timeout = self._session, self._session.settings.answer_s
        if session.is_coordinator:
            self._receive_reports(told, timeout)
            self._announce(timeout)
        else:
            if told != said:
                self._kv_store.put(session.key("kept", session.rank), _encode(told), timeout=timeout)
            raw = self._kv_store.get(session.key("common"), timeout=timeout)
            if raw is not None:
                self._follow(StepDecision(*json.loads(raw)))
        return told

    def _receive_reports(self, told: StepReport, timeout: float) -> None:
        """On the coordinator: what those say who were behind when they were last heard."""
        session = self._session
        self._others[session.rank] = told
        behind = [rank for rank, one in enumerate(self._others) if rank and one.past < told.past]
        raws = self._kv_store.get_many([session.key("kept", rank) for rank in behind], timeout=timeout)
        for rank, raw in zip(behind, raws, strict=True):
            if raw is not None:
                self._others[rank] = StepReport(*json.loads(raw))

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


def _encode(told: StepReport) -> bytes:
    return json.dumps([told.whole, told.past, told.off]).encode()
