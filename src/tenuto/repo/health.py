"""The newest healthy checkpoint of a run, and how to come back to it."""

from __future__ import annotations

from itertools import islice
from typing import Final

from tenuto.errors import CheckpointNotFound, CorruptionError, StoreError, typed
from tenuto.model.ids import CheckpointId
from tenuto.repo.lineage import walk
from tenuto.repo.repository import Repo

MOST: Final = 200
"""How many checkpoints are looked at: one that is older helps nobody."""


def newest_healthy(repo: Repo, run: str, *, before: int | None = None) -> CheckpointId | None:
    """Returns the newest checkpoint on the walk, of those of steps below `before`, whose save has found nothing wrong,
    or has not looked; None if none of the newest is, or the store does not answer. Passes over manifests that cannot
    be read."""
    try:
        for id in islice(walk(repo, run), MOST):
            if before is not None and id.step >= before:
                continue
            try:
                health = repo.manifest(id).health
            except (CheckpointNotFound, CorruptionError):
                continue
            if health is None or health.healthy:
                return id
    except StoreError:
        pass  # nothing follows from it but what a warning adds
    return None


def way_back(url: str, last: CheckpointId | None) -> str:
    """Returns how to go back to the last healthy checkpoint, in words."""
    if last is None:
        return "no healthy checkpoint is there"
    return (
        f"the newest healthy one is step {last.step}: {typed('tenuto', 'rollback', url, last.step, '--run', last.run)}"
    )
