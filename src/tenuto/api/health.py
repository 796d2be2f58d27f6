"""What saves have found of the values of checkpoints, as their indexes and manifests have it."""

from __future__ import annotations

import math

from tenuto.model.health import Health
from tenuto.model.ids import CheckpointId
from tenuto.policy.spikes import Spike, spikes
from tenuto.record import record
from tenuto.repo.best import Measured, check_metric
from tenuto.repo.format.leaf_statistics import decode
from tenuto.repo.lineage import walk
from tenuto.repo.notes import known_metrics
from tenuto.repo.repository import Repo


@record
class LeafHealth:
    """What a save has found of one leaf, or of a part of it that one of several ranks has written.

    norm: the root of the sum of squares; min, max: the extremes; of finite values, None where there is none. changed:
    the fraction of bytes, in whole chunks, that differs from the save before; None where that is not known. sampled:
    the fraction of elements that norm, min and max are of; norm is scaled up to all. nonfinite: how many values are NaN
    or infinite, nan: how many of them NaN. usual: whether it had some when training began.
    """

    path: str
    rank: int = 0
    norm: float | None = None
    min: float | None = None
    max: float | None = None
    changed: float | None = None
    sampled: float = 0.0
    nonfinite: int = 0
    nan: int = 0
    usual: bool = False


@record
class CheckpointHealth:
    """The health of a checkpoint. health: of all of it, None where the save has not looked. leaves: of each leaf; empty
    where the save has not looked, and of a sealed checkpoint."""

    id: CheckpointId
    health: Health | None
    leaves: tuple[LeafHealth, ...]


def health(repo: Repo, id: CheckpointId) -> CheckpointHealth:
    """Reads the manifest and, of a checkpoint whose save has looked, the indexes."""
    manifest = repo.manifest(id)
    leaves: list[LeafHealth] = []
    for rank in range(len(manifest.indexes)) if manifest.health is not None else ():
        index = repo.index(manifest, rank)
        found = decode(index.statistics, len(index.specs), name=manifest.indexes[rank].name)
        if found is None:
            continue
        columns = (found.norm, found.min, found.max, found.changed, found.sampled)
        for row, (spec, *values) in enumerate(zip(index.specs, *(column.tolist() for column in columns), strict=True)):
            norm, low, high, changed = (None if math.isnan(value) else value for value in values[:4])
            bad, nan, usual = found.nonfinite.get(row, (0, 0, False))
            leaves.append(LeafHealth(spec.path, rank, norm, low, high, changed, values[4], bad, nan, usual))
    return CheckpointHealth(id, manifest.health, tuple(leaves))


def spikes_of(repo: Repo, run: str, metric: str) -> list[Spike]:
    """Does what `Repository.spikes` does."""
    line = [Measured(id, known_metrics(repo, id)) for id in walk(repo, run)]
    check_metric(line, metric, run)
    return spikes((one.id.step, one.metrics[metric]) for one in reversed(line) if metric in one.metrics)
