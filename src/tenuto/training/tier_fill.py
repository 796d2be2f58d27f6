"""Fills one tier in the background: which checkpoints are due there, when it is tried again, how far it is behind."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from tenuto.concurrency.background_rounds import BackgroundRounds
from tenuto.concurrency.deadlines import within
from tenuto.errors import CheckpointNotFound, DeadlineExceeded, OwnershipError, StoreError, in_words
from tenuto.events import Emitter, TierLag, TierSkipped
from tenuto.maintenance import tier_copies
from tenuto.maintenance.census import ids_in_trash, is_run
from tenuto.maintenance.gc import free_expired
from tenuto.maintenance.place_copy import PlaceCopy
from tenuto.maintenance.replica_tidy import free_in
from tenuto.maintenance.retention import execute, plan_retention
from tenuto.maintenance.shared_packs import packs_of
from tenuto.model.ids import CheckpointId
from tenuto.model.sizes import seconds_of
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.save import Moment, SaveHistory
from tenuto.repo.catalog import Catalog
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import MAX_ABORTED
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.replicated.tiers import OpenTier, Tiers
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import dead_tombstones, take_back
from tenuto.units import count, size

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 300.0
"""How long a tier that has failed is left alone: twice as long each time, and tried again after the next commit."""
NODES_S: Final = 120.0
"""How long a checkpoint is waited for whose data files other nodes are bringing."""
LOOK_S: Final = 0.5
TIDY_S: Final = 10.0
"""How long one checkpoint after the other is copied before what the tier is not to keep goes."""
TRASH_EVERY_S: Final = 3600.0
"""How often a tier's trash is looked into for what others needed, and nobody needs any more."""

Report = Callable[[str], None]


class NotHereYet(Exception):
    """Some data file of a checkpoint is in no place in reach: its node is still bringing it."""


class TierFill(ABC):
    """Fills one tier with the checkpoints of one run that are due there: the newest first. One that waits when a newer
    one becomes due is skipped."""

    def __init__(self, repo: Repo, run: str, tiers: Tiers, tier: OpenTier, *, emitter: Emitter, report: Report) -> None:
        self.repo = repo
        self.run = run
        self.tiers = tiers
        self.tier = tier
        self.emitter = emitter
        self.report = report
        self.attempt: Attempt | None = None
        self.compared = False
        """Whether what lies there is known: one listing, in the first round that succeeds."""
        self.whole: set[CheckpointId] = set()
        """The checkpoints that it has whole, as far as is known."""
        self.error = ""
        self.lock = threading.Lock()
        self.rounds = BackgroundRounds(f"tenuto-tier-{tier.name}", self._round)
        self.changed = threading.Event()
        self._current: CheckpointId | None = None
        self._copied = False
        """Whether the last one that was taken is whole there."""
        self._waiting: list[CheckpointId] = []
        """Oldest first."""
        self._due: dict[CheckpointId, int] = {}
        """The checkpoints that have become due since the newest whole one, with their bytes."""
        self._seen: tuple[CheckpointId, int] | None = None
        """The last commit."""
        self._last_due: tuple[int, float] | None = None
        self._began_s = time.monotonic()
        self._pause_s = 0.0
        self._next_try_s = 0.0
        self._closed = False
        self._until_s = float("inf")
        """When the end of training stops waiting."""

    # -- what is due ---------------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.rounds.wake()

    def committed(self, id: CheckpointId, nbytes: int, *, ending: bool = False) -> None:
        """Follows a commit, or the end of training."""
        now_s = time.monotonic()
        with self.lock:
            self._seen = (id, nbytes)
            if id in self._due or id in self.whole:
                return
            if self._is_due(id.step, now_s, ending=ending):
                self._add(id, nbytes, now_s)
        self.changed.set()
        self.rounds.wake()

    def _is_due(self, step: int, now_s: float, *, ending: bool = False) -> bool:
        policy = self.tier.tier.save
        if policy is None:
            return True
        last_step, last_s = self._last_due or (None, None)
        history = SaveHistory(started_s=self._began_s, last_saved_step=last_step, last_saved_s=last_s)
        return policy.decide(Moment(step, now_s, ending=ending), history).save

    def _add(self, id: CheckpointId, nbytes: int, now_s: float) -> None:
        self._last_due = (id.step, now_s)
        self._due[id] = nbytes
        self._waiting.append(id)

    def _skip_older(self, id: CheckpointId) -> None:
        """Drops what waits and is older: `id` takes its place."""
        with self.lock:
            older = [one for one in self._waiting if one < id]
            self._waiting = [one for one in self._waiting if one > id]
        for one in older:
            self.emitter.emit(TierSkipped(one, self.tier.name, f"step {id.step} is due there by now"))

    def copying(self) -> dict[CheckpointId, str]:
        """Returns what the primary must not lose yet: what is being copied, and the newest checkpoint that waits."""
        with self.lock:
            ids = [self._current, *self._waiting[-1:]]
        return {id: self.tier.name for id in ids if id is not None}

    # -- the rounds ----------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        if self.attempt is None or (time.monotonic() < self._next_try_s and not self._closed):
            return
        try:
            if not self.compared:
                self._compare(self.attempt)
                self.compared = True
            began_s = time.monotonic()
            while self._copy_next():
                if self._copied and time.monotonic() > began_s + TIDY_S:  # else one that always lags would never be
                    self._tidy(self.attempt)
                    began_s = time.monotonic()
            self._tidy(self.attempt)
        except OwnershipError as error:
            self._failed(error, pause_s=float("inf"))
        except Exception as error:  # noqa: BLE001 - training goes on without this tier, whatever is wrong with it
            self._failed(error, pause_s=min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S))
        else:
            if self.error:
                self.report(f"{self.tier.name} is filled again: {self._state()}")
            self.error, self._pause_s, self._next_try_s = "", 0.0, 0.0
        self._report_lag()

    def _failed(self, error: Exception, *, pause_s: float) -> None:
        with self.lock:
            if self._current is not None:
                self._waiting = sorted([*self._waiting, self._current])
                self._current = None
        first, self.error = not self.error, in_words(error)
        self._pause_s, self._next_try_s = pause_s, time.monotonic() + pause_s
        if first:
            self.report(f"{self.tier.name} cannot be filled, training continues without it: {self.error}")

    def _copy_next(self) -> bool:
        """Copies one checkpoint; returns whether there was one that waits."""
        with self.lock:
            id = self._choose(list(self._waiting)) if self._waiting else None
            if id is None:
                return False
            self._waiting.remove(id)
            self._current = id
        self._skip_older(id)
        try:
            whole = self._copy(id)
        except CheckpointNotFound:
            self.emitter.emit(TierSkipped(id, self.tier.name, "it was removed before it was copied"))
            whole = False
            with self.lock:
                self._due.pop(id, None)
        except NotHereYet:
            self._copied = False
            self._await_nodes(id)
            return True
        with self.lock:
            self._current, self._copied = None, whole
            if whole:
                self.whole.add(id)
                self._due = {one: nbytes for one, nbytes in self._due.items() if one > id}
        self._report_lag()
        return True

    def _await_nodes(self, id: CheckpointId) -> None:
        """Puts a checkpoint back until its nodes have brought its data files, unless a newer one becomes due."""
        with self.lock:
            self._current = None
            superseded = bool(self._waiting)
            if not superseded:
                self._waiting = [id]
            patient = time.monotonic() < min(self._due_s() + NODES_S, self._until_s)
        if superseded:
            self.emitter.emit(TierSkipped(id, self.tier.name, "a newer one is due there by now"))
        elif not patient:
            raise StoreError(f"some data files of {id} are in no place that this process reaches", subject=str(id))
        self.changed.clear()
        self.changed.wait(LOOK_S)

    def _due_s(self) -> float:
        return self._last_due[1] if self._last_due is not None else self._began_s

    def _choose(self, waiting: list[CheckpointId]) -> CheckpointId:
        return waiting[-1]

    @abstractmethod
    def _compare(self, attempt: Attempt) -> None:
        """Finds out what lies there, and what is due and missing."""

    @abstractmethod
    def _copy(self, id: CheckpointId) -> bool:
        """Copies a checkpoint; returns whether it is whole there now."""

    @abstractmethod
    def _tidy(self, attempt: Attempt) -> None:
        """Removes what the tier is not to keep."""

    # -- what is said --------------------------------------------------------------------------------------------------

    def lag(self) -> TierLag:
        with self.lock:
            newest = max(self.whole, default=None)
            return TierLag(self.run, self.tier.name, newest, len(self._due), sum(self._due.values()), self.error)

    def _report_lag(self) -> None:
        lag = self.lag()
        if lag != self.tiers.lags.get(self.tier.name):
            self.tiers.lags[self.tier.name] = lag
            self.emitter.emit(lag)

    def _state(self) -> str:
        lag = self.lag()
        return f"{count(lag.behind, 'checkpoint')} ({size(lag.bytes)}) behind" if lag.behind else "it has what is due"

    def finish(self, until_s: float) -> str:
        """Waits until the tier has what is due, until this time of the monotonic clock at most. Returns what is left,
        in words; empty if nothing is."""
        if self._seen is not None and self.tier.tier.save is not None:
            self.committed(*self._seen, ending=True)
        self._closed, self._until_s = True, until_s
        self.rounds.wake()
        self.rounds.join(max(until_s - time.monotonic(), 0.0))
        lag = self.lag()
        if not lag.behind:
            self._ended(until_s)
            return ""
        why = f" ({self.error})" if self.error else ""
        return f"{self.tier.name} lacks step {max(self._due).step}{why}"

    def _ended(self, until_s: float) -> None:  # noqa: B027 - the primary shows it by itself
        """Follows the end of a training after which the tier has what is due."""


class FollowerFill(TierFill):
    """Fills a tier other than the primary, and keeps there what that tier's own policy says."""

    def __init__(
        self,
        repo: Repo,
        run: str,
        tiers: Tiers,
        tier: OpenTier,
        *,
        emitter: Emitter,
        report: Report,
        keep: KeepPolicy,
        relied_on: Callable[[], Mapping[CheckpointId, str] | None],
        elsewhere: Callable[[CheckpointId], bool],
    ) -> None:
        """`relied_on`: checkpoints whose data files the primary has only here, None as long as that is not known.
        `elsewhere`: tells whether a slower one has a checkpoint whole."""
        super().__init__(repo, run, tiers, tier, emitter=emitter, report=report)
        self.keep = keep if tier.tier.keep is None else tier.tier.keep
        self._relied_on = relied_on
        self._elsewhere = elsewhere
        self._there = tier_copies.in_place(repo, tier.store)
        self._copier = PlaceCopy(repo, tier.store)
        self._bases = tier_copies.bases_in(self._there)
        self._catalog = Catalog()
        self._emptied_s = 0.0
        self._announced = False
        self._over = False
        self._warned_of_budget = False
        self._last: CheckpointId | None = None
        self._half: CheckpointId | None = None
        """A checkpoint whose copy has failed, so that a part of it may lie there."""

    def announce(self, number: int) -> None:
        """Shows the tier that attempt `number` owns the run. Raises RunInUse if another job owns it there."""
        tier_copies.announce(self.repo, self.tier.store, self.run, number)
        self._announced = True

    def _ended(self, until_s: float) -> None:
        """Shows that the run is free to whoever has only this tier."""
        attempt = self.attempt
        if attempt is not None and not self.error:
            left_s = max(until_s - time.monotonic(), 1.0)
            show = partial(tier_copies.show_release, self.repo, self.tier.store, self.run, attempt.number)
            try:
                within(left_s, f"telling {self.tier.name} that the run is free", show, subject=self.tier.name)
            except (StoreError, DeadlineExceeded) as error:
                self._failed(error, pause_s=0.0)

    def _compare(self, attempt: Attempt) -> None:
        if not self._announced:
            self.announce(attempt.number)
        store, home = self.tier.store, self.tiers.home
        for stone in dead_tombstones(
            self._there,
            self.run,
            now_name=object_names.attempt_name(self.run, attempt.number),
            dead_below=attempt.number,
        ):
            take_back(self._there, stone)
        theirs, ours = tier_copies.held(store, self.run), tier_copies.held(home, self.run)
        committed = [
            id for id, files in sorted(ours.items()) if object_names.MANIFEST in files and self.repo.exists(id)
        ]
        with self.lock:
            self.whole |= {
                id
                for id, files in theirs.items()
                if files.get(object_names.MANIFEST, 0) > MAX_ABORTED
                or (object_names.MANIFEST in files and self._there.exists(id))
            }
        newest = max(self.whole, default=None)
        missing = [id for id in committed if newest is None or id > newest]
        self._find_due(missing, newest)
        self._empty_trash()
        resting = set(ids_in_trash(self._there, self.run))
        for id in theirs.keys() - self.whole - resting - set(self._waiting[-1:]):
            free_in(store, id)  # what a copy or a removal has left that was cut short

    def _empty_trash(self) -> None:
        """Frees what waited there until nobody needs its data files; learns what still waits."""
        self._emptied_s = time.monotonic()
        for run in filter(is_run, self.tier.store.children("trash").directories):
            catalog = self._catalog if run == self.run else None
            free_expired(self._there, run, by="needed", grace_s=0.0, catalog=catalog)

    def _find_due(self, missing: list[CheckpointId], newest: CheckpointId | None) -> None:
        """Finds what is due of what an earlier process has committed, by the times in the manifests."""
        now_s, wall_s = time.monotonic(), time.time()

        def at(id: CheckpointId) -> float:
            created_s = seconds_of(self.repo.manifest(id).created)
            return now_s - max(0.0, wall_s - created_s) if created_s is not None else now_s

        with self.lock:
            known = set(self._due)
            if newest is not None and self._last_due is None and self.tier.tier.save is not None:
                created_s = seconds_of(self._there.manifest(newest).created)
                age_s = max(0.0, wall_s - created_s) if created_s is not None else 0.0
                self._last_due = (newest.step, now_s - age_s)
            for id in missing:
                if id in known:
                    continue
                manifest_s = at(id) if self.tier.tier.save is not None else now_s
                if self._is_due(id.step, manifest_s):
                    self._add(id, self.repo.manifest(id).bytes, manifest_s)
            self._waiting.sort()

    def _copy(self, id: CheckpointId) -> bool:
        assert self.attempt is not None, "begun"
        tier_copies.check_line(self.repo, self.tier.store, self.run, self.attempt.number)
        if self.tiers.fills_home:
            manifest = self.repo.manifest(id)
            if not all(self.tiers.has(name) for name in packs_of(self.repo, manifest)):
                raise NotHereYet
        half = self._half
        if half not in (None, id) and not self.tier.store.children(object_names.trash_directory(half)).objects:
            free_in(self.tier.store, half)  # nothing there rests on it
        self._half = id
        if self._copier.bring(id):
            self._check_owner(id, self.attempt)
        waiting = (base for base in self._bases(id) if base.run == self.run and base not in self.whole)
        self._catalog.waiting.update(dict.fromkeys(waiting))
        self._half = None
        self._last = id
        return True

    def _check_owner(self, id: CheckpointId, attempt: Attempt) -> None:
        """Takes back a manifest that was just put where the run has a later owner: that one may have freed the parts
        before, as what a copy has left that was cut short."""
        try:
            tier_copies.check_line(self.repo, self.tier.store, self.run, attempt.number)
        except OwnershipError:
            self.tier.store.delete([id.manifest])
            raise

    def _tidy(self, attempt: Attempt) -> None:
        tier_copies.copy_refs(self.repo, self.tier.store)
        if self.keep.metrics():  # they may come long after their checkpoint
            tier_copies.copy_late_notes(self.repo, self._copier, self.run)
        elif self._last is not None and self.repo.exists(self._last):
            self._copier.bring_notes(self._last)
        capacity, policy = self.tier.tier.capacity, self.keep
        if self._relied_on() is None:
            return  # the next round knows
        if capacity is not None:
            held = tier_copies.held(self.tier.store, self.run)
            going, over = tier_copies.beyond(held, capacity, self._elsewhere, self._bases)
            if over and not self._over:
                self.report(
                    f"{self.tier.name} is over its capacity by {size(over)}, and no slower tier has what is there"
                )
            self._over = bool(over)
            policy = tier_copies.WithinCapacity(policy, set(going), capacity) if going else policy
        if policy.keeps_all():
            return
        if time.monotonic() > self._emptied_s + TRASH_EVERY_S:
            self._empty_trash()
        there = Attempt(self._there, attempt.record, None)

        def copying() -> Mapping[CheckpointId, str]:
            return self._relied_on() or {}

        plan = plan_retention(self._there, there, policy, self._catalog, grace="none", copying=copying)
        if plan.warnings and not self._warned_of_budget:
            self.report(f"{self.tier.name}: {'; '.join(plan.warnings)}")
        self._warned_of_budget = bool(plan.warnings)
        gone = execute(self._there, there, plan, emitter=self.emitter, catalog=self._catalog, copying=copying)
        with self.lock:
            self.whole.difference_update(gone)
