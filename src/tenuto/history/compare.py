"""Compares checkpoints: their metrics, sizes and ages side by side, which is best, and which settings differ.

A setting is a plain value of the state (a learning rate, a seed, whatever a configuration held), or what a manifest
records of where it was saved: versions, settings of the framework, the commit of the code. What an optimizer keeps for
each parameter is state, and no setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Final

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read.chunk_reader import threads_for
from tenuto.errors import CheckpointNotFound
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Manifest
from tenuto.record import record
from tenuto.repo.best import (
    BestSelector,
    Measured,
    Mode,
    best_of,
    best_of_each,
    check_metric,
    measured_of,
    recorded_mode,
)
from tenuto.repo.lineage import resolve
from tenuto.repo.notes import notes
from tenuto.repo.repository import Repo
from tenuto.state.restore.rebuild import plain
from tenuto.state.tree import LEAVES, OWN, children, kind_of

SHORT: Final = 200
"""Characters of a text that counts as a setting."""
_RECORDED: Final = ("settings", "versions", "code")
"""What of a certificate is about the code and where it ran."""
_OPTIMIZER: Final = frozenset({"state", "param_groups"})
"""The entries of what an optimizer's `state_dict` returned."""


@record
class Compared:
    """One checkpoint of a comparison. settings: every plain value and recorded setting by path. best: the metrics by
    which it is the best of those compared."""

    id: CheckpointId
    bytes: int
    stored: int
    created: str
    ranks: int
    metrics: Mapping[str, float]
    settings: Mapping[str, Any] = field(repr=False)
    best: tuple[str, ...] = ()


@record
class Comparison:
    """Checkpoints side by side, in the order in which they were named. metrics: of any of them, those that decide
    first. differing: the settings that are not the same in all, in the order of the state."""

    where: str
    checkpoints: tuple[Compared, ...]
    metrics: tuple[str, ...]
    differing: tuple[str, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a flat dictionary for each checkpoint, for `pandas.DataFrame(…)`: metrics are `metrics.<name>`,
        settings that differ `settings.<path>`."""
        return [
            {
                "run": one.id.run,
                "attempt": one.id.attempt,
                "step": one.id.step,
                "created": one.created,
                "bytes": one.bytes,
                "stored": one.stored,
                "ranks": one.ranks,
                **{f"metrics.{name}": one.metrics.get(name) for name in self.metrics},
                **{f"settings.{path}": one.settings.get(path) for path in self.differing},
            }
            for one in self.checkpoints
        ]


def newest_of(repo: Repo, runs: Sequence[str], selector: BestSelector | None = None) -> list[CheckpointId]:
    """Returns what `latest` means in each run, or each run's best. Raises RunNotFound, CheckpointNotFound where a run
    has none, MetricNotLogged, and UsageError where nothing says in which direction the metric improves."""
    return [resolve(repo, run, selector or "latest") for run in runs]


def compare(repo: Repo, ids: Sequence[CheckpointId], selector: BestSelector | None = None) -> Comparison:
    """Compares checkpoints. `selector`: the metric to decide by; without one, those whose direction training has
    recorded. Reads each manifest whole, and its notes.

    Raises CheckpointNotFound, CorruptionError, and MetricNotLogged where none of them has the metric. Where nothing
    says in which direction it improves, none is the best.
    """
    ids = list(dict.fromkeys(ids))
    read: dict[CheckpointId, tuple[Manifest, Measured]] = {}

    def read_one(id: CheckpointId) -> None:
        manifest = repo.manifest(id)
        read[id] = manifest, measured_of(id, manifest, notes(repo, id))

    parallel_for(read_one, ids, threads_for(repo).read)
    measured = [read[id][1] for id in ids]
    best = _best(measured, selector)
    settings = {id: settings_of(read[id][0]) for id in ids}
    return Comparison(
        repo.url,
        tuple(
            Compared(
                id,
                read[id][0].bytes,
                read[id][0].stored_bytes,
                read[id][0].created,
                len(read[id][0].indexes),
                read[id][1].metrics,
                settings[id],
                tuple(metric for metric, which in best.items() if which == id),
            )
            for id in ids
        ),
        _metrics(measured, selector),
        _differing(list(settings.values())),
    )


def _best(measured: list[Measured], selector: BestSelector | None) -> Mapping[str, CheckpointId]:
    names = ", ".join(dict.fromkeys(one.id.run for one in measured))
    if selector is None:
        return best_of_each(measured, names) if len(measured) > 1 else {}  # one alone is compared with nothing
    check_metric(measured, selector.metric, names)
    if selector.mode is None and recorded_mode(measured, selector.metric) is None:
        return {}  # which is better nobody has said
    try:
        return {selector.metric: best_of(measured, selector, names)}
    except CheckpointNotFound:
        return {}  # it is nan in all of them


def _metrics(measured: list[Measured], selector: BestSelector | None) -> tuple[str, ...]:
    there = {name for one in measured for name in one.metrics}
    first = [] if selector is None else [selector.metric]
    modes: Mapping[str, Mode] = {name: mode for one in measured for name, mode in one.modes.items()}
    decided = sorted((there & modes.keys()) - set(first))
    return (*first, *decided, *sorted(there - set(first) - set(decided)))


def _differing(settings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    paths = dict.fromkeys(path for one in settings for path in one)
    absent = object()

    def values(path: str) -> set[str]:
        # 1, 1.0 and True are equal, and three settings.
        return {"" if (value := one.get(path, absent)) is absent else f"{type(value)}{value!r}" for one in settings}

    return tuple(path for path in paths if len(values(path)) > 1)


def settings_of(manifest: Manifest) -> dict[str, Any]:
    """Returns the plain values of a checkpoint's state by path, and behind them what its manifest records of where it
    was saved, below `settings`, `versions` and `code`."""
    found = dict(_plain(manifest.tree, ""))
    for part in _RECORDED:
        recorded = manifest.certificate.get(part)
        if isinstance(recorded, Mapping):
            found |= {f"{part}/{name}": value for name, value in recorded.items()}
    versions = {name: value for name, value in manifest.environment.items() if isinstance(value, str)}
    return found | {f"versions/{name}": value for name, value in versions.items()}


def _plain(node: Json, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the plain values at and below a node, but for those of single parameters in an optimizer."""
    kind = kind_of(node)
    if kind in LEAVES or kind == OWN:
        return
    if kind == "bypath":
        return
    below = children(node, path)
    names = {where.rpartition("/")[2] for where, _ in below}
    for where, child in below:
        if not (names >= _OPTIMIZER and where.endswith("/state")):
            yield from _plain(child, where)
    if below or kind in ("module", "random", "generator", "nprandom", "prngkey"):
        return
    value = plain(node)
    if not isinstance(value, str | bytes) or len(value) <= SHORT:
        yield path, value
