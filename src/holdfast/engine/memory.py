"""The memory tier: the newest states of a run, whole and sealed, in shared memory that outlives the process.

Two slots, so that a whole image is always there: one is filled while the other stays sealed; and one more for each
further save that may be in flight. What goes to the store is sealed here as well, before it is written. A process that
starts finds what the one before left, and goes on from it if nothing else has been gone on from since
(`repo/adoption`).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from holdfast.codec.digest import digest
from holdfast.crashpoints import crashpoint
from holdfast.engine.candidates import Candidate, adoptable
from holdfast.engine.describing import spelled
from holdfast.engine.halves import Half, Halves
from holdfast.engine.images import Image, open_image
from holdfast.engine.listing import kept_by_others, passed_over, remove_image
from holdfast.engine.planned import SavePlan
from holdfast.engine.room import free_room, shortage
from holdfast.errors import CorruptionError
from holdfast.events import Emitter, Warned
from holdfast.image.lasting import LastingSlot, take_slots
from holdfast.model.checkpoint import Index
from holdfast.model.names import CheckpointId, run_key
from holdfast.repo.attempts import Attempt
from holdfast.repo.footer import Footer, Holder, Part, encode_footer, new_footer, newest
from holdfast.repo.repository import Repo
from holdfast.state.contract import Flattened

if TYPE_CHECKING:
    from holdfast.engine.job import About

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
        rank: int = 0,
        ranks: int = 1,
        budget: int | None = None,
        in_flight: int = 1,
        emitter: Emitter,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`in_flight`: how many images may be written to the store at a time; one more is there to be filled."""
        self.off = ""
        self.saved_s = 0.0
        """When a save to the store was last begun, or training was; by this boot's monotonic clock."""
        self._repo = repo
        self._run = run_key(run)
        self.rank = rank
        self._ranks = ranks
        self._budget = budget
        self._slots = max(LEAST, in_flight + 1)
        self._told_in_flight = self._slots - 1
        self._why_fewer = ""
        self._letting_go = threading.Lock()
        self._to_let_go: Callable[[], None] | None = None
        """Set where it could not be done yet, because a writer reads an image."""
        self._emitter = emitter
        self._warn = warn or (lambda message: emitter.emit(Warned(message, run)))
        self._halves: Halves | None = None
        self._holder: Holder | None = None
        self._adopted: Half | None = None
        self._sequence = 0
        self._why_not_held = ""

    @property
    def on(self) -> bool:
        """Whether states are kept: the slots are this process's, and the run is claimed."""
        return self._halves is not None and not self.off

    @property
    def busy(self) -> bool:
        """Whether the state taken last has not been sealed yet."""
        return self._halves is not None and self._halves.busy()

    @property
    def sealed(self) -> Footer | None:
        """The newest image that is whole."""
        return self._halves.newest() if self._halves is not None and self._holder is not None else None

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
            self._halves = Halves([Half.of(slot, chunk, emitter, rank=self.rank, admit=self._admit) for slot in held])
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
            self._tell_fewer()
        except OSError as error:
            if self._holder is None and any(half.slot.seals() for half in self._halves.all):
                return  # first to be gone on from; that no more are kept is told once the run is claimed
            self.turn_off(shortage(error))

    def _prepare(self, half: Half, flattened: Flattened) -> None:
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

    def give_way(self) -> bool:
        """There is no memory tier any more, and a save to the store has not the room for a whole image: what is sealed
        goes, for the state that is being saved is newer. Whether there was any, and nobody is busy with it."""
        halves = self._halves
        if not self.off or halves is None or not self.nbytes or not halves.at_rest():
            return False
        self._let_go(lambda half: False)
        return True

    def _do_without(self, half: Half, error: OSError) -> bool:
        """Lets go of a slot that there is no room for, and so of a save in flight; whether enough are left."""
        halves = self._halves
        if halves is None or len(halves.all) <= LEAST:
            return False
        self._let_go_of(halves.keep([one for one in halves.all if one is not half]), lambda one: False)
        self._why_fewer = error.strerror or str(error)
        return True

    def _tell_fewer(self) -> None:
        if self.in_flight < self._told_in_flight and self._why_fewer:
            self._told_in_flight = self.in_flight
            told = f"{self.in_flight} of {self._slots - 1} saves may be in flight at once: one more image in memory"
            self._emitter.emit(Warned(f"{told} does not fit ({self._why_fewer})", self._run))

    def candidates(self, report: Callable[[str], None]) -> list[Candidate]:
        """The sealed images that the run may go on from, newest first. `report` is told why another may not."""
        for message in passed_over(kept_by_others(self._repo.id, self._run, self._ranks), self._ranks):
            report(message)
        return adoptable(self._repo, self._run, self._sealed(), report)

    def _sealed(self) -> Iterator[tuple[Half, Footer]]:
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

    def adopt(self, candidate: Candidate | None) -> None:
        """Training goes on from this image (None: from none of them), once the run is claimed."""
        self._adopted = candidate.half if candidate is not None else None

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
        self._holder = Holder(attempt.number, attempt.id)
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

    def _trim(self) -> None:
        """Goes on with as many slots as this process needs, that of the adopted image among them."""
        halves = self._halves
        assert halves is not None
        kept = sorted(halves.all, key=lambda half: half is not self._adopted)[: self._slots]
        self._let_go_of(halves.keep(kept), lambda half: False)

    def _reseal(self, half: Half, footer: Footer) -> None:
        assert self._halves is not None
        half.slot.seal(encode_footer(footer, half.slot.name), beside=half.number)
        self._sequence = max(self._sequence, footer.sequence)
        self._halves.sealed(half, footer, 1 - half.number)

    def save_id(self, id: CheckpointId) -> str:
        """Of a state that goes into memory alone."""
        return uuid.uuid4().hex

    def kept(self, id: CheckpointId) -> None:
        """A state is whole, and no other is begun yet."""

    def missed(self, id: CheckpointId) -> None:
        """A state that was due is not kept."""

    def begin(self, flattened: Flattened, *, writing: bool) -> SavePlan | None:
        """The plan of a capture into the half whose turn it is; None where there is no memory tier. `writing`: it will
        be written to the store as well, until `ended`. DeadlineExceeded if the one before was not sealed in time."""
        if self._halves is None or self.off or self._holder is None:
            return None
        while True:
            half = self._halves.begin(writing=writing)
            half.arenas.may_make = True
            try:
                plan = half.open(flattened)
                self._tell_fewer()
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
        self, plan: SavePlan, id: CheckpointId, index: Index, flattened: Flattened, about: About, *, created: str
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
            footer = new_footer(
                self._repo,
                id,
                index.save_id,
                self._holder,
                rank=self.rank,
                ranks=self._ranks,
                sequence=self._sequence,
                image=half.slot.arena.nbytes,
                index=Part(len(rows), digest(rows)),
                manifest=Part(len(told), digest(told)),
                saved_s=self.saved_s,
            )
            half.slot.seal(encode_footer(footer, half.slot.name))
        except Exception as error:  # noqa: BLE001 - a save to the store goes on without it
            if half.writing:
                halves.unsealed(half)
            why = getattr(error, "strerror", None) or getattr(error, "message", None) or repr(error)
            self._emitter.emit(Warned(f"step {id.step} is not kept in memory: {why}", str(id)))
            return ""
        self.kept(id)
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
        self.off = why
        self._warn(f"states are not kept in memory: {why}")
        self._let_go(lambda half: bool(half.slot.seals()), hold=True)

    def close(self, durable: CheckpointId | None) -> None:
        """Gives the slots back. An image of a step beyond `durable`, the newest checkpoint of this process's line,
        stays for the next process; one that is in the store as well is of no use any more."""
        if self._halves is None:
            return
        unclaimed = self._holder is None
        self.off = self.off or "it is closed"
        step = durable.step if durable is not None else -1

        def stays(half: Half) -> bool:
            seals = half.slot.seals()
            found = newest(seals, half.slot.name)
            return bool(seals) if unclaimed else found is not None and found[1].id.step > step

        self._let_go(stays)

    def _let_go(self, stays: Callable[[Half], bool], *, hold: bool = False) -> None:
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
            self._halves = Halves(held) if held else None
            self._to_let_go = None

    def _let_go_of(self, halves: Sequence[Half], stays: Callable[[Half], bool], *, hold: bool = False) -> list[Half]:
        """Which of them are still held."""
        held: list[Half] = []
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
