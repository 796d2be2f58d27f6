"""Applies retention in the background, and keeps each node's own places in step with it: in a thread, so that the next
save never waits for files to be unlinked, and at a lower priority than training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from tenuto.concurrency.background_rounds import BackgroundRounds
from tenuto.engine.save.rank_group import RankGroup
from tenuto.errors import TenutoError
from tenuto.events import Emitter
from tenuto.maintenance.gc import free_expired
from tenuto.maintenance.replica_tidy import tidy_replicas
from tenuto.maintenance.retention import execute, plan_retention
from tenuto.model.ids import CheckpointId
from tenuto.repo.catalog import Catalog
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.replicated.places import places_of
from tenuto.repo.repository import Repo
from tenuto.training.tier_worker import TierWorker

PUT_OFF: Final = 256
"""A round judges every checkpoint that is kept. So that its cost for each save does not grow with their number, one
follows each commit of a run that keeps fewer than this, every second commit where twice as many are kept, and so on."""

TOGETHER: Final = 8
"""On a remote store a round waits until one checkpoint goes for so many that stay, or a few: it takes as many requests
for one as for a few."""
A_FEW: Final = 3
"""Less than that, and less than half of those that stay, do not go by themselves."""

TRASH_EVERY_S: Final = 3600.0
"""A round looks into the trash, to free what retention put there a day ago, once in so many seconds, and so does the
first one: what lies there costs a few calls of the store, and is not urgent."""


class RetentionWorker:
    """Applies the keep policy of one run after commits; one round at a time. The newest commit always gets one, at the
    latest when `join` is called. Does nothing under a policy that keeps everything."""

    def __init__(
        self,
        repo: Repo,
        *,
        emitter: Emitter,
        warn: Callable[[str], None],
        group: RankGroup,
        tiers: TierWorker,
    ) -> None:
        """The coordinator of `group` removes for all, and one rank of each node cleans its places; the others do
        nothing. `tiers`: says what is kept; what it fills is not removed yet."""
        self._tiers = tiers
        self._retains = group.coordinates and (tiers.limits or not tiers.keep.keeps_all())
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
        self._rounds = BackgroundRounds("tenuto-retention", self._begun)
        self._attempt: Attempt | None = None
        self._looked_into_trash: float | None = None
        self._told: frozenset[str] = frozenset()
        """What no plan could judge, as far as it was told."""
        self._told_of_unmet = False
        """Whether it was told what of the policy cannot be met: each plan says that of other checkpoints."""
        self._step = 0
        """The last committed step."""
        self._everything = False
        """Whether the next round removes also what would wait for more to go."""
        self._put_off: tuple[Attempt, int] | None = None
        """The attempt of the commits that no round has followed yet, or not to the end, and their number."""

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

    def _begin(self, attempt: Attempt, *, everything: bool = False) -> None:
        with self._state:
            self._put_off = None
            self._everything = self._everything or everything
            self._attempt = attempt
        if not self._rounds.wake():
            self.now(attempt)

    def _begun(self) -> None:
        with self._state:
            attempt, everything, self._everything = self._attempt, self._everything, False
        assert attempt is not None, "a commit has begun it"
        self.now(attempt, everything=everything)

    def now(self, attempt: Attempt, *, everybody: bool = False, everything: bool = True) -> int:
        """Runs one round in this thread; returns how many checkpoints went. A failure is a warning: the next commit
        tries again. `everybody`: a rank that needs room on its node cleans its places itself. `everything`: also what
        would wait for more to go."""
        with self._round:
            try:
                return self._retain(attempt, everything=everything) + self._clean_places(attempt, everybody=everybody)
            except Exception as error:  # noqa: BLE001 - a policy of the user's may raise anything; training goes on
                reason = error.message if isinstance(error, TenutoError) else repr(error)
                self._warn(f"retention of run {attempt.run!r} did not finish: {reason}")
                return 0

    def _retain(self, attempt: Attempt, *, everything: bool) -> int:
        if not self._retains:
            return 0
        removed, remote = 0, self._repo.store.capabilities.remote
        for _ in range(2):
            policy, copying = self._tiers.policy(), self._tiers.copying
            plan = plan_retention(self._repo, attempt, policy, self._catalog, copying=copying)
            going = len(plan.dropped)
            new = [
                *(() if self._told_of_unmet else plan.unmet),
                *(one for one in plan.unjudged if one not in self._told),
            ]
            self._told_of_unmet |= bool(plan.unmet)
            self._told |= {*plan.unjudged}
            for warning in new:
                self._warn(f"retention of run {attempt.run!r}: {warning}")
            stay = len(plan.verdicts) - going
            if not everything and remote and 0 < going < max(stay // TOGETHER, min(A_FEW, (stay + 1) // 2)):
                with self._state:
                    self._put_off = self._put_off or (attempt, 0)
                break
            gone = execute(self._repo, attempt, plan, emitter=self._emitter, catalog=self._catalog, copying=copying)
            removed += len(gone)
            if not self._catalog.plan_again:
                break
        return removed + self._empty_trash(attempt)

    def _empty_trash(self, attempt: Attempt) -> int:
        now = time.monotonic()
        if self._looked_into_trash is not None and now < self._looked_into_trash + TRASH_EVERY_S:
            return 0
        self._looked_into_trash = now
        return len(free_expired(self._repo, attempt.run, by="retention", catalog=self._catalog))

    def _clean_places(self, attempt: Attempt, *, everybody: bool) -> int:
        if not (self._leads or (everybody and self._spread)):
            return 0
        return tidy_replicas(self._repo, CheckpointId(attempt.run, attempt.number, self._step))

    def join(self, timeout: float | None) -> bool:
        """Begins the round that was put off, and waits for what is under way; returns False if that has not ended after
        `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            put_off = self._put_off
            if put_off is not None:
                self._begin(put_off[0], everything=True)
            if not self._rounds.join(None if until is None else max(until - time.monotonic(), 0.0)):
                return False
            if self._put_off is None:
                return True
