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

from tenuto.concurrency.worker_threads import BackgroundWork, background_threads, foreground_threads
from tenuto.engine.save.handle import Save
from tenuto.engine.staging.budget import BudgetedArena, ImageTooLarge
from tenuto.engine.staging.plan import Planner, SavePlan
from tenuto.errors import DeadlineExceeded, SaveFailed
from tenuto.events import Emitter, Warned
from tenuto.state.contract import Flattened

ROOM_DEADLINE_S: Final = 600.0
"""How long a state that has outgrown the lanes waits until those that are being written are."""


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """Memory of one image. `taken`: from the capture until it is written."""

    arenas: BudgetedArena
    planner: Planner
    plan: SavePlan | None = None
    taken: bool = False

    def release(self) -> None:
        self.plan = None
        self.planner.release()


class StagingPool:
    """The lanes of one run and rank, at most `count`. The training thread takes them; whoever has written gives back.

    `most`: how many saves of the present structure may be in flight. `beside`: bytes of the budget that are taken
    elsewhere.
    """

    def __init__(
        self,
        make: Callable[[int, Callable[[], int]], BudgetedArena],
        count: int,
        chunk_bytes: int,
        emitter: Emitter,
        *,
        rank: int,
        beside: Callable[[], int],
    ) -> None:
        """`make`: the holder of one lane's memory, by its number and what it has to ask for the bytes of the others."""
        self._all: list[StagingBuffer] = []
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
            self._all.append(StagingBuffer(arenas, planner))

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
            except (ImageTooLarge, SaveFailed):
                return  # the first save says what there is to say
            if arena.window is not None:
                return

    def tight(self, nbytes: int) -> bool:
        """Whether an image of about `nbytes` has not the room to be there as a whole, beside what is kept elsewhere."""
        return not self._all[0].taken and self._all[0].arenas.tight(nbytes)

    def retry_room(self) -> None:
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

    def _make(self, lane: StagingBuffer, flattened: Flattened) -> SavePlan | None:
        """The plan over this lane's memory; None where it does not fit beside the others."""
        while True:
            others = [other for other in self._all if other is not lane and other.arenas.nbytes]
            lane.arenas.whole = bool(others)
            if not lane.planner.fits(flattened):
                lane.plan = None  # its views would keep the memory that is given back before more is asked for
            try:
                plan = lane.planner.plan(flattened)
            except ImageTooLarge as error:
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

    def _fitting(self, flattened: Flattened) -> list[StagingBuffer]:
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


# --------------------------------------------------------------------------------------------------
# The queue of saves in flight: each has a thread of its own, and one writes at a time, in the order of their taking.
#
# A thread for each, and not one for all, because the thread of a save that training waits for must not stand back
# behind training, and because a state can be sealed in memory while the one before it is still being written.

Turn = Callable[[], None]
"""Returns when everything before has been written, and what follows that is done."""


class WriteQueue:
    """The saves of one run, entered by one training thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saves: list[Save] = []
        self._images: set[str] = set()
        """The ids of the saves that have an image of their own still: a hung one that was given up among them."""
        self._work: BackgroundWork | None = None

    @property
    def busy(self) -> bool:
        """Whether a thread is at work: on a save, or on what follows one."""
        return self._work is not None and self._work.is_alive()

    @property
    def in_flight(self) -> list[Save]:
        """The saves that have not ended, oldest first."""
        with self._changed:
            return [save for save in self._saves if not save.done]

    @property
    def images(self) -> int:
        """How many saves have an image of their own still."""
        with self._changed:
            return len(self._images)

    def enter(self, save: Save) -> None:
        """It is about to be captured, and will be written after those that are in flight."""
        before = self.in_flight
        with self._changed:
            save.wait_behind(before[-1] if before else None)
            self._saves.append(save)
            self._images.add(save.save_id)

    def start(self, save: Save, work: Callable[[Turn | None], None], *, stands_back: bool) -> None:
        """Runs `work` in a thread; `stands_back`: it lowers that thread's priority. It is given what to call before it
        writes; None where its turn has come."""
        before = self._work
        turn = before.join if before is not None and before.is_alive() else None
        pool = background_threads if stands_back else foreground_threads
        self._work = pool.submit(lambda: work(turn), f"tenuto-save-{save.step}")

    def give_back(self, save: Save) -> None:
        """Its image is needed no more. Before it is said to have ended: who waits for that finds room for the next."""
        with self._changed:
            self._images.discard(save.save_id)
            self._changed.notify_all()

    def leave(self, save: Save) -> None:
        """It has ended, or never will."""
        with self._changed:
            self._saves.remove(save)

    def await_room(self, most: Callable[[], int], timeout: float | None) -> bool:
        """Whether fewer than `most()` saves have an image of their own within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._images) < most(), timeout)

    def join(self, timeout: float | None) -> bool:
        """Whether all is over that has been started, within `timeout` seconds."""
        if self._work is not None:
            self._work.join(timeout)
        return not self.busy
