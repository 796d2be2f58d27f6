"""The memory tier: the newest states of a run, whole and sealed, in shared memory that outlives the process.

Two slots, so that a whole image is always there: one is filled while the other stays sealed; and one more for each
further save that may be in flight. What goes to the store is sealed here as well, before it is written. A process that
starts finds what the one before left, and goes on from it if nothing else has been gone on from since
(`repo/adoption`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from tenuto.codec.chunk_map import chunk_count
from tenuto.codec.digest import DIGEST_BYTES, digest
from tenuto.crashpoints import crashpoint
from tenuto.engine.memory_tier.common_states import common_states
from tenuto.engine.memory_tier.eligibility import Candidate, eligible_images
from tenuto.engine.memory_tier.image_store import Image, open_image
from tenuto.engine.memory_tier.listing import kept_by_others, passed_over, remove_image
from tenuto.engine.memory_tier.seal import Seal, SealedObject, SealHolder, encode_seal, new_seal, newest
from tenuto.engine.memory_tier.shortage import free_room, shortage
from tenuto.engine.memory_tier.slot_file import LastingSlot, take_slots
from tenuto.engine.save.manifest_builder import spelled
from tenuto.engine.save.rank_group import RankGroup
from tenuto.engine.staging.arena import Arena
from tenuto.engine.staging.plan import Planner, SavePlan
from tenuto.errors import CorruptionError, DeadlineExceeded
from tenuto.events import Emitter, Warned
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import Index
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo
from tenuto.state.contract import Flattened

if TYPE_CHECKING:
    from tenuto.engine.save.job import ManifestDetails


# --------------------------------------------------------------------------------------------------
# The slots of the memory tier: which holds what, which is being filled, and which is to be filled next.

LEAF_BYTES: Final = 512
"""Room that a leaf's row, path and place in the tree may take; where it is not enough the file grows."""
DESCRIBED_BYTES: Final = 128 << 10
FILLING_DEADLINE_S: Final = 120.0


class SlotArena:
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
        described = DESCRIBED_BYTES + self.leaves * LEAF_BYTES + chunk_count(nbytes, self._chunk_bytes) * DIGEST_BYTES
        found = self._slot.reuse(nbytes, described)
        if found is None and not self.may_make:
            raise FileExistsError("what lies there is still needed")
        return found or self._slot.make(nbytes, described)

    def release(self) -> None:
        self._slot.let_go()


@dataclass(slots=True, eq=False)
class MemorySlot:
    """One slot and its image: of two, one is filled while the other is whole; with several saves in flight there are
    more. `footer`: what it holds sealed, and `number` the block that says so. `filling`: between the first byte
    of a capture and its seal. `writing`: a save to the store reads it."""

    slot: LastingSlot
    arenas: SlotArena
    planner: Planner
    plan: SavePlan | None = None
    footer: Seal | None = None
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
    ) -> MemorySlot:
        arenas = SlotArena(slot, chunk_bytes, admit)
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


class SlotPool:
    """Hands out the half to be filled next: the one with the oldest seal, or none, that nobody is busy with."""

    def __init__(self, halves: Sequence[MemorySlot]) -> None:
        self.all = tuple(halves)
        self._changed = threading.Condition()

    def busy(self) -> bool:
        """Whether a capture has not been sealed yet: until then whole images are in the other halves alone."""
        with self._changed:
            return any(half.filling for half in self.all)

    def begin(self, *, writing: bool, timeout: float = FILLING_DEADLINE_S) -> MemorySlot:
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

    def sealed(self, half: MemorySlot, footer: Seal, number: int) -> None:
        with self._changed:
            half.footer, half.number, half.filling = footer, number, False
            self._changed.notify_all()

    def unsealed(self, half: MemorySlot) -> None:
        """It could not be sealed; a save to the store may still read it."""
        with self._changed:
            half.filling = False
            self._changed.notify_all()

    def ended(self, half: MemorySlot) -> None:
        """Nobody writes from it any more; what was not sealed by then never will be."""
        with self._changed:
            half.filling = half.writing = False
            self._changed.notify_all()

    def keep(self, halves: Sequence[MemorySlot]) -> list[MemorySlot]:
        """From here on there are these alone; the others, which nobody is busy with."""
        with self._changed:
            others = [half for half in self.all if half not in halves]
            self.all = tuple(halves)
            return others

    def at_rest(self) -> bool:
        """Whether nobody fills one, nor writes from one."""
        with self._changed:
            return not any(half.filling or half.writing for half in self.all)

    def of(self, plan: SavePlan) -> MemorySlot | None:
        """Whose memory this plan fills."""
        return next((half for half in self.all if half.plan is plan), None)

    def newest(self) -> Seal | None:
        footers = [half.footer for half in self.all if half.footer is not None]
        return max(footers, key=lambda footer: footer.sequence, default=None)


LEAST: Final = 2
"""Slots without which there is no memory tier."""


class MemoryTier:
    """The slots of one run and rank. Used by the training thread; `seal` and `ended` by a writing thread as well.

    `off` says in words why there is no memory tier; then every save goes to the store alone.
    """

    def __init__(
        self,
        repo: Repo,
        run: str,
        *,
        group: RankGroup,
        budget: int | None = None,
        in_flight: int = 1,
        emitter: Emitter,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`group`: the ranks that keep states together. `in_flight`: how many images may be written to the store at a
        time; one more is there to be filled."""
        self.off = ""
        self.saved_s = 0.0
        """When a save to the store was last begun, or training was; by this boot's monotonic clock."""
        self._repo = repo
        self._run = run_key(run)
        self.rank = group.rank
        self._ranks = group.world_size
        self._common = common_states(group)
        self._budget = budget
        self._slots = max(LEAST, in_flight + 1)
        self._told_in_flight = self._slots - 1
        self._why_fewer = ""
        self._letting_go = threading.Lock()
        self._to_let_go: Callable[[], None] | None = None
        """Set where it could not be done yet, because a writer reads an image."""
        self._emitter = emitter
        self._warn = warn or (lambda message: emitter.emit(Warned(message, run)))
        self._halves: SlotPool | None = None
        self._holder: SealHolder | None = None
        self._adopted: MemorySlot | None = None
        self._adopted_step: int | None = None
        self._sequence = 0
        self._why_not_held = ""

    @property
    def on(self) -> bool:
        """Whether states are kept: the slots are this process's, the run is claimed, and the group has agreed."""
        return self._has_slots and self._common.agreed

    @property
    def _has_slots(self) -> bool:
        return self._halves is not None and not self.off

    @property
    def busy(self) -> bool:
        """Whether the state taken last has not been sealed yet."""
        return self._halves is not None and self._halves.busy()

    @property
    def sealed(self) -> Seal | None:
        """The newest image that is whole, on all ranks."""
        halves = self._halves
        return self._common.newest(halves) if halves is not None and self._holder is not None else None

    @property
    def blocked(self) -> str:
        """Why the slots are not this process's; empty where they are."""
        return "" if self._halves is not None else self.off or self._why_not_held

    @property
    def in_flight(self) -> int:
        """How many images may be written to the store at a time: one is always left to be filled."""
        halves = self._halves
        return min(max(len(halves.all), LEAST) if halves is not None else self._slots, self._slots) - 1

    @property
    def nbytes(self) -> int:
        """What the images take now, also where there is no memory tier any more and what is sealed is kept."""
        halves = self._halves
        return sum(half.nbytes for half in halves.all) if halves is not None else 0

    # -- before the claim ----------------------------------------------------------------------------------------------

    def hold(self) -> bool:
        """Takes the slots, if they can be had now: an owner that is dying still has them. Whether they were taken by
        this call. Those of a process that had more are among them where they hold a whole image."""
        if self._halves is not None or self.off:
            return False
        try:
            held = take_slots(self._repo.id, self._run, self.rank, self._slots, of=self._ranks)
        except BlockingIOError as error:
            self._why_not_held = error.strerror or str(error)
        except OSError as error:
            self.turn_off(f"shared memory cannot be used: {error.strerror or error}")
        else:
            chunk, emitter = self._repo.chunk_bytes, self._emitter
            self._halves = SlotPool(
                [MemorySlot.of(slot, chunk, emitter, rank=self.rank, admit=self._admit) for slot in held]
            )
            return True
        return False

    def prepare(self, flattened: Flattened) -> None:
        """Takes the memory that saves of this state need, as far as nothing that may be gone on from lies in it."""
        self.hold()
        if self._halves is None or self.off:
            return
        try:
            for half in self._halves.all:
                half.arenas.may_make = half is not self._adopted and (self._holder is not None or not half.slot.seals())
                if self._holder is None and not half.arenas.may_make:
                    half.slot.map_whole()  # to be read by the restore, and used again after it
                    continue
                try:
                    self._prepare(half, flattened)
                except OSError as error:
                    if half is self._adopted or not self._do_without(half, error):
                        raise
            self._report_fewer()
        except OSError as error:
            if self._holder is None and any(half.slot.seals() for half in self._halves.all):
                return  # first to be gone on from; that no more are kept is told once the run is claimed
            self.turn_off(shortage(error))

    def _prepare(self, half: MemorySlot, flattened: Flattened) -> None:
        assert self._halves is not None
        while True:
            try:
                half.prepare(flattened)
                break
            except FileExistsError:
                return  # what lies there is of another size, and still needed: made anew when its turn comes
            except OSError as error:
                # Nobody else's image goes for more than the tier needs.
                spare = sum(one.slot.arena is not None for one in self._halves.all if one is not half) >= LEAST
                if spare or not free_room([half.slot.slot], self._emitter, error):
                    raise

    def _admit(self, slot: LastingSlot, nbytes: int) -> None:
        """OSError where an image of so many bytes in this slot, beside those in the others, goes beyond the budget."""
        if self._budget is None or self._halves is None:
            return
        taken = [half.nbytes for half in self._halves.all if half.slot is not slot]
        images, total = 1 + sum(map(bool, taken)), nbytes + sum(taken)
        if total > self._budget:
            raise OSError(0, f"{images} images take {total >> 20} MiB, and the budget is {self._budget >> 20} MiB")

    def shrink(self) -> bool:
        """There is no memory tier any more, and a save to the store has not the room for a whole image: what is sealed
        goes, for the state that is being saved is newer. Whether there was any, and nobody is busy with it."""
        halves = self._halves
        if not self.off or halves is None or not self.nbytes or not halves.at_rest():
            return False
        self._let_go(lambda half: False)
        return True

    def _do_without(self, half: MemorySlot, error: OSError) -> bool:
        """Lets go of a slot that there is no room for, and so of a save in flight; whether enough are left."""
        halves = self._halves
        if halves is None or len(halves.all) <= LEAST:
            return False
        self._let_go_of(halves.keep([one for one in halves.all if one is not half]), lambda one: False)
        self._why_fewer = error.strerror or str(error)
        return True

    def _report_fewer(self) -> None:
        if self.in_flight < self._told_in_flight and self._why_fewer:
            self._told_in_flight = self.in_flight
            told = f"{self.in_flight} of {self._slots - 1} saves may be in flight at once: one more image in memory"
            self._emitter.emit(Warned(f"{told} does not fit ({self._why_fewer})", self._run))

    def candidates(self, report: Callable[[str], None]) -> list[Candidate]:
        """The sealed images that the run may go on from, newest first. `report` is told why another may not."""
        for message in passed_over(kept_by_others(self._repo.id, self._run, self._ranks), self._ranks):
            report(message)
        return eligible_images(self._repo, self._run, self._sealed(), report)

    def own_images(self) -> list[tuple[MemorySlot, Seal]]:
        """Returns what this rank has sealed, before the claim."""
        return list(self._sealed())

    def _sealed(self) -> Iterator[tuple[MemorySlot, Seal]]:
        for half in self._halves.all if self._halves is not None and not self.off else ():
            sealed = newest(half.slot.seals(), half.slot.name)
            if sealed is not None:
                half.number, footer = sealed
                self._sequence = max(self._sequence, footer.sequence)
                yield half, footer

    def open(self, candidate: Candidate) -> Image:
        """CorruptionError where it is not what was sealed."""
        slot = candidate.half.slot
        with slot.descriptor() as descriptor:
            image = open_image(descriptor, slot.name, chunk_bytes=self._repo.chunk_bytes, whole=slot.map_whole())
        if image is None or image.footer != candidate.footer:
            raise CorruptionError(f"{slot.name} is no longer what it was", subject=slot.name)
        return image

    def take_over(self, candidate: Candidate | None) -> None:
        """Training goes on from this image (None: from none of them), once the run is claimed."""
        self._adopted = candidate.half if candidate is not None else None
        self._adopted_step = candidate.footer.id.step if candidate is not None else None

    # -- after it ------------------------------------------------------------------------------------------------------

    def claimed(self, attempt: Attempt, flattened: Flattened) -> None:
        """The run is this process's. What was gone on from is sealed as its own, so that the next process may go on
        from it too; what was passed over is let go."""
        crashpoint("claimed, memory image not yet resealed")
        self.hold()
        if self._halves is None:
            if not self.off:
                self.turn_off(f"its slots are taken: {self._why_not_held}")
            return
        self._holder = SealHolder(attempt.number, attempt.id)
        try:
            for half, footer in list(self._sealed()):
                if half is self._adopted:
                    self._reseal(half, footer.held_by(self._holder))
                else:
                    half.slot.unseal()
            self._trim()
            for found in kept_by_others(self._repo.id, self._run, self._ranks):
                remove_image(found)
        except OSError as error:
            self.turn_off(f"shared memory cannot be used: {error.strerror or error}")
            return
        self.prepare(flattened)

    def agree(self) -> None:
        """Agrees with the other ranks, all of which have claimed, whether states are kept: by all, or by none."""
        why_not = "" if self._has_slots else self.off or "it has no slots"
        refused = self._common.agree(why_not, self._adopted_step)
        if refused:
            self.turn_off(refused)

    def _trim(self) -> None:
        """Goes on with as many slots as this process needs, that of the adopted image among them."""
        halves = self._halves
        assert halves is not None
        kept = sorted(halves.all, key=lambda half: half is not self._adopted)[: self._slots]
        self._let_go_of(halves.keep(kept), lambda half: False)

    def _reseal(self, half: MemorySlot, footer: Seal) -> None:
        assert self._halves is not None
        half.slot.seal(encode_seal(footer, half.slot.name), beside=half.number)
        self._sequence = max(self._sequence, footer.sequence)
        self._halves.sealed(half, footer, 1 - half.number)

    def save_id(self, id: CheckpointId) -> str:
        """Returns the identity of a state that goes into memory alone."""
        return self._common.save_id(id)

    def missed(self, id: CheckpointId) -> None:
        """Notes that a state that was due is not kept."""
        self._common.missed(id.step)

    def begin(self, flattened: Flattened, *, writing: bool) -> SavePlan | None:
        """The plan of a capture into the half whose turn it is; None where there is no memory tier. `writing`: it will
        be written to the store as well, until `ended`. DeadlineExceeded if the one before was not sealed in time, or
        it is not known in time which image the group can do without."""
        if self._halves is None or self._holder is None or not self.on:
            return None
        refused = self._common.make_way(self._halves)
        if refused:
            self.turn_off(refused)
            return None
        while True:
            half = self._halves.begin(writing=writing)
            half.arenas.may_make = True
            try:
                plan = half.open(flattened)
                self._report_fewer()
                return plan
            except OSError as error:
                self._halves.ended(half)
                if not self._do_without(half, error) and not free_room([half.slot.slot], self._emitter, error):
                    self.turn_off(shortage(error))
                    return None
            except BaseException:
                self._halves.ended(half)
                raise

    def seal(
        self,
        plan: SavePlan,
        id: CheckpointId,
        index: Index,
        flattened: Flattened,
        about: ManifestDetails,
        *,
        created: str,
    ) -> str:
        """Says that the image of this plan is whole, with what describes it; the digest of its content, empty where
        it cannot be sealed: that is told, and fails nothing, whatever it was."""
        halves = self._halves
        half = halves.of(plan) if halves is not None else None
        if half is None or halves is None or self._holder is None or half.slot.arena is None:
            return ""
        try:
            rows, told, content = spelled(id, plan, index, flattened, about=about, created=created)
            half.slot.describe([rows, told])
            self._sequence += 1
            footer = new_seal(
                self._repo,
                id,
                index.save_id,
                self._holder,
                rank=self.rank,
                ranks=self._ranks,
                sequence=self._sequence,
                image=half.slot.arena.nbytes,
                index=SealedObject(len(rows), digest(rows)),
                manifest=SealedObject(len(told), digest(told)),
                saved_s=self.saved_s,
            )
            half.slot.seal(encode_seal(footer, half.slot.name))
        except Exception as error:  # noqa: BLE001 - a save to the store goes on without it
            if half.writing:
                halves.unsealed(half)
            why = getattr(error, "strerror", None) or getattr(error, "message", None) or repr(error)
            self._emitter.emit(Warned(f"step {id.step} is not kept in memory: {why}", str(id)))
            return ""
        self._common.sealed(id.step)
        halves.sealed(half, footer, 0)
        crashpoint("memory image sealed")
        return content

    def ended(self, plan: SavePlan) -> None:
        """Nobody reads or fills the memory of this plan any more. What is not sealed by now will not be."""
        half = self._halves.of(plan) if self._halves is not None else None
        if half is not None and self._halves is not None:
            self._halves.ended(half)
        if self._to_let_go is not None:
            self._to_let_go()

    # -- the end -------------------------------------------------------------------------------------------------------

    def turn_off(self, why: str) -> None:
        """Said once. What is sealed stays where it is, until the end; the rest of the memory is given back."""
        if self.off:
            return
        self._common.turn_off(why)
        self.off = why
        self._warn(f"states are not kept in memory: {why}")
        self._let_go(lambda half: bool(half.slot.seals()), hold=True)

    def close(self, durable: CheckpointId | None) -> None:
        """Gives the slots back. An image of a step beyond `durable`, the newest checkpoint of this process's line,
        stays for the next process; one that is in the store as well is of no use any more."""
        self._common.close()
        if self._halves is None:
            return
        unclaimed = self._holder is None
        self.off = self.off or "it is closed"
        step = durable.step if durable is not None else -1

        def stays(half: MemorySlot) -> bool:
            seals = half.slot.seals()
            found = newest(seals, half.slot.name)
            return bool(seals) if unclaimed else found is not None and found[1].id.step > step

        self._let_go(stays)

    def _let_go(self, stays: Callable[[MemorySlot], bool], *, hold: bool = False) -> None:
        """`hold`: what stays stays this process's. Once nobody reads or fills an image any more: with a writer that
        hangs the slots go with the process."""
        with self._letting_go:
            halves = self._halves
            if halves is None:
                return
            if not halves.at_rest():
                self._to_let_go = partial(self._let_go, stays, hold=hold)
                return
            held = self._let_go_of(halves.all, stays, hold=hold)
            self._halves = SlotPool(held) if held else None
            self._to_let_go = None

    def _let_go_of(
        self, halves: Sequence[MemorySlot], stays: Callable[[MemorySlot], bool], *, hold: bool = False
    ) -> list[MemorySlot]:
        """Which of them are still held."""
        held: list[MemorySlot] = []
        for half in halves:
            try:
                kept = stays(half)
                half.planner.release()
                half.plan = None  # the memory goes with the last view, and a writer that has just ended has some
                if not kept:
                    half.slot.discard()
                if kept and hold:
                    held.append(half)
                else:
                    half.slot.leave()
            except OSError as error:
                self._emitter.emit(Warned(f"an image stays in shared memory: {error.strerror or error}", self._run))
        return held
