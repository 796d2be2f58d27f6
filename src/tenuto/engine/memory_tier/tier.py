"""The memory tier: the newest states of a run, complete and sealed, in shared memory that outlives the process.

Two slots, so that there is always a complete image: one is filled while the other stays sealed; and one more for each
further save that may be in flight. What goes to the store is sealed here as well, before it is written. A process that
starts finds what the one before left, and resumes from it if training has resumed from nothing else since
(`eligibility`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from tenuto.codec.digest import digest
from tenuto.crashpoints import crashpoint
from tenuto.engine.memory_tier.common_states import common_states
from tenuto.engine.memory_tier.eligibility import (
    Candidate,
    EligibleImage,
    eligible_images,
    foreign,
    of_another_place,
)
from tenuto.engine.memory_tier.image_store import Image, open_image, parts_of
from tenuto.engine.memory_tier.listing import (
    free_room,
    kept_by_others,
    left_by_more,
    passed_over,
    remove_image,
    shortage,
)
from tenuto.engine.memory_tier.seal import Seal, SealedObject, SealHolder, encode_seal, new_seal, newest
from tenuto.engine.memory_tier.slot_file import LastingSlot, take_slots
from tenuto.engine.memory_tier.slot_pool import MemorySlot, SlotPool
from tenuto.engine.read.local_state import LocalState
from tenuto.engine.save.job import Job
from tenuto.engine.save.rank_group import RankGroup
from tenuto.engine.staging.plan import SavePlan
from tenuto.errors import CorruptionError, typed
from tenuto.events import Emitter, Warned
from tenuto.model.ids import CheckpointId, run_key
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo
from tenuto.state.contract import Flattened

HOLD_S: Final = 10.0
"""How long a rank waits for its slots: the process before may be dying."""
POLL_S: Final = 0.05
LEAST: Final = 2
"""Slots without which there is no memory tier."""


class MemoryTier:
    """The slots of one run and rank. Used by the training thread; `seal` and `ended` by a writing thread as well.

    off: why there is no memory tier, in words; then every save goes to the store alone.
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
        self.rank = group.rank
        self._repo = repo
        self._run = run_key(run)
        self._ranks = group.world_size
        self._common = common_states(group)
        self._budget = budget
        self._count = max(LEAST, in_flight + 1)
        self._reported_in_flight = self._count - 1
        self._why_fewer = ""
        self._closing = threading.Lock()
        self._deferred_close: Callable[[], None] | None = None
        """Set while a writer still reads an image."""
        self._emitter = emitter
        self._warn = warn or (lambda message: emitter.emit(Warned(message, run)))
        self._pool: SlotPool | None = None
        self._holder: SealHolder | None = None
        self._resumed: MemorySlot | None = None
        """The slot whose image training resumed from."""
        self._resumed_step: int | None = None
        self._sequence = 0
        self._why_unavailable = ""
        self._hold_until_s = 0.0
        """Until when an owner that may be dying is waited for, once it is."""

    @property
    def on(self) -> bool:
        """Whether states are kept: the slots are this process's, the run is claimed, and the group has agreed."""
        return self._has_slots and self._common.agreed

    @property
    def _has_slots(self) -> bool:
        return self._pool is not None and not self.off

    @property
    def busy(self) -> bool:
        """Whether the state taken last has not been sealed yet."""
        return self._pool is not None and self._pool.busy()

    @property
    def sealed(self) -> Seal | None:
        """The newest image that is complete on all ranks."""
        pool = self._pool
        return self._common.newest(pool) if pool is not None and self._holder is not None else None

    @property
    def blocked(self) -> str:
        """Why the slots are not this process's; empty where they are."""
        return "" if self._pool is not None else self.off or self._why_unavailable

    @property
    def in_flight(self) -> int:
        """How many images may be written to the store at a time: one is always left to be filled."""
        pool = self._pool
        return min(max(len(pool.slots), LEAST) if pool is not None else self._count, self._count) - 1

    @property
    def nbytes(self) -> int:
        """Bytes that the images take now, also where there is no memory tier any more and sealed ones stay."""
        pool = self._pool
        return sum(slot.nbytes for slot in pool.slots) if pool is not None else 0

    # -- before the claim ----------------------------------------------------------------------------------------------

    def hold(self) -> bool:
        """Takes the slots, if they can be had now: an owner that is dying still has them. Returns whether this call
        took them. Those of a process that had more are among them where they hold a complete image."""
        if self._pool is not None or self.off:
            return False
        try:
            files = take_slots(self._repo.id, self._run, self.rank, self._count, of=self._ranks)
        except BlockingIOError as error:
            self._why_unavailable = error.strerror or str(error)
        except OSError as error:
            self.turn_off(f"shared memory cannot be used: {error.strerror or error}")
        else:
            theirs = self._of_another_place(files)
            if theirs:
                for file in files:
                    file.leave()
                self.turn_off(theirs)
                return False
            chunk, emitter = self._repo.chunk_bytes, self._emitter
            self._pool = SlotPool(
                [MemorySlot(file, chunk, emitter, rank=self.rank, admit=self._admit) for file in files]
            )
            return True
        return False

    def _of_another_place(self, files: Sequence[LastingSlot]) -> str:
        """Returns why what lies in the slots is not for this process to take; empty where nothing is."""
        found = [one[1] for file in files if (one := newest(file.seals(), file.name)) is not None]
        theirs = [(footer, why) for footer in found if (why := of_another_place(self._repo, footer))]
        if not theirs:
            return ""
        footer, why = max(theirs, key=lambda one: one[0].sequence)
        return (
            f"step {footer.id.step} lies in memory already, and {why}; it is left alone "
            f"({typed('tenuto', 'flush', footer.where or 'WHERE')} writes it to its own repository)"
        )

    def await_slots(self) -> None:
        """Takes the slots as `hold` does, and waits for an owner that may be dying, once."""
        self._hold_until_s = self._hold_until_s or time.monotonic() + HOLD_S
        while not self.hold() and self.blocked and not self.off and time.monotonic() < self._hold_until_s:
            time.sleep(POLL_S)

    def prepare(self, flattened: Flattened) -> None:
        """Takes the memory that saves of this state need, except where an image lies that may be resumed from."""
        self.hold()
        pool = self._pool
        if pool is None or self.off:
            return
        try:
            for slot in pool.slots:
                needed = slot is self._resumed or (self._holder is None and bool(slot.file.seals()))
                slot.memory.replaceable = not needed
                if self._holder is None and needed:
                    slot.file.map_whole()  # the restore reads it, and it is used again after that
                    continue
                try:
                    self._prepare(pool, slot, flattened)
                except OSError as error:
                    if slot is self._resumed or not self._do_without(slot, error):
                        raise
            self._report_fewer()
        except OSError as error:
            if self._holder is None and any(slot.file.seals() for slot in pool.slots):
                return  # those are resumed from first; once the run is claimed, it is reported that no more are kept
            self.turn_off(shortage(error))

    def _prepare(self, pool: SlotPool, slot: MemorySlot, flattened: Flattened) -> None:
        while True:
            try:
                slot.prepare(flattened)
                break
            except FileExistsError:
                return  # what lies there is of another size, and still needed: made anew when it is filled next
            except OSError as error:
                # Nobody else's image goes for more than the tier needs.
                enough = sum(one.file.arena is not None for one in pool.slots if one is not slot) >= LEAST
                if enough or not free_room([slot.file.slot], self._emitter, error):
                    raise

    def _admit(self, file: LastingSlot, nbytes: int) -> None:
        """Raises OSError where an image of so many bytes in this slot, beside the others, goes beyond the budget."""
        if self._budget is None or self._pool is None:
            return
        taken = [slot.nbytes for slot in self._pool.slots if slot.file is not file]
        images, total = 1 + sum(map(bool, taken)), nbytes + sum(taken)
        if total > self._budget:
            raise OSError(0, f"{images} images take {total >> 20} MiB, and the budget is {self._budget >> 20} MiB")

    def shrink(self) -> bool:
        """Removes what is sealed, where there is no memory tier any more and a save to the store has not the room for a
        complete image: the state that is being saved is newer. Returns whether there was any that nobody uses."""
        pool = self._pool
        if not self.off or pool is None or not self.nbytes or not pool.at_rest():
            return False
        self._leave_all(lambda slot: False)
        return True

    def _do_without(self, slot: MemorySlot, error: OSError) -> bool:
        """Leaves a slot that there is no room for, and so a save in flight; returns whether enough slots remain."""
        pool = self._pool
        if pool is None or len(pool.slots) <= LEAST:
            return False
        self._leave(pool.keep([one for one in pool.slots if one is not slot]), lambda one: False)
        self._why_fewer = error.strerror or str(error)
        return True

    def _report_fewer(self) -> None:
        if self.in_flight < self._reported_in_flight and self._why_fewer:
            self._reported_in_flight = self.in_flight
            fewer = f"{self.in_flight} of {self._count - 1} saves may be in flight at once: one more image in memory"
            self._emitter.emit(Warned(f"{fewer} does not fit ({self._why_fewer})", self._run))

    def candidates(self, report: Callable[[str], None]) -> list[Candidate]:
        """Returns the sealed images that the run may resume from, newest first. `report` is called with why another may
        not be."""
        for message in passed_over(kept_by_others(self._repo.id, self._run, self._ranks), self._ranks):
            report(message)
        return eligible_images(self._repo, self._run, self._sealed(), report)

    def own_images(self) -> list[tuple[MemorySlot, Seal]]:
        """Returns what this rank has sealed, before the claim."""
        return list(self._sealed())

    def _sealed(self) -> Iterator[tuple[MemorySlot, Seal]]:
        for slot in self._pool.slots if self._pool is not None and not self.off else ():
            sealed = newest(slot.file.seals(), slot.file.name)
            if sealed is not None:
                slot.number, footer = sealed
                self._sequence = max(self._sequence, footer.sequence)
                yield slot, footer

    def open(self, candidate: Candidate) -> Image:
        """Returns the image of a candidate. CorruptionError where it is not what was sealed."""
        file = candidate.slot.file
        with file.descriptor() as descriptor:
            mapped, size = file.map_whole(), self._repo.chunk_bytes
            image = open_image(descriptor, file.name, chunk_bytes=size, keys=self._repo.keys, mapped=mapped)
        if image is None or image.footer != candidate.footer:
            raise CorruptionError(f"{file.name} has changed", subject=file.name)
        return image

    def newest_sealed(self) -> tuple[int, int]:
        """Returns attempt and step of the newest state of this run, machine and user that is sealed here, before the
        claim; (0, 0) where there is none."""
        own = [footer for _, footer in self.own_images() if not foreign(self._repo, self._run, footer)]
        return max(((one.holder.attempt, one.id.step) for one in own), default=(0, 0))

    def forget(self, id: CheckpointId) -> None:
        """Unseals, before the claim, the states of the attempt of `id` up to its step: it is in the store."""
        for slot, footer in self.own_images():
            if (footer.id.run, footer.holder.attempt) == (id.run, id.attempt) and footer.id.step <= id.step:
                slot.file.unseal()

    def local_state(self, id: CheckpointId) -> LocalState | None:
        """Returns what this rank has sealed at the step of a checkpoint, before the claim; None where it has nothing
        that can be read. It may be of another attempt: what is taken of it is what the checkpoint has. To be closed."""
        try:
            for slot, footer in self.own_images():
                if footer.repository == self._repo.id and (footer.id.run, footer.id.step) == (id.run, id.step):
                    image = self.open(Candidate(slot, footer, EligibleImage(None, durable=False)))
                    return LocalState(parts_of(image), image.close)
        except (CorruptionError, OSError):
            pass  # it is read from the store
        return None

    def newest_image(self) -> Image | None:
        """Returns the newest image that is complete on all ranks, which the caller closes before another is taken; None
        where there is none. CorruptionError where it is not what was sealed."""
        footer, pool = self.sealed, self._pool
        slot = next((one for one in pool.slots if one.footer == footer), None) if footer is not None and pool else None
        if slot is None or footer is None:
            return None
        return self.open(Candidate(slot, footer, EligibleImage(None, durable=False)))

    def take_over(self, candidate: Candidate | None) -> None:
        """Notes that training resumes from this image (None: from none of them), once the run is claimed."""
        self._resumed = candidate.slot if candidate is not None else None
        self._resumed_step = candidate.footer.id.step if candidate is not None else None

    # -- after it ------------------------------------------------------------------------------------------------------

    def claimed(self, attempt: Attempt, flattened: Flattened) -> None:
        """Begins once the run is this process's. The image that was resumed from is sealed as its own, so that the next
        process may resume from it too; those passed over are unsealed."""
        crashpoint("claimed, memory image not yet resealed")
        self.hold()
        pool = self._pool
        if pool is None:
            if not self.off:
                self.turn_off(f"its slots are taken: {self._why_unavailable}")
            return
        self._holder = SealHolder(attempt.number, attempt.id)
        try:
            for slot, footer in list(self._sealed()):
                if slot is not self._resumed:
                    slot.file.unseal()
                    continue
                own = footer.held_by(self._holder, self._repo.keys)
                slot.file.seal(encode_seal(own, slot.file.name), beside=slot.number)
                self._sequence = max(self._sequence, own.sequence)
                pool.sealed(slot, own, 1 - slot.number)
            # As many slots as this process needs, that of the resumed image among them.
            needed = sorted(pool.slots, key=lambda slot: slot is not self._resumed)[: self._count]
            self._leave(pool.keep(needed), lambda slot: False)
            others = kept_by_others(self._repo.id, self._run, self._ranks)
            for found in [*others, *left_by_more(self._repo.id, self._run, self._ranks)]:
                if found.footer is None or not of_another_place(self._repo, found.footer):
                    remove_image(found.slot)
        except OSError as error:
            self.turn_off(f"shared memory cannot be used: {error.strerror or error}")
            return
        self.prepare(flattened)

    def agree(self) -> None:
        """Agrees with the other ranks, all of which have claimed, whether states are kept: by all, or by none."""
        why_not = "" if self._has_slots else self.off or "it has no slots"
        refused = self._common.agree(why_not, self._resumed_step)
        if refused:
            self.turn_off(refused)

    def save_id(self, id: CheckpointId) -> str:
        """Returns the identity of a state that goes into memory alone."""
        return self._common.save_id(id)

    def missed(self, id: CheckpointId) -> None:
        """Notes that a state that was due is not kept."""
        self._common.missed(id.step)

    def begin(self, flattened: Flattened, *, writing: bool) -> SavePlan | None:
        """Returns the plan of a capture into the slot to be filled next; None where there is no memory tier. `writing`:
        it will be written to the store as well, until `ended`. DeadlineExceeded if the one before was not sealed in
        time, or it is not known in time which image the group can do without."""
        pool = self._pool
        if pool is None or self._holder is None or not self.on:
            return None
        refused = self._common.make_way(pool)
        if refused:
            self.turn_off(refused)
            return None
        while True:
            slot = pool.begin(writing=writing)
            slot.memory.replaceable = True
            try:
                plan = slot.open(flattened)
                self._report_fewer()
                return plan
            except OSError as error:
                pool.ended(slot)
                if not self._do_without(slot, error) and not free_room([slot.file.slot], self._emitter, error):
                    self.turn_off(shortage(error))
                    return None
            except BaseException:
                pool.ended(slot)
                raise

    def seal(self, job: Job) -> str:
        """Seals the image of this job, with its index and manifest, once it is digested. Returns the digest of its
        content, empty where it cannot be sealed: that is reported, and fails nothing, whatever it was."""
        pool, id = self._pool, job.save.id
        slot = pool.find(job.plan) if pool is not None else None
        if slot is None or pool is None or self._holder is None or slot.file.arena is None:
            return ""
        try:
            index, manifest, content = job.described(self._repo.id)
            slot.file.describe([index, manifest])
            self._sequence += 1
            footer = new_seal(
                self._repo,
                id,
                job.save.save_id,
                self._holder,
                rank=self.rank,
                ranks=self._ranks,
                sequence=self._sequence,
                image=slot.file.arena.nbytes,
                index=SealedObject(len(index), digest(index)),
                manifest=SealedObject(len(manifest), digest(manifest)),
                saved_s=self.saved_s,
                content=[slot.file.arena.buffer.data, index, manifest],
            )
            slot.file.seal(encode_seal(footer, slot.file.name))
        except Exception as error:  # noqa: BLE001 - a save to the store goes on without it
            if slot.writing:
                pool.unsealed(slot)
            why = getattr(error, "strerror", None) or getattr(error, "message", None) or repr(error)
            self._emitter.emit(Warned(f"step {id.step} is not kept in memory: {why}", str(id)))
            return ""
        self._common.sealed(id.step)
        pool.sealed(slot, footer, 0)
        crashpoint("memory image sealed")
        return content

    def ended(self, plan: SavePlan) -> None:
        """Frees the memory of this plan: nobody reads or fills it any more. What is not sealed by now will not be."""
        pool = self._pool
        slot = pool.find(plan) if pool is not None else None
        if slot is not None and pool is not None:
            pool.ended(slot)
        if self._deferred_close is not None:
            self._deferred_close()

    # -- the end -------------------------------------------------------------------------------------------------------

    def turn_off(self, why: str) -> None:
        """Turns the tier off, once, with a warning. What is sealed stays until the end; the rest of the memory is given
        back."""
        if self.off:
            return
        self._common.turn_off(why)
        self.off = why
        self._warn(f"states are not kept in memory: {why}")
        self._leave_all(lambda slot: bool(slot.file.seals()), hold=True)

    def close(self, durable: CheckpointId | None) -> None:
        """Gives the slots back. An image of a step beyond `durable`, the newest checkpoint of this process's line,
        stays for the next process; one that is in the store as well is of no use any more."""
        self._common.close()
        if self._pool is None:
            return
        unclaimed = self._holder is None
        self.off = self.off or "it is closed"
        step = durable.step if durable is not None else -1

        def stays(slot: MemorySlot) -> bool:
            seals = slot.file.seals()
            found = newest(seals, slot.file.name)
            return bool(seals) if unclaimed else found is not None and found[1].id.step > step

        self._leave_all(stays)

    def _leave_all(self, stays: Callable[[MemorySlot], bool], *, hold: bool = False) -> None:
        """Gives all slots back as `_leave` does, once nobody reads or fills an image any more: with a writer that hangs
        the slots go with the process."""
        with self._closing:
            pool = self._pool
            if pool is None:
                return
            if not pool.at_rest():
                self._deferred_close = partial(self._leave_all, stays, hold=hold)
                return
            held = self._leave(pool.slots, stays, hold=hold)
            self._pool = SlotPool(held) if held else None
            self._deferred_close = None

    def _leave(
        self, slots: Sequence[MemorySlot], stays: Callable[[MemorySlot], bool], *, hold: bool = False
    ) -> list[MemorySlot]:
        """Gives slots back, and removes the images that are not to stay. `hold`: slots whose images stay remain this
        process's. Returns those."""
        held: list[MemorySlot] = []
        for slot in slots:
            try:
                stay = stays(slot)
                slot.release()  # the memory goes with the last view, and a writer that has just ended has some
                if not stay:
                    slot.file.discard()
                if stay and hold:
                    held.append(slot)
                else:
                    slot.file.leave()
            except OSError as error:
                self._emitter.emit(Warned(f"an image stays in shared memory: {error.strerror or error}", self._run))
        return held
