"""A slot whose image outlives its process: taken, filled, sealed, left behind, and found again.

The file is `[image][index and manifest][seal]`: as many bytes as the arena has, then `described` bytes of room, then
the two blocks of the seal. Losing the slot (a session manager that clears /dev/shm) is noticed at the next seal.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from tenuto.engine.staging import arena as arenas
from tenuto.engine.staging import slots
from tenuto.engine.staging.arena import Arena
from tenuto.engine.staging.slots import Slot
from tenuto.model.ids import run_key
from tenuto.repo.format.safetensors import ALIGNMENT


class LastingSlot:
    """One slot that this process has locked. Its file stays when the process dies, unless it is discarded first."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.sealed = False
        """Whether the file says that its image is complete."""
        self._arena: Arena | None = None
        self._mapping: mmap.mmap | None = None
        self._leave = weakref.finalize(self, _leave, slot, os.getpid())

    @property
    def name(self) -> str:
        """`<repository>/<run>/` and the slot's own name, as the seal has it."""
        return f"{self.slot.parent}/{self.slot.name}"

    @property
    def arena(self) -> Arena | None:
        return self._arena

    def seals(self) -> list[tuple[int, bytes]]:
        """Reads the seals as `read_seals` does; none where there is no file, or something that is none."""
        try:
            with self.descriptor() as descriptor:
                return slots.read_seals(descriptor)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            return []

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Opens the file. FileNotFoundError where there is none any more."""
        descriptor = arenas.table().open_file(self.slot)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def map_whole(self) -> memoryview | None:
        """Maps the whole file, read-only, with every page in place: it is then read, and its pages used again, without
        a page fault. None where there is no file, or it has holes."""
        if self._mapping is None:
            try:
                with self.descriptor() as descriptor:
                    status = os.fstat(descriptor)
                    if status.st_size == 0 or status.st_blocks * 512 < status.st_size:
                        return None
                    self._mapping = arenas.map_memory(descriptor, status.st_size)
            except FileNotFoundError:
                return None
        return memoryview(self._mapping).toreadonly()

    def reuse(self, nbytes: int, described: int) -> Arena | None:
        """Returns memory for an image of `nbytes` from the pages of the file that lies there if it is as long as needed
        and not much longer; else None. Its image stays, and stays sealed, until `unseal`."""
        nbytes, length = _lengths(nbytes, described)
        try:
            with self.descriptor() as descriptor:
                status = os.fstat(descriptor)
                filled = status.st_blocks * 512 >= status.st_size and status.st_size % ALIGNMENT == 0
                if not filled or not length <= status.st_size <= length + length // 16 + _SLACK:
                    return None
                mapping, self._mapping = self._mapping, None
                self.unmap()
                self.sealed = slots.is_sealed(descriptor)
                if mapping is None or len(mapping) != status.st_size:
                    mapping = arenas.map_memory(descriptor, status.st_size)
                self._arena = arenas.over_file(mapping, nbytes)
                return self._arena
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            return None

    def make(self, nbytes: int, described: int) -> Arena:
        """Returns new memory for an image of `nbytes`, unsealed. What the file had is lost. OSError where there is no
        room."""
        self.discard()
        nbytes, length = _lengths(nbytes, described)
        table = arenas.table()
        descriptor = table.create(self.slot)
        try:
            arenas.reserve(descriptor, length)
            self._arena = arenas.over_file(arenas.map_memory(descriptor, length), nbytes)
            return self._arena
        except BaseException:
            table.remove(self.slot)
            raise
        finally:
            os.close(descriptor)

    def unseal(self) -> None:
        """Clears the seal, before a byte of the image is overwritten."""
        with self.descriptor() as descriptor:
            slots.clear_seal(descriptor)
        self.sealed = False

    def describe(self, parts: Sequence[bytes]) -> None:
        """Writes `parts`, one after the other, behind the image; the file grows where they need it."""
        assert self._arena is not None and not self.sealed
        nbytes = self._arena.nbytes
        needed = nbytes + -(-sum(map(len, parts)) // ALIGNMENT) * ALIGNMENT + slots.ROOM
        with self.descriptor() as descriptor:
            size = os.fstat(descriptor).st_size
            if needed > size:
                # The mapping ends where it did; what is behind it is written and read through the file.
                os.posix_fallocate(descriptor, size, needed - size)
                slots.clear_seal(descriptor)
            offset = nbytes
            for part in parts:
                slots.write_at(descriptor, part, offset)
                offset += len(part)

    def seal(self, payload: bytes, *, beside: int | None = None) -> None:
        """Seals the image. `beside`: the number of the block that has the present seal, which is to stay."""
        with self.descriptor() as descriptor:
            slots.write_seal(descriptor, 0 if beside is None else 1 - beside, payload)
        self.sealed = True

    def unmap(self) -> None:
        """Unmaps the memory; the file stays."""
        if self._arena is not None:
            self._arena.release()
            self._arena = None
        if self._mapping is not None:
            with contextlib.suppress(BufferError):  # a view exists: the mapping goes with the last one
                self._mapping.close()
            self._mapping = None

    def discard(self) -> None:
        """Removes the file; the slot stays locked."""
        self.unmap()
        arenas.table().discard(self.slot)
        self.sealed = False

    def leave(self) -> None:
        """Gives the slot back; the file stays, for whoever comes. Once."""
        self.unmap()
        self._leave()


_NO_FILE: Final = (errno.ENOENT, errno.ELOOP, errno.EISDIR)
_SLACK: Final = 1 << 20
"""How much longer a file may be and still be used again, so that a state that shrinks gives memory back."""


def take(repository: str, run: str, rank: int, number: int, *, of: int = 1) -> LastingSlot:
    """Locks a slot, whatever its file has. BlockingIOError where another process or arena has locked it, OSError where
    there is no shared memory."""
    return take_slot(Slot(slots.SHARED_MEMORY, parent(repository, run), slots.slot_name(rank, number, of)))


def take_slots(repository: str, run: str, rank: int, count: int, *, of: int = 1) -> list[LastingSlot]:
    """Locks the first `count` slots of one of `of` ranks, and those beyond them where a process that had more has left
    a complete image; an incomplete one is removed. All of them or none: raises what `take` does."""
    taken: list[LastingSlot] = []
    try:
        for number in range(count):
            taken.append(take(repository, run, rank, number, of=of))
        files = [slot for slot in slots.occupied(slots.SHARED_MEMORY) if slot.parent == parent(repository, run)]
        for owner, number, ranks in sorted(slots.parse_name(slot.name) for slot in files):
            if (owner, ranks) == (rank, of) and number >= count:
                taken.append(take(repository, run, rank, number, of=of))
                if not taken[-1].seals():
                    taken[-1].discard()
                    taken.pop().leave()
    except BaseException:
        for slot in taken:
            slot.leave()
        raise
    return taken


def parent(repository: str, run: str) -> str:
    """Returns the directory of a run's slots, below this user's."""
    return f"{repository}/{run_key(run)}"


def take_slot(slot: Slot) -> LastingSlot:
    """Locks a slot as `take` does."""
    arenas.table().take(slot)
    return LastingSlot(slot)


def holder(slot: Slot) -> int | None:
    """Returns the process that has locked a slot, as `SlotTable.holder` does."""
    return arenas.table().holder(slot)


def _lengths(nbytes: int, described: int) -> tuple[int, int]:
    """Returns the bytes of the image and of the file, in full pages."""
    nbytes = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
    return nbytes, nbytes + -(-described // ALIGNMENT) * ALIGNMENT + slots.ROOM


def _leave(slot: Slot, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            arenas.table().leave(slot)  # where even that fails, the lock goes with the process
