"""What follows a training from outside, if anything does, and what was proven of it that way."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from tenuto.model.records import Json
from tenuto.repo.format import object_names
from tenuto.repo.repository import Repo
from tenuto.store.contract import Where
from tenuto.store.registry import CERTIFY_VARIABLE
from tenuto.training.arguments import Settings
from tenuto.training.snapshot import Snapshots

if TYPE_CHECKING:
    from tenuto.training.training_session import TrainingSession


class SessionProbe(Protocol):
    """Follows one training from outside. `tenuto certify` has the only one."""

    def replace(self, where: Where, settings: Settings) -> tuple[Where, Settings]:
        """Returns the store and the settings that the session uses in place of those that it was given."""
        ...

    def attach(self, session: TrainingSession, snapshots: Snapshots, covered: tuple[Any, ...]) -> None:
        """Begins to follow `session`; `covered`: its state and its data."""
        ...

    def restored(self) -> None:
        """Restoring is done, also where there was nothing to restore."""
        ...

    def batch_given(self, batch: Any) -> None:
        """Training gets a batch."""
        ...

    def completed(self) -> None:
        """A step is completed, or an epoch; nothing is saved for it yet."""
        ...


def session_probe(rank: int, world_size: int) -> SessionProbe | None:
    """Returns the probe for a rank of this process's job; None outside `tenuto certify`."""
    if not os.environ.get(CERTIFY_VARIABLE):
        return None
    from tenuto.certify.probe import certify_probe  # of no use to any other training

    return certify_probe(rank, world_size)


def known_proof(repo: Repo, snapshots: Snapshots) -> Mapping[str, Json] | None:
    """Returns what `tenuto certify` has proven of this process's script, if anything. One listing where it has proven
    nothing in this repository."""
    if not repo.had(object_names.PROOFS):
        return None
    from tenuto.certify.proof import proof_of_running  # of no use to most trainings

    return proof_of_running(repo, snapshots.conditions())
