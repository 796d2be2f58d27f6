"""Lanes: one image for each save that may be in flight, all of them within one budget (I9).

The first lane is as good as memory allows, be it a window. Another one is there only where its whole image fits beside
the others: fewer saves are in flight then, and it is said once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.engine.arenas import ArenaHolder, NotWhole
from holdfast.engine.planned import Planner, SavePlan
from holdfast.errors import DeadlineExceeded, SaveFailed
from holdfast.events import Emitter, Warned
from holdfast.state.contract import Flattened

ROOM_DEADLINE_S: Final = 600.0
"""How long a state that has outgrown the lanes waits until those that are being written are."""


@dataclass(slots=True, eq=False)
class Lane:
    """Memory of one image. `taken`: from the capture until it is written."""

    arenas: ArenaHolder
    planner: Planner
    plan: SavePlan | None = None
    taken: bool = False

    def release(self) -> None:
        self.plan = None
        self.planner.release()


class Lanes:
    """The lanes of one run and rank, at most `count`. The training thread takes them; whoever has written gives back.

    `most`: how many saves of the present structure may be in flight. `beside`: bytes of the budget that are taken
    elsewhere.
    """

    def __init__(
        self,
        make: Callable[[int, Callable[[], int]], ArenaHolder],
        count: int,
        chunk_bytes: int,
        emitter: Emitter,
        *,
        rank: int,
        beside: Callable[[], int],
    ) -> None:
        """`make`: the holder of one lane's memory, by its number and what it has to ask for the bytes of the others."""
        self._all: list[Lane] = []
        self._beside = beside
        self._emitter = emitter
        self._changed = threading.Condition()
        self._fingerprint: str | None = None
        self._told = False
        self.most = count
        for number in range(count):
            arenas = make(number, self._beside_of(number))
            # What there is to say of an image's place is said of the first.
            planner = Planner(arenas, chunk_bytes, emitter if number == 0 else Emitter(), rank=rank)
            self._all.append(Lane(arenas, planner))

    def prepare(self, flattened: Flattened) -> None:
        """Takes the memory of all lanes for this state, as far as it fits, and touches it."""
        self._structure(flattened)
        for lane in self._all:
            if lane.taken or len(self._fitting(flattened)) >= self.most:
                continue
            if self._make(lane, flattened) is None:
                break

    def expect(self, nbytes: int) -> None:
        """Takes the memory of all lanes for images of about `nbytes`, as far as it fits, and touches it. Where an image
        turns out to be larger, its lane takes other memory."""
        for number, lane in enumerate(self._all):
            if lane.taken or lane.arenas.nbytes:
                return
            lane.arenas.whole = number > 0
            try:
                arena = lane.arenas.acquire(nbytes)
            except (NotWhole, SaveFailed):
                return  # the first save says what there is to say
            if arena.window is not None:
                return

    def tight(self, nbytes: int) -> bool:
        """Whether an image of about `nbytes` has not the room to be there as a whole, beside what is kept elsewhere."""
        return not self._all[0].taken and self._all[0].arenas.tight(nbytes)

    def look_again(self) -> None:
        """There is more room than there was: a window that nobody uses is given back."""
        for lane in self._all:
            if not lane.taken:
                lane.release()

    def take(self, flattened: Flattened, timeout: float = ROOM_DEADLINE_S) -> SavePlan:
        """The plan of a capture into a lane that nobody reads, until `give_back`. To be called while fewer than `most`
        are taken.

        Where the structure is new and its image does not fit beside those that are being written, it waits for them:
        DeadlineExceeded after `timeout` seconds. SaveFailed where there is no memory for it (I9).
        """
        self._structure(flattened)
        until = time.monotonic() + timeout
        while True:
            with self._changed:
                free = [lane for lane in self._all if not lane.taken]
            fitting = [lane for lane in free if lane.planner.fits(flattened)]
            lane = next(iter([*fitting, *free]), None)
            if lane is not None and (plan := self._make(lane, flattened)) is not None:
                lane.plan, lane.taken = plan, True
                return plan
            self._await_one(len(free), until)

    def give_back(self, plan: SavePlan) -> None:
        """Nobody reads or fills this plan's image any more."""
        with self._changed:
            for lane in self._all:
                if lane.plan is plan:
                    lane.taken = False
            self._changed.notify_all()

    def release(self) -> None:
        """Gives the memory of all lanes back."""
        for lane in self._all:
            lane.release()

    def _structure(self, flattened: Flattened) -> None:
        """Of a new structure as many lanes may fit as there are."""
        if flattened.fingerprint != self._fingerprint:
            self._fingerprint, self.most = flattened.fingerprint, len(self._all)

    def _make(self, lane: Lane, flattened: Flattened) -> SavePlan | None:
        """The plan over this lane's memory; None where it does not fit beside the others."""
        while True:
            others = [other for other in self._all if other is not lane and other.arenas.nbytes]
            lane.arenas.whole = bool(others)
            if not lane.planner.fits(flattened):
                lane.plan = None  # its views would keep the memory that is given back before more is asked for
            try:
                plan = lane.planner.plan(flattened)
            except NotWhole as error:
                lane.release()
                stale = [other for other in others if not other.taken and not other.planner.fits(flattened)]
                for other in stale:
                    other.release()
                if stale:
                    continue
                if all(other.planner.fits(flattened) for other in others):
                    self._do_with(len(others), str(error))
                return None
            if plan.arena.window is not None:
                self._do_with(1, "a window holds one image at a time")
            return plan

    def _do_with(self, fewer: int, why: str) -> None:
        if fewer < self.most:
            self.most = fewer
            if not self._told:
                self._told = True
                self._emitter.emit(Warned(f"{fewer} of {len(self._all)} saves may be in flight at once: {why}"))

    def _fitting(self, flattened: Flattened) -> list[Lane]:
        return [lane for lane in self._all if lane.planner.fits(flattened)]

    def _await_one(self, free: int, until: float) -> None:
        with self._changed:
            given_back = self._changed.wait_for(
                lambda: sum(not lane.taken for lane in self._all) > free, max(until - time.monotonic(), 0.0)
            )
        if not given_back:
            raise DeadlineExceeded(
                "there is no room for another image before those in flight are written, and none was in time",
                hint="raise memory_budget=, give the job more memory, or pass a smaller in_flight=",
            )

    def _beside_of(self, number: int) -> Callable[[], int]:
        return lambda: (
            self._beside() + sum(lane.arenas.nbytes for place, lane in enumerate(self._all) if place != number)
        )
