"""Applies retention in the background, and keeps each node's own places in step with it: in a thread, so that the next
save never waits for files to be unlinked, and at a lower priority than training."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

from tenuto.concurrency.worker_threads import lower_priority
from tenuto.engine.save.rank_group import RankGroup
from tenuto.errors import TenutoError
from tenuto.events import Emitter
from tenuto.maintenance.replica_tidy import tidy_replicas
from tenuto.maintenance.retention import execute, plan_retention
from tenuto.model.ids import CheckpointId
from tenuto.policy.keep import KeepPolicy
from tenuto.repo.catalog import Catalog
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.replicated.places import places_of
from tenuto.repo.repository import Repo

PUT_OFF: Final = 256
"""A round judges every checkpoint that is kept. So that its cost for each save does not grow with their number, one
follows each commit of a run that keeps fewer than this, every second commit where twice as many are kept, and so on."""


class RetentionWorker:
    """Applies the keep policy of one run after commits; one round at a time. The newest commit always gets one, at the
    latest when `join` is called. Does nothing under a policy that keeps everything."""

    def __init__(
        self,
        repo: Repo,
        keep: KeepPolicy,
        *,
        emitter: Emitter,
        warn: Callable[[str], None],
        group: RankGroup,
    ) -> None:
        """The coordinator of `group` removes for all, and one rank of each node cleans its places; the others do
        nothing."""
        self.keep = keep
        self._retains = group.coordinates and not keep.keeps_all()
        self._spread = places_of(repo.store) is not None
        self._leads = self._spread and group.leads
        self._repo = repo
        self._catalog = Catalog()
        if self._retains:
            repo.observer = self._catalog
        self._emitter = emitter
        self._warn = warn
        self._round = threading.Lock()
        self._state = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False
        self._step = 0
        """The last committed step."""
        self._put_off: tuple[Attempt, int] | None = None
        """The attempt of the commits that no round has followed yet, and their number."""

    def after_commit(self, attempt: Attempt, step: int) -> None:
        """Begins a round, or another one after the round that is under way. In a run of many checkpoints not after each
        commit."""
        self._step = max(step, self._step)
        if not (self._retains or self._leads):
            return
        with self._state:
            waiting = 1 + (self._put_off[1] if self._put_off is not None else 0)
            self._put_off = (attempt, waiting)
        if self._leads or waiting > self._catalog.known // PUT_OFF:
            self._begin(attempt)

    def _begin(self, attempt: Attempt) -> None:
        with self._state:
            self._put_off = None
            if self._thread is not None:
                self._again = True
                return
            self._thread = threading.Thread(target=self._rounds, args=(attempt,), name="tenuto-retention", daemon=True)
            try:
                self._thread.start()
                return
            except RuntimeError:  # the interpreter is shutting down, and starts no more threads
                self._thread = None
        self.now(attempt)

    def now(self, attempt: Attempt, *, everybody: bool = False) -> int:
        """Runs one round in this thread; returns how many checkpoints went. A failure is a warning: the next commit
        tries again. `everybody`: a rank that needs room on its node cleans its places itself."""
        with self._round:
            try:
                return self._retain(attempt) + self._clean_places(attempt, everybody=everybody)
            except Exception as error:  # noqa: BLE001 - a policy of the user's may raise anything; training goes on
                reason = error.message if isinstance(error, TenutoError) else repr(error)
                # Where warnings are errors the event has reported it: in this thread nothing would catch one.
                with contextlib.suppress(Warning):
                    self._warn(f"retention of run {attempt.run!r} did not finish: {reason}")
                return 0

    def _retain(self, attempt: Attempt) -> int:
        if not self._retains:
            return 0
        removed = 0
        for _ in range(2):
            plan = plan_retention(self._repo, attempt, self.keep, self._catalog)
            removed += len(execute(self._repo, attempt, plan, emitter=self._emitter, catalog=self._catalog))
            if not self._catalog.plan_again:
                break
        return removed

    def _clean_places(self, attempt: Attempt, *, everybody: bool) -> int:
        if not (self._leads or (everybody and self._spread)):
            return 0
        return tidy_replicas(self._repo, CheckpointId(attempt.run, attempt.number, self._step))

    def join(self, timeout: float | None) -> bool:
        """Begins the round that was put off, and waits for what is under way; returns False if that has not ended after
        `timeout` seconds."""
        put_off = self._put_off
        if put_off is not None:
            self._begin(put_off[0])
        until = None if timeout is None else time.monotonic() + timeout
        while (thread := self._started()) is not None and thread is not threading.current_thread():
            thread.join(None if until is None else max(until - time.monotonic(), 0.0))
            if thread.is_alive():
                return False
            with self._state:
                if self._thread is thread:  # it ended without clearing this
                    self._thread = None
        return True

    def _started(self) -> threading.Thread | None:
        """Returns the thread of the round that is under way. Whoever is just starting it holds the lock."""
        with self._state:
            return self._thread

    def _rounds(self, attempt: Attempt) -> None:
        lower_priority()
        try:
            while True:
                self.now(attempt)
                with self._state:
                    if not self._again:
                        self._thread = None
                        return
                    self._again = False
        finally:
            # Whatever ends this thread, the next commit begins another; one that has begun since stays.
            with self._state:
                if self._thread is threading.current_thread():
                    self._thread = None
