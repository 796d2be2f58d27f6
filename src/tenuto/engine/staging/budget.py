"""The host memory that images live in, within the stated budget and what the machine has (I9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tenuto.engine.staging.arena import Arena, acquire, acquire_window, memory_headroom
from tenuto.engine.staging.moving_window import acquire_moving_window, can_move
from tenuto.errors import SaveFailed

SPARE_BYTES: Final = 64 << 20
"""What is left to the rest of the job: indexes, buffers of libraries, the next allocation of training."""
WINDOW_BYTES: Final = 256 << 20
"""Memory of a save that takes no more than it must: four pieces that reach the disk's full speed."""
MOVING_WINDOW_BYTES: Final = (32 << 20, 64 << 20)
"""The same of a single save, where the memory moves along and its pages are touched for this save alone: for an image
below `LARGE_IMAGE_BYTES`, and for a larger one, which gains more from large writes than it loses by touching pages."""
LARGE_IMAGE_BYTES: Final = 256 << 20
WINDOW_UNIT: Final = 1 << 20
STEPS_IN_WINDOW: Final = 4
"""Being filled, filled, being digested, being written."""


class ImageTooLarge(Exception):
    """A whole image does not fit beside the others: how much is missing, in words."""


class BudgetedArena:
    """Holds one arena for one run and rank, and exchanges it when the state no longer fits.

    `lasting`: it serves many saves, so it holds the whole image where budget and machine allow, is touched beforehand
    and lies in shared memory where there is room. A single large save takes a window and no more, whose memory moves
    along the image where the system can do that: it waits for the store anyway.

    `slot`: of shared memory; other holders have others. `beside`: the bytes that these take now, of the same budget.
    """

    def __init__(
        self,
        repository: str,
        run: str,
        rank: int,
        *,
        budget: int | None,
        lasting: bool,
        slot: int = 0,
        beside: Callable[[], int] | None = None,
    ) -> None:
        self._repository = repository
        self._run = run
        self._rank = rank
        self._budget = budget
        self._lasting = lasting
        self._slot = slot
        self._beside = beside or (lambda: 0)
        self._arena: Arena | None = None
        self.whole = False
        """Whether nothing less than a whole image will do."""

    @property
    def nbytes(self) -> int:
        """What it takes now."""
        if self._arena is None:
            return 0
        return self._arena.nbytes if self._arena.window is None else self._arena.window

    def acquire(self, nbytes: int, *, step: int = 0) -> Arena:
        """An arena of at least `nbytes`, or a window of it that holds four steps of `step` bytes. SaveFailed if not
        even that fits into the budget and the machine's free memory; NotWhole where it has to be `whole`, and is not.
        The one given before is no longer valid."""
        if self._arena is not None and self._arena.buffer.nbytes >= nbytes and _holds(self._arena, step):
            return self._arena
        self.release()
        room, whose = self._room()
        window = max(self._usual_window(nbytes), STEPS_IN_WINDOW * step)
        if (room is None or nbytes <= room) and (self._lasting or nbytes <= 2 * window):
            self._arena = acquire(
                nbytes,
                repository=self._repository,
                run=self._run,
                rank=self._rank,
                slot=self._slot,
                prewarm=self._lasting,
                shared=self._lasting,
            )
            return self._arena
        if self.whole:
            raise ImageTooLarge(f"one more image takes {_mib(nbytes)}, and {whose}")
        if room is not None:
            window = min(window, room // WINDOW_UNIT * WINDOW_UNIT)
        self._arena = self._window(nbytes, window, step, whose)
        if self._lasting:
            self._arena.note = (
                f"the whole image takes {_mib(nbytes)}, and {whose}; at each save training waits while the state goes "
                f"out through {_mib(window)}"
            )
        return self._arena

    def tight(self, nbytes: int) -> bool:
        """Whether an image of so many bytes would be more than there is room for, or is seen through a window now."""
        if self._arena is not None:
            return self._arena.window is not None
        room, _ = self._room()
        return room is not None and nbytes > room

    def release(self) -> None:
        if self._arena is not None:
            self._arena.release()
            self._arena = None

    @property
    def _moves(self) -> bool:
        """Whether the memory of a window moves along the image: it goes one way, so it serves one save."""
        return not self._lasting and can_move()

    def _usual_window(self, nbytes: int) -> int:
        return MOVING_WINDOW_BYTES[nbytes >= LARGE_IMAGE_BYTES] if self._moves else WINDOW_BYTES

    def _window(self, nbytes: int, window: int, step: int, whose: str) -> Arena:
        least = max(WINDOW_UNIT, STEPS_IN_WINDOW * step)
        if window < least:
            raise SaveFailed(
                f"an image of this state takes {_mib(nbytes)} of host memory, and writing it piece by piece "
                f"{_mib(least)}; {whose}",
                subject=self._run,
                hint="raise memory_budget=, give the job more memory, or save less state",
            )
        try:
            return acquire_moving_window(nbytes, window) if self._moves else acquire_window(nbytes, window)
        except OSError as error:
            raise SaveFailed(
                f"an image of this state takes {_mib(nbytes)} of host memory; {whose}, and this system cannot write it "
                f"through less ({error.strerror})",
                subject=self._run,
                hint="raise memory_budget=, give the job more memory, or save less state",
            ) from error

    def _room(self) -> tuple[int | None, str]:
        """Bytes that an image may take, None where nobody knows, and what bounds them, in words."""
        free = memory_headroom()
        room = None if free is None else max(free - SPARE_BYTES, 0)
        beside = self._beside()
        if self._budget is not None and (room is None or self._budget - beside <= room):
            taken = f", of which {_mib(beside)} are taken" if beside else ""
            return max(self._budget - beside, 0), f"the budget is {_mib(self._budget)}{taken}"
        return room, "" if room is None else f"{_mib(free or 0)} are free here"


def _holds(arena: Arena, step: int) -> bool:
    return arena.window is None or arena.window >= STEPS_IN_WINDOW * step


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
