"""What was met last, remembered in as much room as a few saves need."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Final

_KEPT: Final = 256


class Recent:
    """What came last. May be used by several threads."""

    def __init__(self) -> None:
        self._known: dict[Hashable, None] = {}
        self._lock = threading.Lock()

    def __contains__(self, one: Hashable) -> bool:
        return one in self._known

    def add(self, one: Hashable) -> bool:
        """Whether it is new."""
        with self._lock:
            new = one not in self._known
            self._known[one] = None
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
            return new
