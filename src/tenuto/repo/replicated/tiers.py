"""Tiers: the places of a repository from the fastest to the slowest, and what each of them is to hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tenuto.errors import UsageError
from tenuto.events import TierLag
from tenuto.model.sizes import parse_bytes, parse_rate
from tenuto.record import record
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.store.contract import Store, Where
from tenuto.store.registry import open_store
from tenuto.store.wrappers.throttle import ThrottledStore

if TYPE_CHECKING:  # a load needs no policies
    from tenuto.policy.keep import KeepPolicy
    from tenuto.policy.save import SavePolicy


ENCODE_ALL: Final = (
    "encoding= of the Checkpointer is for all tiers; `tenuto repack WHERE --encoding small` makes a run small that has "
    "ended"
)
"""What to do instead of giving a tier an encoding of its own."""


class Tier:
    """One place of a repository in several (`Tiers`), and what it holds.

    - `where`: a directory, a URL or a store.
    - `name`: what messages call it; by default where it is.
    - `per_node`: each node has a directory of its own under this name, with the data files that its ranks write.
    - `save`: which checkpoints it gets, by step or time (`every(steps=1000) | every(minutes=60)`). By default all.
    - `keep`: what it keeps. By default what the run keeps.
    - `capacity`: bytes, or text such as "500GB". Beyond it the oldest checkpoints that a slower tier has whole go.
    - `wait`: whether a save counts as committed only when this tier has its data files too. By default only the first
      tier is waited for; the others are filled in the background.
    - `bandwidth`: how many bytes per second are written to it at most, such as "200MB/s".

    Every tier stores a checkpoint as it was saved: `encoding=` is an argument of the Checkpointer.
    """

    def __init__(
        self,
        where: Where,
        *,
        name: str = "",
        per_node: bool = False,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        capacity: int | str | None = None,
        wait: bool | None = None,
        bandwidth: int | str | None = None,
        encoding: object = None,
    ) -> None:
        self.where = where
        self.name = name
        self.per_node = per_node
        self.save = _cadence(save)
        self.keep = _retention(keep)
        self.capacity = None if capacity is None else parse_bytes(capacity, "capacity")
        self.wait = wait
        self.bandwidth = None if bandwidth is None else parse_rate(bandwidth, "bandwidth")
        _refuse_encoding(encoding)

    def __repr__(self) -> str:
        return f"Tier({self.name or self.where!r})"


@record(eq=False)
class OpenTier:
    """A tier with its store. `waits`: saves wait for it."""

    tier: Tier
    store: Store
    waits: bool

    @property
    def name(self) -> str:
        return self.tier.name or self.store.url


class Tiers(ReplicatedStore):
    """The locations of one repository, fastest first, each with what it holds: see Tier.

    The first tier that is not `per_node` is the primary: runs are claimed and checkpoints are committed there. A save
    counts once `copies` of the tiers with `wait=True` (default: all of them) have its data files. The other tiers are
    filled in the background; training never waits for them, and each keeps what its own `keep` says. A restore takes
    what it needs from the fastest tier that has it undamaged. Where the primary is lost, training resumes from the
    newest checkpoint that another tier has.
    """

    def __init__(self, *tiers: Tier, copies: int | None = None, node: str = "") -> None:
        wrong = next((tier for tier in tiers if not isinstance(tier, Tier)), None)
        if wrong is not None or not tiers:
            raise UsageError(
                f"Tiers takes one Tier for each place, not {wrong!r}" if tiers else "Tiers() names no place",
                subject="Tiers",
                hint='Tiers(Tier("/fast"), Tier("s3://bucket/slow"))',
            )
        opened = [_opened(tier, first=not number) for number, tier in enumerate(tiers)]
        _check_order(opened)
        home = next(one for one in opened if not one.tier.per_node)
        packs_in = [one.store for one in opened if one.waits]
        self._check_waits(packs_in, copies)
        super().__init__(
            home.store,
            packs_in,
            len(packs_in) if copies is None else copies,
            per_node=opened[0].tier.per_node,
            node=node,
            followers=[one.store for one in opened if not one.waits and one is not home],
        )
        self.tiers = tuple(opened)
        self.fills_home = not home.waits
        """Whether the home gets data files in the background."""
        self.lags: dict[str, TierLag] = {}

    @staticmethod
    def _check_waits(packs_in: Sequence[Store], copies: int | None) -> None:
        if not packs_in:
            raise UsageError(
                "no tier has wait=True: a save would be nowhere when it counts as committed",
                subject="wait",
                hint="leave wait= out: the first tier is waited for",
            )

    def lag(self) -> tuple[TierLag, ...]:
        """Returns for each tier that is filled in the background, as far as this process fills it, its newest whole
        checkpoint, and how far it is behind."""
        return tuple(self.lags.values())

    @property
    def home_tier(self) -> OpenTier:
        return next(one for one in self.tiers if one.store is self.home)

    def slower(self, tier: OpenTier) -> tuple[OpenTier, ...]:
        """Returns the tiers behind `tier`."""
        return self.tiers[self.tiers.index(tier) + 1 :]


def _opened(tier: Tier, *, first: bool) -> OpenTier:
    store = open_store(tier.where)
    if isinstance(store, ReplicatedStore):
        raise UsageError(
            f"{store.url} already has several locations, and cannot be one of another repository",
            subject=store.url,
            hint="give each location as a Tier of its own",
        )
    if tier.bandwidth is not None:
        store = ThrottledStore(store, tier.bandwidth)
    return OpenTier(tier, store, first if tier.wait is None else tier.wait)


def _check_order(opened: Sequence[OpenTier]) -> None:
    urls = [one.store.url for one in opened]
    twice = next((url for url in urls if urls.count(url) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} is given as two tiers", subject=twice, hint="give each place once")
    per_node = [one for one in opened if one.tier.per_node]
    if len(per_node) == len(opened):
        raise UsageError(
            "every tier is per_node: checkpoints are committed in a place that all ranks share",
            subject="Tiers",
            hint='Tiers(Tier("/nvme/run", per_node=True), Tier("/shared/run"))',
        )
    if per_node and (len(per_node) > 1 or per_node[0] is not opened[0] or not per_node[0].waits):
        raise UsageError(
            "one tier can be per_node: the first, and saves wait for it",
            subject="per_node",
            hint='Tiers(Tier("/nvme/run", per_node=True), Tier("/shared/run"))',
        )


def _retention(keep: KeepPolicy | None) -> KeepPolicy | None:
    if keep is None:
        return None
    from tenuto.policy.keep import KeepPolicy

    if not isinstance(keep, KeepPolicy):
        raise UsageError(f"keep={keep!r} does not say what to keep", subject="keep", hint="keep=keep.latest(3)")
    return keep


def _refuse_encoding(encoding: object) -> None:
    if encoding is not None:
        raise UsageError(
            f"encoding={encoding!r} of a tier: a tier stores each checkpoint as the primary does",
            subject="encoding",
            hint=ENCODE_ALL,
        )


def _cadence(save: SavePolicy | None) -> SavePolicy | None:
    if save is None:
        return None
    from tenuto.policy.save import EveryOptimum, EveryStall, SavePolicy, parts_of

    if not isinstance(save, SavePolicy):
        raise UsageError(f"save={save!r} does not say when", subject="save", hint="save=every(steps=1000)")
    if save.metrics() or any(isinstance(part, EveryStall | EveryOptimum) for part in parts_of(save)):
        raise UsageError(
            f"save={save!r} of a tier depends on more than step and time",
            subject="save",
            hint="save=every(steps=1000) | every(minutes=60), and keep=keep.best(...) of that tier",
        )
    return save
