"""States that several ranks keep in memory: at the same steps on all of them, all or none of a state."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from holdfast.api.company import Company
from holdfast.api.remembering import Remembering
from holdfast.engine.joint.memory import JointTier
from holdfast.engine.memory import MemoryTier
from holdfast.repo.attempts import Attempt
from holdfast.repo.repository import Repo
from holdfast.state.contract import Flattened


class RememberingTogether(Remembering):
    """As Remembering, on every rank of a job. A state that is due is never left out for being busy, for then it would
    be on one rank and not on another; and saves to the store are no states in memory: they are shares of one."""

    replaces_torn = False

    def __init__(self, *words: Any, company: Company, **more: Any) -> None:
        self._company = company
        super().__init__(*words, **{**more, "on_busy": "wait", "in_flight": 1})

    def _make_tier(self, repo: Repo, run: str, **more: Any) -> MemoryTier:
        self._joint = JointTier(repo, run, self._company.agreement, deadline_s=self._company.timeout_s, **more)
        return self._joint

    @property
    def written_from(self) -> MemoryTier | None:
        return None

    def begin(self, attempt: Attempt, flattened: Flattened, step: int, since_s: float) -> None:
        """As Remembering; called by all ranks. Raises RankFailed, RanksMissing and RankStoreLost."""
        adopted = self._joint.adopted
        super().begin(attempt, flattened, step, since_s)
        self._joint.agree(adopted)

    def saved(self, step: int) -> bool:
        self.tier.saved_s = time.monotonic()
        return False


def remembering(company: Company | None) -> Callable[..., Remembering]:
    """What keeps states in memory: of one process, or of one of several ranks."""
    return Remembering if company is None else partial(RememberingTogether, company=company)
