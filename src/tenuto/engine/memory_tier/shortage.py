"""Too little room in shared memory: the warning, and whose image gives way."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from typing import Final

from tenuto.engine.memory_tier.listing import dead_images, remove_image
from tenuto.engine.staging import slots
from tenuto.engine.staging.arena import NoRoom, file_system_headroom, memory_headroom
from tenuto.engine.staging.slots import Slot
from tenuto.events import Emitter, Warned

ADVICE: Final = (
    "give it room for two images of the state (docker: --shm-size=…; Kubernetes: an emptyDir with medium: Memory at "
    "/dev/shm; memory_budget= if it is set), save less state, or leave memory= out; `tenuto ls --memory` shows what "
    "lies there, and `tenuto memory clear` removes what dead processes left"
)


def shortage(error: OSError) -> str:
    """Why two images do not fit, with the figures there are, and what to do."""
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
    return f"{'; '.join(facts)}; saves to the store go on. To have it: {ADVICE}"


def free_room(own: Collection[Slot], emitter: Emitter, error: OSError) -> bool:
    """Removes the oldest sealed image that a dead process of another run left, if there is one, and says so.

    `own`: slots of this run, whose other ranks may be about to come back for what lies in theirs. `error`: why memory
    could not be had. Nobody's image goes where that would not help: somebody may yet go on from it.
    """
    if error.errno not in (errno.ENOSPC, errno.ENOMEM):
        return False
    runs = {slot.parent for slot in own}
    found = [one for one in dead_images() if one.slot.parent not in runs and one.footer is not None]
    missing = error.missing if isinstance(error, NoRoom) else 0
    if not found or sum(one.bytes for one in found) < missing:
        return False
    oldest = min(found, key=lambda one: one.footer.sealed_us if one.footer is not None else 0)
    if oldest.footer is None or not remove_image(oldest):
        return False
    what = f"the image of {oldest.footer.id}, which a dead process left in memory"
    emitter.emit(Warned(f"{what}, was removed: its room was needed"))
    return True
