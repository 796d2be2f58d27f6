"""The slots of the memory tier: which holds what, which is being filled, and which is to be filled next.

A private image (`staging/pool`) is free once it is written, and the one that fits the structure is taken. A slot stays
sealed until it is filled again, so the one with the oldest seal is taken, and only while another one is sealed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

from tenuto.codec.chunk_map import chunk_count
from tenuto.codec.digest import DIGEST_BYTES
from tenuto.engine.memory_tier.seal import Seal
from tenuto.engine.memory_tier.slot_file import LastingSlot
from tenuto.engine.staging.arena import Arena
from tenuto.engine.staging.plan import SavePlan, StagingBuffer
from tenuto.errors import DeadlineExceeded
from tenuto.events import Emitter
from tenuto.state.contract import Flattened

LEAF_BYTES: Final = 512
"""Room that a leaf's row, path and place in the tree may take; where it is not enough the file grows."""
DESCRIBED_BYTES: Final = 128 << 10
FILLING_DEADLINE_S: Final = 120.0


class SlotArena:
    """Supplies the memory of one image from a lasting slot."""

    def __init__(self, file: LastingSlot, chunk_bytes: int, admit: Callable[[LastingSlot, int], None]) -> None:
        """`admit` raises OSError where an image of so many bytes may not be in the slot."""
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._admit = admit
        self.leaves = 0
        self.replaceable = True
        """Whether what the slot holds may be lost for new memory."""

    def acquire(self, nbytes: int, *, step: int = 0) -> Arena:
        """Raises OSError where there is no room, or the budget has none; FileExistsError where only new memory would do
        and the slot is not `replaceable`."""
        arena = self._file.arena
        if arena is not None and arena.nbytes >= nbytes:
            return arena
        self._admit(self._file, nbytes)
        described = DESCRIBED_BYTES + self.leaves * LEAF_BYTES + chunk_count(nbytes, self._chunk_bytes) * DIGEST_BYTES
        found = self._file.reuse(nbytes, described)
        if found is None and not self.replaceable:
            raise FileExistsError("what lies there is still needed")
        return found or self._file.make(nbytes, described)

    def release(self) -> None:
        self._file.unmap()


class MemorySlot(StagingBuffer[SlotArena]):
    """One slot and its image.

    footer: the seal of its image, `number` the block that says so. filling: between the first byte of a capture and its
    seal. writing: also while a save to the store reads it.
    """

    def __init__(
        self,
        file: LastingSlot,
        chunk_bytes: int,
        emitter: Emitter,
        *,
        rank: int,
        admit: Callable[[LastingSlot, int], None],
    ) -> None:
        super().__init__(SlotArena(file, chunk_bytes, admit), chunk_bytes, emitter, rank=rank)
        self.file = file
        self.footer: Seal | None = None
        self.number = 0
        self.filling = False

    @property
    def nbytes(self) -> int:
        """Bytes that its image takes, also one that is sealed and not mapped."""
        if self.file.arena is not None:
            return self.file.arena.nbytes
        if self.footer is not None:
            return self.footer.image
        try:
            with self.file.descriptor() as descriptor:
                return os.fstat(descriptor).st_size
        except OSError:
            return 0

    def prepare(self, flattened: Flattened) -> SavePlan:
        """Returns the plan for this state, over this slot's memory. Raises OSError where there is no room for it."""
        self.memory.leaves = len(flattened.specs)
        try:
            return super().prepare(flattened)
        except BaseException:
            self.release()
            raise

    def open(self, flattened: Flattened) -> SavePlan:
        """Returns the plan as `prepare` does, and unseals the image: from here on its memory may be written to."""
        self.footer = None
        plan = self.prepare(flattened)
        try:
            self.file.unseal()
        except FileNotFoundError:
            del plan
            self.release()  # shared memory was cleared: begun anew
            self.file.discard()
            plan = self.prepare(flattened)
        return plan


class SlotPool:
    """Hands out the slot to be filled next: the one with the oldest seal, or none, that nobody writes from."""

    def __init__(self, slots: Sequence[MemorySlot]) -> None:
        self.slots = tuple(slots)
        self._changed = threading.Condition()

    def busy(self) -> bool:
        """Returns whether a capture has not been sealed yet: until then complete images are in the other slots only."""
        with self._changed:
            return any(slot.filling for slot in self.slots)

    def begin(self, *, writing: bool, timeout: float = FILLING_DEADLINE_S) -> MemorySlot:
        """Returns the slot to be filled next, marked so. DeadlineExceeded if the capture before is not sealed in time,
        or all are being written from for so long."""
        with self._changed:
            self.await_sealed(timeout)
            if not self._changed.wait_for(lambda: not all(slot.writing for slot in self.slots), timeout):
                raise DeadlineExceeded(f"no image in memory had been written to the store within {timeout:g} s")
            free = [slot for slot in self.slots if not slot.writing]
            slot = min(free, key=lambda one: one.footer.sequence if one.footer is not None else 0)
            slot.filling, slot.writing = True, writing
            return slot

    def await_sealed(self, timeout: float = FILLING_DEADLINE_S) -> None:
        """Returns once no capture is under way. DeadlineExceeded."""
        with self._changed:
            if not self._changed.wait_for(lambda: not any(slot.filling for slot in self.slots), timeout):
                raise DeadlineExceeded(f"the state taken into memory before was not sealed within {timeout:g} s")

    def sealed(self, slot: MemorySlot, footer: Seal, number: int) -> None:
        with self._changed:
            slot.footer, slot.number, slot.filling = footer, number, False
            self._changed.notify_all()

    def unsealed(self, slot: MemorySlot) -> None:
        """Notes that it could not be sealed; a save to the store may still read it."""
        with self._changed:
            slot.filling = False
            self._changed.notify_all()

    def ended(self, slot: MemorySlot) -> None:
        """Notes that nobody writes from it any more; what was not sealed by then never will be."""
        with self._changed:
            slot.filling = slot.writing = False
            self._changed.notify_all()

    def keep(self, slots: Sequence[MemorySlot]) -> list[MemorySlot]:
        """Keeps these alone; returns the others, which nobody uses."""
        with self._changed:
            others = [slot for slot in self.slots if slot not in slots]
            self.slots = tuple(slots)
            return others

    def at_rest(self) -> bool:
        """Returns whether nobody fills one, nor writes from one."""
        with self._changed:
            return not any(slot.filling or slot.writing for slot in self.slots)

    def find(self, plan: SavePlan) -> MemorySlot | None:
        """Returns the slot whose memory this plan fills."""
        return next((slot for slot in self.slots if slot.plan is plan), None)

    def newest(self) -> Seal | None:
        footers = [slot.footer for slot in self.slots if slot.footer is not None]
        return max(footers, key=lambda footer: footer.sequence, default=None)
