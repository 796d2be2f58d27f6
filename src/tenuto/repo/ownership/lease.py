"""An attempt's lease: a counter that increases while its owner is alive.

An observer on another host watches the counter by its own clock. So a beat is a new object, `lease/<n>.json`, without
any time of the owner's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

from tenuto.concurrency.deadlines import within
from tenuto.errors import CorruptionError, ObjectNotFound, TenutoError
from tenuto.model.records import AttemptRecord
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.small_records import LeaseRecord, decode_lease, encode_lease
from tenuto.repo.repository import Repo

BEAT_S: Final = 3.0
TTL_S: Final = 15.0
"""A lease whose counter has not changed for so long, by the observer's clock, counts as dead."""
_RELEASE_S: Final = 10.0
"""How long `release` waits for the store by default."""

Trouble = Callable[[TenutoError], None]


def read_last(repo: Repo, run: str, attempt: int) -> tuple[int, LeaseRecord | None]:
    """Returns the counter (0 without a lease) and the newest readable lease object."""
    directory = object_names.lease_directory(run, attempt)
    numbers = sorted(
        n for f in repo.store.children(directory).objects if (n := object_names.parse_numbered(f)) is not None
    )
    for number in reversed(numbers):
        try:
            data = repo.store.get(object_names.numbered(directory, number), limit=objects.SMALL)
            return numbers[-1], decode_lease(data, run, attempt, number, repo.id)
        except (ObjectNotFound, CorruptionError):
            continue
    return (numbers[-1] if numbers else 0), None


class Lease:
    """Renews the lease of a claimed attempt: a daemon thread puts a beat every `interval_s`.

    A beat that fails is reported to `trouble` (from the thread) and the next one is put in its time: until then only
    observers elsewhere may take the owner for dead. A forked child has a copy that does nothing.
    """

    def __init__(
        self, repo: Repo, record: AttemptRecord, *, interval_s: float = BEAT_S, trouble: Trouble | None = None
    ):
        self._repo = repo
        self._record = record
        self._interval_s = interval_s
        self._trouble = trouble or (lambda error: None)
        self._pid = os.getpid()
        self._number = 0
        self._closed = record.number == 1  # nothing lies below the first
        self._released = False
        self._leaving = False
        self.newest: int | None = None
        """The step that was committed last, which beats say from now on, as a hint for whoever lists the steps."""
        self._stop = threading.Event()
        self._beating = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Puts the first beat, and the following ones in a thread."""
        self._try_beat()
        self._start_thread()

    def resume(self) -> None:
        """Beats again after `release`, the first time now. Does nothing unless released, and in a forked child. Raises
        StoreError if that beat cannot be put: while the last one says released, the owner counts as gone."""
        if not self._released or os.getpid() != self._pid:
            return
        self._released = self._leaving = False
        self.beat()
        self._start_thread()

    def beat(self) -> None:
        """Puts the next beat, and removes the one before the last. Raises StoreError."""
        with self._beating:
            self._put(released=False)

    def mark_closed(self) -> None:
        """Puts a beat which says, as do all later ones, that no unfinished save of an earlier attempt is left."""
        self._closed = True
        self.beat()

    def leave(self) -> None:
        """Has the beats from now on say that the owner is about to leave, so that others wait for it. Does no I/O: may
        be called in the handler of a signal."""
        self._leaving = True

    def release(self, timeout: float | None = None) -> None:
        """Puts a last beat, which says that the run is released. Once, until `resume`; does nothing in a forked child.
        Raises StoreError if that beat cannot be put, DeadlineExceeded if the store hangs for `timeout` seconds (10 by
        default): observers then wait for the ttl."""
        if self._released or os.getpid() != self._pid:
            return
        self._released = True
        self._stop.set()
        timeout = _RELEASE_S if timeout is None else timeout
        what = f"giving back attempt {self._record.number} of run {self._record.run}"
        within(timeout, what, self._last_beat, subject=self._record.run)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _last_beat(self) -> None:
        with self._beating:
            if self._released:  # else it hung for so long that the owner has resumed meanwhile
                self._put(released=True)

    def _start_thread(self) -> None:
        self._stop = threading.Event()
        name = f"tenuto-lease-{self._record.run}-{self._record.number}"
        self._thread = threading.Thread(target=self._run, args=(self._stop,), name=name, daemon=True)
        self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval_s) and os.getpid() == self._pid:
            self._try_beat()

    def _try_beat(self) -> None:
        try:
            with self._beating:
                if not self._stop.is_set():
                    self._put(released=False)
        except TenutoError as error:
            self._trouble(error)

    def _put(self, *, released: bool) -> None:
        record = self._record
        self._number += 1
        leaving = self._leaving and not released
        beat = LeaseRecord(self._number, record.id, record.parent, self._closed, released, leaving, self.newest)
        directory = object_names.lease_directory(record.run, record.number)
        name = object_names.numbered(directory, self._number)
        data = encode_lease(beat, record.run, record.number, self._repo.id, self._repo.signer)
        objects.put(self._repo.store, name, data, token=record.id)
        if self._number > 2:
            self._repo.store.delete([object_names.numbered(directory, self._number - 2)])
