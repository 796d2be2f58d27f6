"""Whether objects that the page cache does not hold are read past it, or through it: measured where they lie.

Reads past the cache (O_DIRECT) need no copy and throw nothing out of it, and on most disks they are the fastest. On
some, such as disks of virtual machines whose host reads ahead, reads through the cache take half the time.
"""

from __future__ import annotations

import statistics
import threading
from functools import lru_cache
from typing import Final

STRETCH: Final = 2 << 20
"""Bytes of an object that are read in one way while both are measured: the cache reads ahead, and what it has read
ahead should be used."""
SAMPLE_BYTES: Final = 256 << 10
"""Shorter reads say little about bytes per second."""
SAMPLES: Final = 6
"""Reads of each way that are compared."""
CLEARLY: Final = 0.8
"""Reads through the cache are chosen if they take at most this share of the time of those past it."""
PLACES: Final = 64


class ReadWay:
    """The way to read in one place. The first long reads, which take each way by turns, decide."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[bool, list[float]] = {True: [], False: []}
        self._direct: bool | None = None

    @property
    def buffered(self) -> bool:
        """Whether reads through the cache have been chosen."""
        return self._direct is False

    def direct(self, offset: int, nbytes: int) -> bool:
        """Returns whether to read `nbytes` at `offset` of an object past the cache."""
        chosen = self._direct
        return (nbytes < SAMPLE_BYTES or _past_cache(offset)) if chosen is None else chosen

    def took(self, offset: int, nbytes: int, seconds: float) -> None:
        """Notes how long a read took that was made as `direct` says."""
        if self._direct is not None or nbytes < SAMPLE_BYTES:
            return
        with self._lock:
            self._samples[_past_cache(offset)].append(seconds / nbytes)
            past, through = self._samples[True], self._samples[False]
            if min(len(past), len(through)) >= SAMPLES:
                # Medians: where others use the disk too, one read may take a hundred times as long as the next.
                self._direct = statistics.median(through) > CLEARLY * statistics.median(past)


def _past_cache(offset: int) -> bool:
    return offset // STRETCH % 2 == 0


@lru_cache(PLACES)
def read_way_of(root: str) -> ReadWay:
    """Returns the way to read below a directory: one for all stores of this process there."""
    return ReadWay()
