"""The slots of the memory tier: which holds what, which is being filled, and which is to be filled next."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.engine.planned import Planner, SavePlan
from holdfast.errors import DeadlineExceeded
from holdfast.events import Emitter
from holdfast.image.arena import Arena
from holdfast.image.lasting import LastingSlot
from holdfast.repo.footer import Footer
from holdfast.state.contract import Flattened

LEAF_BYTES: Final = 512
"""Room that a leaf's row, path and place in the tree may take; where it is not enough the file grows."""
DESCRIBED_BYTES: Final = 128 << 10
FILLING_DEADLINE_S: Final = 120.0


class SlotArenas:
    """What a planner takes its memory from, where that is one lasting slot."""

    def __init__(self, slot: LastingSlot, chunk_bytes: int, admit: Callable[[LastingSlot, int], None]) -> None:
        """`admit` raises OSError where an image of so many bytes may not be in the slot."""
        self._slot = slot
        self._chunk_bytes = chunk_bytes
        self._admit = admit
        self.leaves = 0
        self.may_make = True
        """Whether what the slot holds may be lost for new memory."""

    def acquire(self, nbytes: int, *, step: int = 0) -> Arena:
        """OSError where there is no room, or the budget has none; FileExistsError where only new memory would do and
        none may be made."""
        arena = self._slot.arena
        if arena is not None and arena.nbytes >= nbytes:
            return arena
        self._admit(self._slot, nbytes)
        described = DESCRIBED_BYTES + self.leaves * LEAF_BYTES + -(-nbytes // self._chunk_bytes) * 16
        found = self._slot.reuse(nbytes, described)
        if found is None and not self.may_make:
            raise FileExistsError("what lies there is still needed")
        return found or self._slot.make(nbytes, described)

    def release(self) -> None:
        self._slot.let_go()


@dataclass(slots=True, eq=False)
class Half:
    """One slot and its image: of two, one is filled while the other is whole; with several saves in flight there are
    more. `footer`: what it holds sealed, and `number` the block that says so. `filling`: between the first byte
    of a capture and its seal. `writing`: a save to the store reads it."""

    slot: LastingSlot
    arenas: SlotArenas
    planner: Planner
    plan: SavePlan | None = None
    footer: Footer | None = None
    number: int = 0
    filling: bool = False
    writing: bool = False

    @classmethod
    def of(
        cls,
        slot: LastingSlot,
        chunk_bytes: int,
        emitter: Emitter,
        *,
        rank: int,
        admit: Callable[[LastingSlot, int], None],
    ) -> Half:
        arenas = SlotArenas(slot, chunk_bytes, admit)
        return cls(slot, arenas, Planner(arenas, chunk_bytes, emitter, rank=rank))

    @property
    def nbytes(self) -> int:
        """What its image takes, one that is kept and not mapped too."""
        if self.slot.arena is not None:
            return self.slot.arena.nbytes
        if self.footer is not None:
            return self.footer.image
        try:
            with self.slot.descriptor() as descriptor:
                return os.fstat(descriptor).st_size
        except OSError:
            return 0

    def prepare(self, flattened: Flattened) -> SavePlan:
        """The plan for this state, over this slot's memory. OSError where there is no room for it."""
        self.arenas.leaves = len(flattened.specs)
        if not self.planner.fits(flattened):
            self.plan = None  # its views would keep the memory that is given back before more is asked for
        try:
            self.plan = self.planner.plan(flattened)
        except BaseException:
            self.plan = None
            self.planner.release()
            raise
        return self.plan

    def open(self, flattened: Flattened) -> SavePlan:
        """The same, with nothing sealed in it any more: from here on its memory may be written to."""
        self.footer = None
        plan = self.prepare(flattened)
        try:
            self.slot.unseal()
        except FileNotFoundError:
            del plan
            self.planner.release()  # somebody has cleared shared memory: begun anew
            self.slot.discard()
            plan = self.prepare(flattened)
        return plan


class Halves:
    """Hands out the half to be filled next: the one with the oldest seal, or none, that nobody is busy with."""

    def __init__(self, halves: Sequence[Half]) -> None:
        self.all = tuple(halves)
        self._changed = threading.Condition()

    def busy(self) -> bool:
        """Whether a capture has not been sealed yet: until then whole images are in the other halves alone."""
        with self._changed:
            return any(half.filling for half in self.all)

    def begin(self, *, writing: bool, timeout: float = FILLING_DEADLINE_S) -> Half:
        """The half to be filled next, marked so. DeadlineExceeded if the capture before is not sealed in time, or all
        are being written from for so long."""
        with self._changed:
            self.await_sealed(timeout)
            if not self._changed.wait_for(lambda: not all(half.writing for half in self.all), timeout):
                raise DeadlineExceeded(f"no image in memory had been written to the store within {timeout:g} s")
            free = [half for half in self.all if not half.writing]
            half = min(free, key=lambda one: one.footer.sequence if one.footer is not None else 0)
            half.filling, half.writing = True, writing
            return half

    def await_sealed(self, timeout: float = FILLING_DEADLINE_S) -> None:
        """Returns once no capture is under way. DeadlineExceeded."""
        with self._changed:
            if not self._changed.wait_for(lambda: not any(half.filling for half in self.all), timeout):
                raise DeadlineExceeded(f"the state taken into memory before was not sealed within {timeout:g} s")

    def sealed(self, half: Half, footer: Footer, number: int) -> None:
        with self._changed:
            half.footer, half.number, half.filling = footer, number, False
            self._changed.notify_all()

    def unsealed(self, half: Half) -> None:
        """It could not be sealed; a save to the store may still read it."""
        with self._changed:
            half.filling = False
            self._changed.notify_all()

    def ended(self, half: Half) -> None:
        """Nobody writes from it any more; what was not sealed by then never will be."""
        with self._changed:
            half.filling = half.writing = False
            self._changed.notify_all()

    def keep(self, halves: Sequence[Half]) -> list[Half]:
        """From here on there are these alone; the others, which nobody is busy with."""
        with self._changed:
            others = [half for half in self.all if half not in halves]
            self.all = tuple(halves)
            return others

    def at_rest(self) -> bool:
        """Whether nobody fills one, nor writes from one."""
        with self._changed:
            return not any(half.filling or half.writing for half in self.all)

    def of(self, plan: SavePlan) -> Half | None:
        """Whose memory this plan fills."""
        return next((half for half in self.all if half.plan is plan), None)

    def newest(self) -> Footer | None:
        footers = [half.footer for half in self.all if half.footer is not None]
        return max(footers, key=lambda footer: footer.sequence, default=None)
