"""What was met last, remembered in as much room as a few saves need."""

from __future__ import annotations

import threading
from typing import Final

_KEPT: Final = 256


class Recent:
    """Pairs that came last. May be used by several threads."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], None] = {}
        self._lock = threading.Lock()

    def __contains__(self, pair: tuple[str, str]) -> bool:
        return pair in self._known

    def add(self, pair: tuple[str, str]) -> bool:
        """Whether it is new."""
        with self._lock:
            new = pair not in self._known
            self._known[pair] = None
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
            return new
