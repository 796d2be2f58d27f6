"""The states in memory that a group counts on: the newest of one process, the newest that several ranks all have.

A state can be resumed from where every rank has its image of it. So of its two slots no rank frees the one that all
have, nor a newer one that all may come to have (`ranks/common_step`).
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Final, Protocol

from tenuto.engine.group.group import JobGroup
from tenuto.engine.memory_tier.seal import Seal
from tenuto.engine.save.rank_group import RankGroup
from tenuto.model.ids import CheckpointId
from tenuto.ranks.common_step import NONE, CommonStep

if TYPE_CHECKING:
    from tenuto.engine.memory_tier.slot_pool import SlotPool

SETTLE_S: Final = 60.0
"""How long training waits, once, for a rank that does not report whether it has the step before; then steps are left
out of memory until it does."""


class CommonStates(Protocol):
    """The states of one run that a group has in memory, as one of its ranks knows them."""

    @property
    def agreed(self) -> bool:
        """Whether the group keeps states."""
        ...

    def agree(self, why_not: str, restored: int | None) -> str:
        """Agrees whether all ranks keep states, once the run is claimed; returns why they do not, empty where they do.
        `why_not`: why this rank cannot, if so. `restored`: the step that all have in memory already."""
        ...

    def newest(self, pool: SlotPool) -> Seal | None:
        """Returns the seal of the newest state that the group can resume from."""
        ...

    def make_way(self, pool: SlotPool) -> str:
        """Decides which image the next state may replace; returns why the group keeps none any more, if so. Raises
        DeadlineExceeded where it is not known in time which may go."""
        ...

    def save_id(self, id: CheckpointId) -> str:
        """Returns the identity of a state that goes into memory alone: equal on all ranks, and in no other group."""
        ...

    def sealed(self, step: int) -> None:
        """Notes that this rank has the state of `step`."""
        ...

    def missed(self, step: int) -> None:
        """Notes that this rank does not have the state of `step`, which was due."""
        ...

    def turn_off(self, why: str) -> None:
        """Notes that this rank keeps no states any more."""
        ...

    def close(self) -> None:
        """Ends at the end of training."""
        ...


def common_states(group: RankGroup) -> CommonStates:
    """Returns how `group` counts on states in memory."""
    return StatesOfRanks(group) if isinstance(group, JobGroup) else StatesOfOne()


class StatesOfOne:
    """One process counts on all that it has."""

    agreed = True

    def agree(self, why_not: str, restored: int | None) -> str:
        return ""

    def newest(self, pool: SlotPool) -> Seal | None:
        return pool.newest()

    def make_way(self, pool: SlotPool) -> str:
        return ""

    def save_id(self, id: CheckpointId) -> str:
        return uuid.uuid4().hex

    def sealed(self, step: int) -> None:
        """Does nothing: no other rank needs to know."""

    def missed(self, step: int) -> None:
        """Does nothing: no other rank needs to know."""

    def turn_off(self, why: str) -> None:
        """Does nothing: no other rank needs to know."""

    def close(self) -> None:
        """There is nothing to end."""


class StatesOfRanks:
    """Several ranks count on what all of them have."""

    def __init__(self, group: JobGroup) -> None:
        self.step: CommonStep | None = None
        """The step that all keep, once they have agreed to keep any."""
        self._agreement = group.agreement
        self._deadline_s = group.timeout_s

    @property
    def agreed(self) -> bool:
        return self.step is not None

    def agree(self, why_not: str, restored: int | None) -> str:
        with self._agreement.round("memory") as round:
            verdict = round.vote(not why_not, why_not, self._deadline_s, "keeping states in memory")
        if verdict:
            self.step = CommonStep(self._agreement.session, NONE if restored is None else restored)
            return ""
        rank, reason = min(verdict.reasons.items())
        return f"rank {rank} keeps none ({reason})"

    def newest(self, pool: SlotPool) -> Seal | None:
        if self.step is None:
            return None
        footers = [slot.footer for slot in pool.slots]
        return next((one for one in footers if one is not None and one.id.step == self.step.common), None)

    def make_way(self, pool: SlotPool) -> str:
        if self.step is None:
            return ""
        pool.await_sealed()  # by then the state before has been reported
        common = self.step.settle(min(SETTLE_S, self._deadline_s))
        if self.step.off:
            return self.step.off
        for slot in pool.slots:
            if slot.footer is not None and slot.footer.id.step > common:
                slot.footer = None  # no other rank will ever have it: it goes before the one that all have
        return ""

    def save_id(self, id: CheckpointId) -> str:
        return hashlib.sha256(f"{self._agreement.session.id} memory {id}".encode()).hexdigest()[:32]

    def sealed(self, step: int) -> None:
        if self.step is not None:
            self.step.sealed(step)

    def missed(self, step: int) -> None:
        if self.step is not None:
            self.step.missed(step)

    def turn_off(self, why: str) -> None:
        if self.step is not None:
            self.step.turn_off(why)

    def close(self) -> None:
        if self.step is not None:
            self.step.close()
