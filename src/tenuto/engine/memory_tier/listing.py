"""The images that lie in this node's shared memory, whoever left them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tenuto.engine.memory_tier import slot_file
from tenuto.engine.memory_tier.seal import Seal, newest
from tenuto.engine.staging import slots
from tenuto.engine.staging.slots import OtherUsers, Slot, parse_name, read_seals


@dataclass(frozen=True, slots=True)
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
    """The other users who may have images."""
    return slots.other_users(slots.SHARED_MEMORY)


def images(user: int | None = None, *, among: Callable[[Slot], bool] | None = None) -> Iterator[FoundImage]:
    """This user's, or another `user`'s to be looked at, in the order of their names. `among`: sealed ones alone, in
    the slots that it is true of. To be sure that an image's process lives takes a tenth of a second, so who wants a
    few asks for those."""
    owner = os.geteuid() if user is None else user
    for slot in slots.occupied(slots.SHARED_MEMORY, user):
        if among is not None and not among(slot):
            continue
        try:
            with slots.directory(slot.root, slot.parent, user=user) as parent:
                descriptor = os.open(slot.name, slots.READ, dir_fd=parent)
            try:
                status, seals = os.fstat(descriptor), read_seals(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            continue  # gone since it was listed, or no file of the user's
        if not stat.S_ISREG(status.st_mode) or status.st_uid != owner:
            continue
        sealed = newest(seals, f"{slot.parent}/{slot.name}")
        if sealed is None and among is not None:
            continue
        footer, pid = sealed[1] if sealed is not None else None, _holder(slot)
        yield FoundImage(slot, status.st_blocks * 512, pid is not None, footer, pid or None)


def dead_images() -> list[FoundImage]:
    """Those whose process has ended."""
    return [found for found in images() if not found.alive]


def kept_by_others(repository: str, run: str, ranks: int) -> list[FoundImage]:
    """What dead processes of a run have left, sealed, that were not as many ranks as are asked for."""
    parent = slot_file.parent(repository, run)

    def other(slot: Slot) -> bool:
        return slot.parent == parent and not _is_one_of(slot, ranks)

    return [found for found in images(among=other) if not found.alive]


def _is_one_of(slot: Slot, ranks: int) -> bool:
    rank, _, of = parse_name(slot.name)
    return of == ranks and rank < ranks


def passed_over(others: Iterable[FoundImage], ranks: int) -> list[str]:
    """Why a job of `ranks` does not go on from what they have kept: the newest of each number of ranks."""
    newest_of: dict[int, int] = {}
    for footer in (one.footer for one in others if one.footer is not None):
        newest_of[footer.ranks] = max(footer.id.step, newest_of.get(footer.ranks, 0))
    return [
        f"step {step} in memory is passed over: {_ranks(of)} kept it, and this job has {ranks}"
        for of, step in sorted(newest_of.items())
    ]


def _ranks(count: int) -> str:
    return "one process" if count == 1 else f"{count} ranks"


def remove_image(found: FoundImage) -> bool:
    """Removes a dead process's image; False where a process holds it by now, or it cannot be removed."""
    try:
        slot = slot_file.take_slot(found.slot)
    except OSError:
        return False
    try:
        slot.discard()
    except OSError:
        return False
    finally:
        slot.leave()
    return True


def _holder(slot: Slot) -> int | None:
    try:
        return slot_file.holder(slot)
    except OSError:
        return None  # nobody can say who; to remove it will fail in the same way
