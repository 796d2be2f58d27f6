"""Keeps the tiers of a run as they are declared, in the background: fills those that saves do not wait for, writes
damaged copies anew, and takes over what the primary has lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from functools import partial
from typing import Final, TypeVar

from tenuto.concurrency.background_rounds import BackgroundRounds
from tenuto.concurrency.deadlines import within
from tenuto.engine.read.copy_packs import copy_packs
from tenuto.engine.save.rank_group import RankGroup
from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    DeadlineExceeded,
    RepositoryError,
    RunNotFound,
    StoreError,
    in_words,
    typed,
)
from tenuto.events import Emitter
from tenuto.maintenance import tier_copies
from tenuto.maintenance.facts import gather_facts
from tenuto.maintenance.place_copy import PlaceCopy
from tenuto.maintenance.shared_packs import packs_of
from tenuto.maintenance.tier_copies import has_packs
from tenuto.model.ids import CheckpointId
from tenuto.policy.keep import KeepPolicy
from tenuto.repo.format import object_names
from tenuto.repo.lineage import latest, resolve
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.replicated.places import home_of, places_of, tiers_of
from tenuto.repo.replicated.tiers import OpenTier, Tiers
from tenuto.repo.repository import Repo
from tenuto.training.tier_fill import FollowerFill, NotHereYet, Report, TierFill
from tenuto.units import size

ANSWER_S: Final = 30.0
"""How long the beginning of training waits for a tier to say what it has."""
Result = TypeVar("Result")


class PrimaryFill(TierFill):
    """Brings the primary the data files that this node's own tier has, where saves do not wait for it; and those of
    checkpoints that it took over from another tier."""

    def __init__(
        self, repo: Repo, run: str, tiers: Tiers, *, emitter: Emitter, report: Report, group: RankGroup
    ) -> None:
        super().__init__(repo, run, tiers, tiers.home_tier, emitter=emitter, report=report)
        self._coordinates = group.coordinates
        self._alone = group.world_size == 1
        self._bases = tier_copies.bases_in(repo)
        self._own = [store for store in tiers.packs_in if store is not tiers.home]
        self.lacking: set[CheckpointId] = set()
        """The checkpoints that have no data file in the primary, and that another tier has."""
        self._said_over = False

    def committed(self, id: CheckpointId, nbytes: int, *, ending: bool = False) -> None:
        if self.tiers.fills_home:
            super().committed(id, nbytes, ending=ending)
        else:
            self.rounds.wake()  # what goes from a faster tier goes after a commit

    def _compare(self, attempt: Attempt) -> None:
        there = tier_copies.held(self.tiers.home, self.run)
        bare = [
            id
            for id, files in sorted(there.items())
            if object_names.MANIFEST in files and not has_packs(id, files, own=True) and self.repo.exists(id)
        ]
        if self._coordinates:
            self.lacking = {id for id in bare if self._only_elsewhere(id)}
            with self.lock:
                self.whole |= {
                    id for id, files in there.items() if object_names.MANIFEST in files and has_packs(id, files)
                } - set(bare)
        newest = self._not_brought(there) if self.tiers.fills_home else None
        if newest is not None:
            with self.lock:
                self.whole.discard(newest)
                if newest not in self._due:
                    self._add(newest, self.repo.manifest(newest).bytes, time.monotonic())
                    self._waiting.sort()

    def _not_brought(self, there: tier_copies.Held) -> CheckpointId | None:
        """Returns the newest checkpoint of which this node has data files that the primary lacks; for the rank that
        waits for all nodes also the newest of all, where the primary lacks any of it."""
        for id in sorted(there, reverse=True):
            files = there[id]
            if id in self.lacking or object_names.MANIFEST not in files:
                continue
            brought = all(name.rpartition("/")[2] in files for name in self._of_this_node(id))
            if (not brought or (self._coordinates and not self._is_brought(id, files))) and self.repo.exists(id):
                return id
            if self._coordinates and has_packs(id, files):
                return None
        return None

    def _is_brought(self, id: CheckpointId, files: Container[str]) -> bool:
        try:
            manifest = self.repo.manifest(id)
            packs = packs_of(self.repo, manifest)
        except (CorruptionError, CheckpointNotFound):
            return True  # nobody can tell what it consists of
        return all(name.rpartition("/")[2] in files for name in packs if object_names.save_of(name) == id)

    def _only_elsewhere(self, id: CheckpointId) -> bool:
        return not self._of_this_node(id) and any(
            object_names.MANIFEST in follower.children(id.directory).objects for follower in self.tiers.followers
        )

    def _of_this_node(self, id: CheckpointId) -> list[str]:
        """Returns the data files of a checkpoint that this node has."""
        names = {f"{id.directory}/{file}" for store in self._own for file in store.children(id.directory).objects}
        return sorted(name for name in names if object_names.is_pack(name))

    def _choose(self, waiting: list[CheckpointId]) -> CheckpointId:
        """Prefers what another node has begun to bring: else two nodes of unlike speed might never bring the same."""
        for id in reversed(waiting) if not self._alone else ():
            files = self.tiers.home.children(id.directory).objects
            if has_packs(id, files, own=True):
                return id
        return waiting[-1]

    def _copy(self, id: CheckpointId) -> bool:
        home, manifest = self.tiers.home, self.repo.manifest(id)
        there = home.children(id.directory).objects
        own = [name for name in self._of_this_node(id) if name.rpartition("/")[2] not in there]
        copy_packs(self.repo, manifest, dict.fromkeys(own), home)
        if not self._coordinates:
            return True
        files = home.children(id.directory).objects
        wanted = (name for name in packs_of(self.repo, manifest) if object_names.save_of(name) == id)
        if not all(name.rpartition("/")[2] in files for name in wanted):
            raise NotHereYet
        return True

    def _report_lag(self) -> None:
        if self._coordinates and self.tiers.fills_home:
            super()._report_lag()

    def _tidy(self, attempt: Attempt) -> None:
        for id in sorted(self.lacking, reverse=True):
            try:
                PlaceCopy(self.repo, self.tiers.home).bring_packs(self.repo.manifest(id))
                self.whole.add(id)
            except CheckpointNotFound:
                pass
            self.lacking = self.lacking - {id}
        for tier in self.tiers.tiers:
            if tier.waits and tier.store is not self.tiers.home:
                self._trim(tier)

    def _trim(self, tier: OpenTier) -> None:
        """Frees what a faster tier than the primary is not to keep, and a slower one has."""
        keep, capacity = tier.tier.keep, tier.tier.capacity
        if keep is None and capacity is None:
            return
        held = tier_copies.held(tier.store, self.run)
        going: list[CheckpointId] = []
        if keep is not None:
            facts = [one for one in gather_facts(self.repo, self.run) if one.id in held]
            going = sorted(verdict.id for verdict in keep.decide(facts) if not verdict.keep)
        slower = [one.store for one in self.tiers.slower(tier)]
        gone = tier_copies.free_copies(self.repo, tier.store, self._unneeded(held, going), slower)
        if capacity is not None:
            left = {id: files for id, files in held.items() if id not in gone}
            newest = max(left, default=None)
            more, _ = tier_copies.beyond(left, capacity, lambda id: id != newest, self._bases)
            freed = tier_copies.free_copies(self.repo, tier.store, self._unneeded(left, more), slower)
            still = {id: files for id, files in left.items() if id not in freed}
            _, over = tier_copies.beyond(still, capacity, lambda id: False)
            if over:
                self._report_over(tier, over)

    def _unneeded(self, held: tier_copies.Held, going: list[CheckpointId]) -> list[CheckpointId]:
        """Returns what of `going` nothing rests on that stays."""
        stays = [id for id, files in held.items() if id not in going and object_names.MANIFEST in files]
        needed = {base for id in stays for base in self._bases(id)}
        return [id for id in going if id not in needed]

    def _report_over(self, tier: OpenTier, over: int) -> None:
        if not self._said_over:
            self._said_over = True
            self.report(f"{tier.name} is over its capacity by {size(over)}, and no slower tier has what is there yet")


class TierWorker:
    """What a training does for the tiers of its repository. Does nothing for a repository in one place."""

    def __init__(
        self, repo: Repo, run: str, keep: KeepPolicy, *, emitter: Emitter, report: Report, group: RankGroup
    ) -> None:
        self._repo = repo
        self._run = run
        self._report = report
        self._tiers = tiers = tiers_of(repo.store)
        self._healing = BackgroundRounds("tenuto-tier-heal", self._heal)
        self._over_capacity = False
        self._bases = tier_copies.bases_in(repo)
        self.primary: PrimaryFill | None = None
        self.followers: list[FollowerFill] = []
        self.keep = keep
        """What the primary keeps."""
        if tiers is None:
            return
        if tiers.home_tier.tier.keep is not None:
            self.keep = tiers.home_tier.tier.keep
        made = partial(FollowerFill, repo, run, tiers, emitter=emitter, report=report)
        if group.coordinates:
            self.followers = [
                made(tier, keep=keep, relied_on=self._relied_on, elsewhere=self._behind(tier))
                for tier in tiers.tiers
                if not tier.waits and tier.store is not tiers.home
            ]
        trims = any(
            one.waits and (one.tier.keep or one.tier.capacity) for one in tiers.tiers if one.store != tiers.home
        )
        if (group.leads and (tiers.fills_home or trims)) or self.followers:
            self.primary = PrimaryFill(repo, run, tiers, emitter=emitter, report=report, group=group)

    @property
    def _fills(self) -> list[TierFill]:
        return [*([self.primary] if self.primary is not None else []), *self.followers]

    # -- before the run is claimed -------------------------------------------------------------------------------------

    def catch_up(self, wanted: int | str | None) -> None:
        """Brings the primary what another tier knows and it does not. `wanted`: what training is to resume from. A tier
        that does not answer is left out, with one line."""
        for fill in self.followers:
            takeover = tier_copies.Takeover(home_of(self._repo.store))
            work = partial(
                tier_copies.catch_up, self._repo, fill.tier.store, self._run, takeover=takeover, report=self._report
            )
            ids = self._asked(fill, work, takeover)
            if ids:
                self._report(
                    f"{self._repo.url} does not have the newest checkpoints of run {self._run}: takes over step "
                    f"{ids[0].step} from {fill.tier.name}, in the background"
                )
        silent = next((fill for fill in self.followers if fill.error), None)
        if (
            wanted is not None
            and silent is not None
            and all(latest(self._repo, run) is None for run in self._repo.runs())
        ):
            raise RepositoryError(
                f"there is no checkpoint at {self._repo.url}, and {silent.tier.name}, which may have its checkpoints, "
                f"cannot be asked: {silent.error}",
                subject=self._repo.url,
                hint="try again when it answers; to begin without it, leave that tier out",
            )
        if wanted is None or wanted == "latest" or not self.followers:
            return
        try:
            resolve(self._repo, self._run, wanted)
        except (CheckpointNotFound, RunNotFound):
            for fill in self.followers:
                takeover = tier_copies.Takeover(home_of(self._repo.store))
                bring = partial(tier_copies.bring, self._repo, fill.tier.store, self._run, wanted, takeover)
                id = self._asked(fill, bring, takeover)
                if id is not None:
                    self._report(f"{self._repo.url} takes over step {id.step} of run {self._run} from {fill.tier.name}")
                    return

    def announce(self, attempt: Attempt) -> None:
        """Shows each tier in reach who owns the run. Raises RunInUse if another job owns it there."""
        for fill in self.followers:
            self._asked(fill, partial(fill.announce, attempt.number))

    def _asked(
        self, fill: TierFill, work: Callable[[], Result], takeover: tier_copies.Takeover | None = None
    ) -> Result | None:
        """Returns what `work` returns; None where the tier does not answer, with one line. `takeover`: what `work` does
        in the primary, which then ends."""
        if fill.error:
            return None
        try:
            return within(ANSWER_S, f"asking {fill.tier.name}", work, subject=fill.tier.name)
        except (StoreError, DeadlineExceeded) as error:
            if takeover is not None:
                takeover.give_up()
            fill.error = in_words(error)
            self._report(f"{fill.tier.name} cannot be reached, training continues without it: {fill.error}")
            return None

    # -- training ------------------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        for fill in self._fills:
            fill.begin(attempt)
        self._begin_healing()

    def after_commit(self, id: CheckpointId, nbytes: int) -> None:
        for fill in self._fills:
            fill.committed(id, nbytes)
        self._begin_healing()

    def _begin_healing(self) -> None:
        places = places_of(self._repo.store)
        if places is not None and places.damaged:
            self._healing.wake()

    def _heal(self) -> None:
        places = places_of(self._repo.store)
        assert places is not None, "something of it is damaged"
        while places.damaged:
            name, store = places.damaged.pop()
            try:
                if tier_copies.heal(self._repo, name, store):
                    places.forget(name)
                    self._report(f"{name} in {store.url} was damaged, and is written again, from another copy")
            except CheckpointNotFound:
                continue
            except Exception as error:  # noqa: BLE001 - the whole copy is there, and training goes on
                self._report(f"{name} in {store.url} is damaged, and cannot be written again: {in_words(error)}")

    # -- what is kept --------------------------------------------------------------------------------------------------

    def copying(self) -> dict[CheckpointId, str]:
        """Returns what the primary must not lose yet, with the tier that lacks it."""
        return {id: name for fill in self._fills for id, name in fill.copying().items()}

    def policy(self) -> KeepPolicy:
        """Returns what the primary keeps now: `keep`, and within its capacity."""
        tiers = self._tiers
        capacity = tiers.home_tier.tier.capacity if tiers is not None else None
        if tiers is None or capacity is None:
            return self.keep
        held = tier_copies.held(tiers.home, self._run)
        going, over = tier_copies.beyond(held, capacity, self._behind(tiers.home_tier), self._bases)
        if over and not self._over_capacity:
            self._report(
                f"{tiers.home_tier.name} is over its capacity by {size(over)}, and no slower tier has what is there"
            )
        self._over_capacity = bool(over)
        return tier_copies.WithinCapacity(self.keep, set(going), capacity) if going else self.keep

    @property
    def limits(self) -> bool:
        """Whether the primary has a capacity."""
        return self._tiers is not None and self._tiers.home_tier.tier.capacity is not None

    def _relied_on(self) -> dict[CheckpointId, str] | None:
        """Returns the checkpoints whose data files only another tier has, as the primary takes them over; None where
        that is not known yet."""
        primary = self.primary
        if primary is None or not primary.compared:
            return None
        return dict.fromkeys(primary.lacking, primary.tier.name)

    def _behind(self, tier: OpenTier) -> Callable[[CheckpointId], bool]:
        """Returns what tells whether a slower tier than this one has a checkpoint whole, still."""
        slower = self._tiers.slower(tier) if self._tiers is not None else ()

        def behind(id: CheckpointId) -> bool:
            fills = (fill for fill in self._fills if fill.tier in slower and id in fill.whole)
            return any(tier_copies.lies_in(self._repo, fill.tier.store, id) for fill in fills)

        return behind

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, timeout: float) -> None:
        """Waits until each tier has what is due there, `timeout` seconds at most, and says what is left."""
        until_s = time.monotonic() + timeout
        left = [words for fill in self._fills if (words := fill.finish(until_s))]
        self._healing.join(max(until_s - time.monotonic(), 0.0))
        if left:
            self._report(f"{'; '.join(left)}: `{typed('tenuto', 'replicate', self._repo.url)}` brings it")
