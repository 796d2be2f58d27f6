"""The images that lie in this node's shared memory, whoever left them, and which one is removed for room."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from tenuto.concurrency.memory_headroom import memory_headroom
from tenuto.engine.memory_tier import slot_file
from tenuto.engine.memory_tier.seal import Seal, newest
from tenuto.engine.staging import slots
from tenuto.engine.staging.arena import NoRoom, file_system_headroom
from tenuto.engine.staging.slots import OtherUsers, Slot, parse_name, read_seals
from tenuto.events import Emitter, Warned
from tenuto.record import record


@record
class FoundImage:
    """One file. `bytes`: what it takes; `alive`: a process holds its slot; `footer`: None where it is not sealed.
    `pid`: the holder's, where it has one in this process's own pid namespace."""

    slot: Slot
    bytes: int
    alive: bool
    footer: Seal | None
    pid: int | None = None

    @property
    def name(self) -> str:
        return f"{self.slot.parent}/{self.slot.name}"

    @property
    def user(self) -> int:
        """Whose file it is, whatever its seal says."""
        return os.geteuid() if self.slot.user is None else self.slot.user


def images_of_others() -> OtherUsers:
    """Finds the other users who may have images."""
    return slots.other_users(slots.SHARED_MEMORY)


def images(
    user: int | None = None, *, repository: str | None = None, among: Callable[[Slot], bool] | None = None
) -> Iterator[FoundImage]:
    """Yields the images of this user, or of another `user`, in the order of their names: of all repositories, or of
    one. `among`: only sealed ones, in slots of which it returns True; it takes a tenth of a second to be sure that an
    image's process lives."""
    for slot in slots.occupied(slots.SHARED_MEMORY, user, repository):
        if among is not None and not among(slot):
            continue
        file = _read(slot)
        if file is None or (file[1] is None and among is not None):
            continue
        pid = _holder(slot)
        yield FoundImage(slot, file[0], pid is not None, file[1], pid or None)


def sealed_of(repository: str, run: str) -> list[tuple[Slot, Seal]]:
    """Returns what lies sealed in the slots of one run, also those that processes which live have taken by now."""
    parent = slot_file.parent(repository, run)
    found = [(slot, _read(slot)) for slot in slots.occupied(slots.SHARED_MEMORY, None, repository)]
    return [
        (slot, file[1]) for slot, file in found if file is not None and file[1] is not None and slot.parent == parent
    ]


def _read(slot: Slot) -> tuple[int, Seal | None] | None:
    """Returns how many bytes the file of a slot takes, and its seal where it has one. None where there is no file by
    now, or none of the user's."""
    try:
        with slots.directory(slot.root, slot.parent, user=slot.user) as parent:
            descriptor = os.open(slot.name, slots.READ, dir_fd=parent)
        try:
            status, seals = os.fstat(descriptor), read_seals(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != (os.geteuid() if slot.user is None else slot.user):
        return None
    sealed = newest(seals, f"{slot.parent}/{slot.name}")
    return status.st_blocks * 512, None if sealed is None else sealed[1]


def dead_images() -> list[FoundImage]:
    """Returns the images whose process has ended."""
    return [found for found in images() if not found.alive]


def kept_by_others(repository: str, run: str, ranks: int) -> list[FoundImage]:
    """Returns the sealed images of a run that dead processes of another number of ranks have left."""
    parent = slot_file.parent(repository, run)

    def other(slot: Slot) -> bool:
        return slot.parent == parent and not _is_one_of(slot, ranks)

    return [found for found in images(repository=repository, among=other) if not found.alive]


def left_by_more(repository: str, run: str, ranks: int) -> list[FoundImage]:
    """Returns what dead processes of a run, with higher numbers than a job of `ranks` has, were writing to the store
    from: nobody comes for it."""
    parent = slot_file.parent(repository, run)
    left = [one for one in images(repository=repository) if one.slot.parent == parent and not one.alive]
    return [one for one in left if one.footer is None and parse_name(one.slot.name)[0] >= ranks]


def _is_one_of(slot: Slot, ranks: int) -> bool:
    rank, _, of = parse_name(slot.name)
    return of == ranks and rank < ranks


def passed_over(others: Iterable[FoundImage], ranks: int) -> list[str]:
    """Returns why a job of `ranks` does not resume from those images: the newest of each number of ranks."""
    newest_of: dict[int, int] = {}
    for footer in (one.footer for one in others if one.footer is not None):
        newest_of[footer.ranks] = max(footer.id.step, newest_of.get(footer.ranks, 0))
    return [
        f"step {step} in memory is passed over: {_ranks(of)} kept it, and this job has {ranks}"
        for of, step in sorted(newest_of.items())
    ]


def _ranks(count: int) -> str:
    return "one process" if count == 1 else f"{count} ranks"


def remove_image(slot: Slot) -> bool:
    """Removes a dead process's image; False where a process holds it by now, or it cannot be removed."""
    try:
        taken = slot_file.take_slot(slot)
    except OSError:
        return False
    try:
        taken.discard()
    except OSError:
        return False
    finally:
        taken.leave()
    return True


def _holder(slot: Slot) -> int | None:
    try:
        return slot_file.holder(slot)
    except OSError:
        return None  # unknown; removing it will fail in the same way


# --------------------------------------------------------------------------------------------------
# Too little room in shared memory: the warning, and whose image is removed for it.

ADVICE: Final = (
    "give it room for two images of the state (docker: --shm-size=…; Kubernetes: an emptyDir with medium: Memory at "
    "/dev/shm; memory_budget= if it is set), save less state, or leave memory= out; `tenuto ls --memory` shows what "
    "lies there, and `tenuto memory clear --all` removes what dead processes left"
)


def shortage(error: OSError) -> str:
    """Returns why two images do not fit, with the figures there are, and what to do."""
    facts = [error.strerror or str(error)]
    try:
        descriptor = os.open(slots.SHARED_MEMORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            facts.append(f"{slots.SHARED_MEMORY} has {file_system_headroom(descriptor) >> 20} MiB free")
        finally:
            os.close(descriptor)
    except OSError:
        facts.append(f"there is no {slots.SHARED_MEMORY}")
    free = memory_headroom()
    if free is not None:
        facts.append(f"{free >> 20} MiB of memory may still be used here")
    return f"{'; '.join(facts)}; saves to the store continue. To have it: {ADVICE}"


def free_room(own: Collection[Slot], emitter: Emitter, error: OSError) -> bool:
    """Removes the oldest sealed image that a dead process of another run left, if there is one, and reports it.

    `own`: slots of this run, whose other ranks may yet resume from theirs. `error`: why memory could not be had. No
    image is removed where that would not help: its run may yet resume from it.
    """
    if error.errno not in (errno.ENOSPC, errno.ENOMEM):
        return False
    runs = {slot.parent for slot in own}
    found = [one for one in dead_images() if one.slot.parent not in runs and one.footer is not None]
    missing = error.missing if isinstance(error, NoRoom) else 0
    if not found or sum(one.bytes for one in found) < missing:
        return False
    oldest = min(found, key=lambda one: one.footer.sealed_us if one.footer is not None else 0)
    if oldest.footer is None or not remove_image(oldest.slot):
        return False
    what = f"the image of {oldest.footer.id}, which a dead process left in memory"
    emitter.emit(Warned(f"{what}, was removed: its room was needed"))
    return True
