"""The best checkpoint of a run by a metric, as the selector `best:val_loss` names it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Final, Literal

from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    MetricNotLogged,
    ObjectNotFound,
    StoreError,
    UsageError,
    did_you_mean,
)
from tenuto.log_lines import log
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import Manifest, Note
from tenuto.record import record
from tenuto.repo.format.manifest import MAX_MANIFEST, Aborted, Summary, decode_manifest, decode_outline
from tenuto.repo.notes import judged_without, notes, unread, verification_of, with_notes
from tenuto.repo.repository import Repo
from tenuto.store.contract import is_unreadable

Mode = Literal["min", "max"]
BEST: Final = "best:"
MODES: Final = "modes"
TRAINERS_BEST: Final = "best_model_step"
"""Written where a trainer's best model is saved, so that a policy keeps that one."""
INTERNAL: Final = frozenset({TRAINERS_BEST})
"""Metrics that adapters write for themselves: no figures of the training, and shown only where all are."""
"""The part of a certificate that says in which direction each metric improves, as the policies of training have it."""
_EXAMPLE: Final = '"best:val_loss"'


@record
class BestSelector:
    """`best:METRIC` or `best:METRIC:min|max`. `mode`: None for the direction that training has recorded."""

    metric: str
    mode: Mode | None = None

    @classmethod
    def parse(cls, text: object) -> BestSelector | None:
        """Returns None for what selects in another way. Raises UsageError where no metric is named."""
        if not isinstance(text, str) or not text.startswith(BEST):
            return None
        from tenuto.policy.numbers import metric_name, min_or_max  # a load of the latest needs no policies

        name = text.removeprefix(BEST)
        metric, colon, mode = name.rpartition(":")
        if not colon or mode not in ("min", "max"):
            return cls(metric_name(name, _EXAMPLE))
        return cls(metric_name(metric, _EXAMPLE), min_or_max(mode, metric))


@record
class Measured:
    """A checkpoint as `best` judges it: its metrics, also those noted later, whether damage was noted, whether it is
    healthy, and the directions in which its training's policies say that metrics improve."""

    id: CheckpointId
    metrics: Mapping[str, float]
    suspect: bool = False
    healthy: bool = True
    modes: Mapping[str, Mode] = field(default_factory=dict)
    unread: str = ""
    """What of it cannot be read, in words: then it is not compared."""


def best(repo: Repo, run: str, selector: BestSelector) -> CheckpointId:
    """Returns the run's best checkpoint by a metric, also where training has left its line behind.

    Ties go to the newest. NaN is never best, nor is a checkpoint that is known to be damaged, or unhealthy. Raises
    CheckpointNotFound if the run has no checkpoint, MetricNotLogged, naming those that exist, if none has the metric,
    and UsageError if no mode is given, none is recorded and its name says none. Says on stderr what could not be
    compared.
    """
    from tenuto.policy.numbers import direction_of  # a load of the latest needs no policies

    found = measured(repo, run)
    left_out = not_compared(found, repo.url)
    if left_out:
        log(logging.WARNING, f"{BEST}{selector.metric}: {left_out}")
    won = best_of(found, selector, run)
    if selector.mode is None and not any(selector.metric in one.modes for one in found):
        mode = direction_of(selector.metric)
        log(logging.INFO, f"{BEST}{selector.metric}: the {'highest' if mode == 'max' else 'lowest'}, as its name says")
    return won


def not_compared(found: Sequence[Measured], where: str) -> str:
    """Returns which checkpoints cannot be compared, why, and what to do, in one line; empty where all can be."""
    return judged_without({one.id: one.unread for one in found if one.unread}, "not compared", where)


def best_of(found: list[Measured], selector: BestSelector, run: str) -> CheckpointId:
    """Returns the best of `found`, a run's checkpoints in any order; what of it cannot be read is left out. Raises like
    `best`."""
    from tenuto.policy.keep import Best, CheckpointFacts
    from tenuto.policy.numbers import direction_of

    metric = selector.metric
    compared = [one for one in found if not one.unread]
    newest_first = sorted(compared, key=lambda one: (one.id.attempt, one.id.step), reverse=True)
    if not newest_first:
        raise CheckpointNotFound(f"run {run!r} has no checkpoint that can be read", subject=run)
    check_metric(newest_first, metric, run)
    with_metric = [one for one in newest_first if metric in one.metrics]
    mode = selector.mode or recorded_mode(newest_first, metric) or direction_of(metric)
    if mode is None:
        raise UsageError(
            f"is the lowest {metric} the best or the highest? Neither its name says it, nor has a keep.best or an "
            "on.improve recorded it",
            subject=metric,
            hint=f"{BEST}{metric}:min, or {BEST}{metric}:max",
        )
    ranked = Best(1, metric, mode).ranked(
        [CheckpointFacts(one.id, metrics=one.metrics, healthy=one.healthy) for one in with_metric]
    )
    damaged = {one.id for one in with_metric if one.suspect}
    whole = [facts.id for facts in ranked if facts.id not in damaged]
    if whole:
        return whole[0]
    if ranked:
        why = "is a number only in damaged ones of"
    else:
        why = "is nan in" if all(one.healthy for one in with_metric) else "is nan, or what has it is unhealthy, in"
    raise CheckpointNotFound(
        f"run {run!r} has no best checkpoint: {metric} {why} all {len(with_metric)} that have it",
        subject=metric,
        hint="give a step, or another metric",
    )


def check_metric(found: list[Measured], metric: str, run: str) -> None:
    """Raises MetricNotLogged, naming those that exist, if no checkpoint has the metric."""
    if any(metric in one.metrics for one in found):
        return
    names = sorted({name for one in found for name in one.metrics})
    there = ", ".join(names) or "none"
    before = metric.rpartition(":")[0]
    raise MetricNotLogged(
        f"no checkpoint of run {run!r} has a metric {metric!r}; metrics that there are: {there}",
        subject=metric,
        hint=f"{BEST}{before}:min, or {BEST}{before}:max"
        if before in names
        else did_you_mean(metric, names) or f"training logs it by ckpt.log({metric}=…)",
    )


def best_of_each(found: list[Measured], run: str) -> dict[str, CheckpointId]:
    """Returns the best checkpoint by each metric whose direction training has recorded, for a listing to mark."""
    newest_first = sorted(found, key=lambda one: (one.id.attempt, one.id.step), reverse=True)
    marked = {}
    for metric in sorted({name for one in newest_first for name in one.modes}):
        with suppress(CheckpointNotFound, MetricNotLogged):  # nothing to mark
            marked[metric] = best_of(newest_first, BestSelector(metric), run)
    return marked


def recorded_mode(newest_first: list[Measured], metric: str) -> Mode | None:
    """Returns the direction in which the metric improves, as the newest checkpoint has it that says so."""
    return next((one.modes[metric] for one in newest_first if metric in one.modes), None)


def measured(repo: Repo, run: str) -> list[Measured]:
    """Returns the run's checkpoints, newest first, with their metrics, also what cannot be compared.

    Reads a manifest and the notes of each, and no tree.
    """
    run, found = run_key(run), []
    for number in reversed(repo.attempts(run)):
        for step in repo.steps(run, number):
            id = CheckpointId(run, number, step)
            manifest = outline(repo, id)
            if manifest is not None:
                found.append(measured_of(id, manifest, notes(repo, id)))
            elif repo.exists(id):
                found.append(Measured(id, {}, unread=f"{id.manifest} cannot be read"))
    return found


def measured_of(id: CheckpointId, manifest: Manifest, noted: Sequence[Note]) -> Measured:
    """Returns a checkpoint as `best` judges it, by its manifest and its notes, oldest first."""
    metrics, suspect = with_notes(manifest.metrics, noted), verification_of(noted) == "suspect"
    return Measured(id, metrics, suspect, is_healthy(manifest), modes_of(manifest), unread(id, noted))


def outline(repo: Repo, id: CheckpointId) -> Manifest | None:
    """Returns a checkpoint's manifest, its tree left out where that saves reading it; None for one that cannot be read
    or is gone."""
    try:
        data = repo.store.get(id.manifest, limit=MAX_MANIFEST)
        cut = decode_outline(data, id, repo.id)
        found = decode_manifest(data, id, repo.id) if cut is None else cut[0]
        if not isinstance(found, Aborted):
            repo.authenticate(found, data)
    except (ObjectNotFound, CorruptionError):
        return None
    except StoreError as error:
        if is_unreadable(error):
            return None
        raise
    return None if isinstance(found, Aborted) else found


def is_healthy(manifest: Manifest) -> bool:
    """Returns whether no leaf had become NaN or infinite, as far as the save has looked."""
    return manifest.health is None or manifest.health.healthy


def modes_of(manifest: Manifest | Summary) -> dict[str, Mode]:
    """Returns in which direction the policies of a checkpoint's training say that metrics improve."""
    recorded = manifest.certificate.get(MODES)
    pairs = recorded.items() if isinstance(recorded, Mapping) else ()
    return {name: mode for name, mode in pairs if mode in ("min", "max")}
