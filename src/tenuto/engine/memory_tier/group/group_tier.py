"""The memory tier of one of several ranks: each seals by itself all that it holds, and all keep one step in common.

A state can be gone on from where every rank has its image of it. So of its two slots no rank lets go of the one that
all have, nor of a newer one that all may come to have (`ranks/kept`). Saves to the store have memory of their own: what
a rank writes there is only its share.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from tenuto.engine.group.group import JobGroup
from tenuto.engine.group.rank_group import RankGroup
from tenuto.engine.memory_tier.cadence import MemoryCadence
from tenuto.engine.memory_tier.seal import Seal
from tenuto.engine.memory_tier.tier import MemorySlot, MemoryTier
from tenuto.engine.staging.plan import SavePlan
from tenuto.model.ids import CheckpointId
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.common_step import NONE, CommonStep
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo
from tenuto.state.contract import Flattened

SETTLE_S: Final = 60.0
"""At most so long training is held, once, for a rank that does not say whether it has the step before; then steps are
left out of memory until it does."""


class GroupMemoryTier(MemoryTier):
    """The slots of one run and rank, one of several. As MemoryTier, and `agree` once the run is claimed on all."""

    def __init__(self, repo: Repo, run: str, agreement: Agreement, *, deadline_s: float, **more: Any) -> None:
        super().__init__(repo, run, rank=agreement.rank, ranks=agreement.world_size, **more)
        self._agreement = agreement
        self._deadline_s = deadline_s
        self._kept: CommonStep | None = None

    @property
    def on(self) -> bool:
        return super().on and self._kept is not None

    @property
    def sealed(self) -> Seal | None:
        """The newest image that all ranks have."""
        halves, kept = self._halves, self._kept
        if halves is None or kept is None:
            return None
        footers = [half.footer for half in halves.all]
        return next((one for one in footers if one is not None and one.id.step == kept.common), None)

    @property
    def held(self) -> str:
        """Why the slots are not this process's; empty where they are."""
        return "" if self._halves is not None else self.off or self._why_not_held

    @property
    def restored_from(self) -> int | None:
        """The step of the image that training goes on from."""
        footers = [footer for half, footer in self._sealed() if half is self._adopted]
        return footers[0].id.step if footers else None

    def mine(self) -> Sequence[tuple[MemorySlot, Seal]]:
        """What this rank has sealed, before the claim."""
        return list(self._sealed())

    def agree(self, adopted: int | None) -> None:
        """Called by all ranks once the run is claimed: whether they keep states, which all do, or none. `adopted`: the
        step that all have in memory already."""
        why = "" if super().on else self.off or "it has no slots"
        with self._agreement.round("memory") as round:
            verdict = round.vote(not why, why, self._deadline_s, "keeping states in memory")
        if verdict:
            self._kept = CommonStep(self._agreement.session, NONE if adopted is None else adopted)
            return
        rank, said = min(verdict.reasons.items())
        self.turn_off(f"rank {rank} keeps none ({said})")

    def save_id(self, id: CheckpointId) -> str:
        """Equal on all ranks, and in no other job."""
        told = f"{self._agreement.session.id} memory {id}"
        return hashlib.sha256(told.encode()).hexdigest()[:32]

    def begin(self, flattened: Flattened, *, writing: bool) -> SavePlan | None:
        """As MemoryTier; DeadlineExceeded also where it is not known in time which of the two images may go."""
        kept, halves = self._kept, self._halves
        if kept is None or halves is None or self.off:
            return None
        halves.await_sealed()  # what was taken before is told of by then
        common = kept.settle(min(SETTLE_S, self._deadline_s))
        if kept.off:
            self.turn_off(kept.off)
            return None
        for half in halves.all:
            if half.footer is not None and half.footer.id.step > common:
                half.footer = None  # no other rank will ever have it: it goes before the one that all have
        return super().begin(flattened, writing=writing)

    def kept(self, id: CheckpointId) -> None:
        if self._kept is not None:
            self._kept.sealed(id.step)

    def missed(self, id: CheckpointId) -> None:
        if self._kept is not None:
            self._kept.missed(id.step)

    def turn_off(self, why: str) -> None:
        if self._kept is not None and not self.off:
            self._kept.turn_off(why)
        super().turn_off(why)

    def close(self, durable: CheckpointId | None) -> None:
        if self._kept is not None:
            self._kept.close()
        super().close(durable)


# --------------------------------------------------------------------------------------------------
# States that several ranks keep in memory: at the same steps on all of them, all or none of a state.


class GroupMemoryCadence(MemoryCadence):
    """As Remembering, on every rank of a job. A state that is due is never left out for being busy, for then it would
    be on one rank and not on another; and saves to the store are no states in memory: they are shares of one."""

    replaces_torn = False

    def __init__(self, *words: Any, group: JobGroup, **more: Any) -> None:
        self._group = group
        super().__init__(*words, **{**more, "on_busy": "wait", "in_flight": 1})

    def _make_tier(self, repo: Repo, run: str, **more: Any) -> MemoryTier:
        self._joint = GroupMemoryTier(repo, run, self._group.agreement, deadline_s=self._group.timeout_s, **more)
        return self._joint

    @property
    def written_from(self) -> MemoryTier | None:
        return None

    def begin(self, attempt: Attempt, flattened: Flattened, step: int, since_s: float) -> None:
        """As Remembering; called by all ranks. Raises RankFailed, RanksMissing and RankStoreLost."""
        adopted = self._joint.restored_from
        super().begin(attempt, flattened, step, since_s)
        self._joint.agree(adopted)

    def saved(self, step: int) -> bool:
        self.tier.saved_s = time.monotonic()
        return False


def memory_cadence(group: RankGroup) -> Callable[..., MemoryCadence]:
    """What keeps states in memory: of one process, or of one of several ranks."""
    return partial(GroupMemoryCadence, group=group) if isinstance(group, JobGroup) else MemoryCadence
