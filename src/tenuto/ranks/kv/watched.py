"""A key-value store that notes since when it has not answered: the place where the ranks meet may be lost as well."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from tenuto.errors import RankStoreLost
from tenuto.ranks.contract import KVStore, Settings

Result = TypeVar("Result")
_SLACK_S = 1.0


class WatchedKVStore:
    """`inner`, with a record of whether it answers. Once it has not for `dead_after_s` it is `lost`: from then on a
    request takes a beat at most, until one is answered."""

    def __init__(self, inner: KVStore, settings: Settings) -> None:
        self.name = inner.name
        self.host_rank = inner.host_rank
        self.longest_pause_s = inner.longest_pause_s
        self.inner = inner
        self._settings = settings
        self._lock = threading.Lock()
        self._silent_since: float | None = None
        self._asked_at = 0.0
        self._failures = 0
        self._error: RankStoreLost | None = None

    @property
    def lost(self) -> bool:
        """Whether it has answered nobody for `dead_after_s`, or cannot answer any more."""
        with self._lock:
            return self._lasting or self._silent_s >= self._settings.dead_after_s

    @property
    def gone(self) -> RankStoreLost | None:
        """The error of a store that has failed, for two beats, in a way that asking again cannot help."""
        with self._lock:
            confirmed = self._failures > 1 and self._silent_s >= 2 * self._settings.beat_s
            return self._error if self._lasting and confirmed else None

    @property
    def _lasting(self) -> bool:
        return self._error is not None and self._error.lasting

    @property
    def _silent_s(self) -> float:
        return 0.0 if self._silent_since is None else self._asked_at - self._silent_since

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        self._ask(lambda limit: self.inner.put(key, value, timeout=limit), timeout)

    def put_if_absent(self, key: str, value: bytes, *, timeout: float) -> bytes:
        return self._ask(lambda limit: self.inner.put_if_absent(key, value, timeout=limit), timeout)

    def get(self, key: str, *, timeout: float) -> bytes | None:
        return self._ask(lambda limit: self.inner.get(key, timeout=limit), timeout)

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes | None]:
        return self._ask(lambda limit: self.inner.get_many(keys, timeout=limit), timeout)

    def delete(self, keys: Sequence[str], *, timeout: float) -> None:
        self._ask(lambda limit: self.inner.delete(keys, timeout=limit), timeout)

    def close(self) -> None:
        self.inner.close()

    def _ask(self, request: Callable[[float], Result], timeout: float) -> Result:
        with self._lock:
            silent = self._silent_since is not None
            left_s = 0.0 if self._lasting else self._settings.dead_after_s - self._silent_s
        limit = min(timeout, max(left_s, self._settings.beat_s)) if silent else timeout
        began = self._settings.clock.now()
        try:
            result = request(limit)
        except RankStoreLost as error:
            self._failed(error, began, limit)
            raise
        with self._lock:
            self._silent_since, self._failures, self._error = None, 0, None
        return result

    def _failed(self, error: RankStoreLost, began: float, limit: float) -> None:
        now, settings = self._settings.clock.now(), self._settings
        with self._lock:
            since = self._silent_since
            if since is None or began - self._asked_at > settings.dead_after_s / 2:
                since = began  # while nobody asks, it is not silent
            # The time in which this process was itself stopped says nothing about the store.
            self._silent_since = since + max(0.0, now - began - limit - _SLACK_S)
            self._asked_at = max(now, self._asked_at)
            self._failures += 1
            if self._error is None or not self._lasting:
                self._error = error
