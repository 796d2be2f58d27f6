"""Checkpoints of other tools become checkpoints of a run: planned, written, compared, and only then visible.

All of a plan's checkpoints are written first, each with everything but its manifest; what was written is read back and
compared with its source. Then the manifests are put, in the order of steps. What fails before that is taken back; what
a killed process leaves is an unfinished save like any other, and freed by the next claim of the run or by gc.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import numpy as np

from tenuto.crashpoints import crashpoint
from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.engine.save.held_commit import HeldCommit
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.errors import (
    CorruptionError,
    MissingExtra,
    NotARepository,
    SaveFailed,
    StateError,
    UsageError,
    in_words,
    typed,
)
from tenuto.events import Emitter, Warned
from tenuto.formats.contract import BLOCK_BYTES, Reader, Tensor, leaves
from tenuto.formats.convert import Renaming, converted, converts, overflowed, paths, renamed
from tenuto.formats.series import Found, find, passed_over
from tenuto.model.ids import CheckpointId, check_run
from tenuto.model.records import Manifest
from tenuto.record import record
from tenuto.repo.keys import unlock
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.claim import Attempt, claim_newest
from tenuto.repo.replicated.places import tiers_of
from tenuto.repo.repository import Repo
from tenuto.sharding.slices import Region
from tenuto.state.contract import Buffer, Flattened
from tenuto.state.encode.flattener import flatten
from tenuto.state.numpy_arrays import as_bytes
from tenuto.store.contract import Where
from tenuto.store.registry import open_store, redirected
from tenuto.training.snapshot import check_platform, environment

Check = Literal["samples", "all"]
IMPORTED: Final = "imported"
"""In a manifest's environment: what the checkpoint was made from."""
SAMPLED_TENSORS: Final = 64
SAMPLE_BYTES: Final = 16 << 10
_SHOWN: Final = 3


@record
class Rules:
    """What becomes of a foreign checkpoint. rename: of the names of its tensors. dtype: what floating-point tensors are
    rounded to. entry: the entry of the state that takes it; None: "model" for bare weights, none for a state."""

    rename: Renaming = field(default_factory=Renaming)
    dtype: str | None = None
    entry: str | None = None


@record
class Planned:
    """A foreign checkpoint that becomes one of ours. renames: a few names, before and after. converted: how many
    tensors are rounded. remarks: what has no representation."""

    found: Found
    step: int
    tensors: int
    bytes: int
    metrics: Mapping[str, float]
    renamed: int
    renames: Sequence[tuple[str, str]]
    converted: int
    remarks: Sequence[str]


@record
class MigrationPlan:
    """What `execute` will do. creates: whether there is no repository yet. skipped: what is there already, or twice.
    failed: what cannot be read, and why."""

    source: Path
    where: str
    run: str
    rules: Rules
    creates: bool
    checkpoints: Sequence[Planned]
    skipped: Sequence[tuple[Path, str]]
    failed: Sequence[tuple[Path, str]]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.checkpoints)


@record
class Imported:
    """A checkpoint that was made. compared: bytes of it that were read back and compared with the source."""

    id: CheckpointId
    source: Path
    bytes: int
    leaves: int
    content: str
    compared: int


@record
class MigrationReport:
    plan: MigrationPlan
    imported: Sequence[Imported]
    seconds: float


# -- the plan --------------------------------------------------------------------------------------------------------


def plan_migration(
    source: Path,
    where: Where,
    *,
    run: str = "main",
    step: int | None = None,
    format: str | None = None,
    rules: Rules | None = None,
    single: bool = False,
) -> MigrationPlan:
    """Returns what becomes of the foreign checkpoint at `source`, or of those in it. Reads no tensor, writes nothing.

    step: of a single one that tells none; None: the one after `latest`. single: several are refused.
    Raises UsageError for rules that meet nothing or make two names one, for steps that are not above `latest`, and
    where nothing is found; where a single one cannot be read, what its reader raises.
    """
    rules = rules or Rules()
    check_run(run)
    found = find(source, format)
    if single and len(found) > 1:
        raise UsageError(
            f"{source} has {len(found)} checkpoints: {', '.join(one.path.name for one in found[:_SHOWN])}, …",
            subject=str(source),
            hint=f"name one of them, or take all of them: {typed('tenuto', 'migrate', source, where)}",
        )
    if step is not None and len(found) > 1:
        raise UsageError("--step is for a single checkpoint", subject="--step", hint="leave it out")
    try:
        repo: Repo | None = Repo.open(open_store(redirected(where)))
    except NotARepository:
        repo = None
    newest = None if repo is None or run not in repo.runs() else latest(repo, run)
    planned: list[Planned] = []
    failed: list[tuple[Path, str]] = []
    unknown = "it is not of a known format" if format is None else f"it is not of the format {format}"
    skipped: list[tuple[Path, str]] = [(path, unknown) for path in passed_over(source, found)]
    for one in found:
        try:
            planned.append(_planned(one, rules, step, newest if len(found) == 1 else None, alone=len(found) == 1))
        except (CorruptionError, StateError, MissingExtra) as error:
            if len(found) == 1:
                raise
            failed.append((one.path, in_words(error)))
    by_step: dict[int, Planned] = {}
    there = {} if repo is None or newest is None else imported_before(repo, run)
    for new in sorted(planned, key=lambda one: (one.step, one.found.number is None)):
        first = by_step.setdefault(new.step, new)
        if first is not new:
            skipped.append((new.found.path, f"step {new.step} is {first.found.path.name} already"))
        elif there.get(new.step) == _origin(new):
            skipped.append((new.found.path, f"step {new.step} of run {run} was made from it before"))
            del by_step[new.step]
    low = next((one for one in by_step.values() if newest is not None and one.step <= newest.step), None)
    if low is not None and newest is not None:
        raise UsageError(
            f"run {run!r} is at step {newest.step} already, and {low.found.path.name} is step {low.step}",
            subject=run,
            hint="--run OTHER makes a run of its own",
        )
    url = open_store(redirected(where)).url if repo is None else repo.url
    return MigrationPlan(source, url, run, rules, repo is None, tuple(by_step.values()), skipped, failed)


def _planned(found: Found, rules: Rules, step: int | None, newest: CheckpointId | None, *, alone: bool) -> Planned:
    with found.format.read(found.path) as reader:
        number = step if step is not None else reader.step if reader.step is not None else found.number
        if number is None:
            if not alone:
                raise StateError(
                    f"{found.path.name} tells no step",
                    subject=str(found.path),
                    hint=f"import it by itself: {typed('tenuto', 'import', found.path)} --step N",
                )
            number = 0 if newest is None else newest.step + 1
        names = list(reader.tree) if reader.kind == "weights" else paths(reader.tree)
        changed = [(name, new) for name in names if (new := rules.rename(name)) != name]
        flattened = flatten(state_of(reader, rules))  # whatever has no representation is told of now
        to = rules.dtype
        rounded = 0 if to is None else sum(converts(tensor, to) for _, tensor in leaves(reader.tree))
        nbytes = sum(spec.nbytes for spec in flattened.specs)
        return Planned(
            found,
            number,
            len(flattened.specs),
            nbytes,
            dict(reader.metrics),
            len(changed),
            changed[:_SHOWN],
            rounded,
            tuple(reader.remarks),
        )


def state_of(reader: Reader, rules: Rules) -> Any:
    """Returns the state that a foreign checkpoint becomes. Raises UsageError for rules that do not fit its names."""
    tree, flat = reader.tree, reader.kind == "weights"
    if rules.rename:
        rules.rename.check(list(tree) if flat else paths(tree))
        tree = renamed(tree, rules.rename, flat=flat)
    if rules.dtype is not None:
        tree = converted(tree, rules.dtype)
    if flat or rules.entry is not None or not isinstance(tree, Mapping):
        return {rules.entry or ("model" if flat else "state"): tree}
    return tree


def _origin(planned: Planned) -> dict[str, Any]:
    return {"format": planned.found.format.name, "name": planned.found.path.name, "bytes": planned.bytes}


def imported_before(repo: Repo, run: str) -> dict[int, Any]:
    """Returns what the checkpoints of a run were imported from, by step."""
    found = {}
    for attempt in repo.attempts(run):
        for step in repo.committed(run, attempt):
            try:
                found[step] = repo.manifest(CheckpointId(run, attempt, step)).environment.get(IMPORTED)
            except CorruptionError:
                continue  # a damaged one is what `verify` tells of; its step is not free
    return found


# -- execution -------------------------------------------------------------------------------------------------------


def execute(
    plan: MigrationPlan,
    where: Where,
    *,
    check: Check = "samples",
    skip_damaged: bool = False,
    emitter: Emitter | None = None,
) -> MigrationReport:
    """Makes the planned checkpoints, all or none.

    check: what is read back and compared with the source: some of each of many tensors, or every byte.
    skip_damaged: what the plan could not read is left out; else UsageError.
    Raises SaveFailed where something else comes back than was read; RunInUse, and errors of the store.
    """
    check_platform()
    emit = emitter or Emitter()
    if plan.failed and not skip_damaged:
        raise UsageError(
            f"{plan.failed[0][0].name} cannot be read: {plan.failed[0][1]}",
            subject=str(plan.failed[0][0]),
            hint="--skip-damaged leaves out what cannot be read",
        )
    began = time.perf_counter()
    if not plan.checkpoints:
        return MigrationReport(plan, (), 0.0)
    repo = Repo.create_or_open(open_store(redirected(where)), once=True)
    unlock(repo, writing=True)
    newest = latest(repo, plan.run)
    if newest is not None and newest.step >= plan.checkpoints[0].step:
        raise UsageError(
            f"run {plan.run!r} has come to step {newest.step} since the plan was made",
            subject=plan.run,
            hint="plan again",
        )
    attempt = claim_newest(repo, plan.run, newest, newest, again=lambda: (newest, newest))
    protocol = HeldCommit(repo, visible="a migrated checkpoint is visible")
    imported: list[Imported] = []
    try:
        for one in plan.checkpoints:
            imported.append(_one(repo, attempt, protocol, one, plan.rules, check=check, emitter=emit))
        crashpoint("migrated checkpoints durable, none visible")
        protocol.put()
        attempt.committed(plan.checkpoints[-1].step)
    finally:
        try:
            protocol.take_back(lambda message: emit.emit(Warned(message, plan.run)), by="the migration failed")
        finally:
            attempt.release()
    if tiers_of(repo.store) is not None:
        from tenuto.maintenance.tier_copies import fill_now

        for made in imported:
            fill_now(repo, made.id, lambda message: emit.emit(Warned(message, plan.run)))
    return MigrationReport(plan, imported, time.perf_counter() - began)


def _one(
    repo: Repo,
    attempt: Attempt,
    protocol: HeldCommit,
    planned: Planned,
    rules: Rules,
    *,
    check: Check,
    emitter: Emitter,
) -> Imported:
    with planned.found.format.read(planned.found.path) as reader:
        flattened = flatten(state_of(reader, rules))
        saver = Saver(repo, attempt.run, emitter=emitter, lasting=False, protocol=protocol)  # a window serves one save
        saver.attempt = attempt
        try:
            about = ManifestDetails(
                parent=attempt.parent,
                metrics=planned.metrics,
                progress={"step": planned.step},
                environment={**environment(), IMPORTED: _origin(planned)},
                reason=f"imported from {planned.found.format.name}",
            )
            saver.save(flattened, planned.step, wait=True, about=about).wait()
        finally:
            saver.close()
        held = protocol.held[-1]
        if lost := overflowed(flattened.sources, [spec.path for spec in flattened.specs]):
            names = ", ".join(lost[:_SHOWN]) + (f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else "")
            what = f"{rules.dtype} is too short for values that have become infinite in {names}"
            emitter.emit(Warned(what, str(held.manifest.id)))
        compared = _compare(repo, held.manifest, flattened, check)
        made = held.manifest
        return Imported(made.id, planned.found.path, made.bytes, made.leaves, made.content, compared)


def _compare(repo: Repo, manifest: Manifest, flattened: Flattened, check: Check) -> int:
    """Reads back what was written, verified by its digests, and compares it with the source, which is read again.
    Returns how many bytes that were. Raises SaveFailed where they differ."""
    rows = range(len(flattened.specs))
    chosen = Random(manifest.content).sample(rows, min(len(rows), SAMPLED_TENSORS)) if check == "samples" else rows
    compared = 0
    table = repo.table(manifest)
    reader = LazyReader(repo, manifest.id, table)
    try:
        for row in chosen:
            spec = flattened.specs[row]
            for start, stop in _ranges(spec.nbytes, spec.itemsize, check):
                ours, theirs = np.empty(stop - start, np.uint8), np.empty(stop - start, np.uint8)
                items = (stop - start) // spec.itemsize
                region = Region(start // spec.itemsize, (items,), (1,), (False,), (items,))
                reader.read(row, spec.path, region, spec.itemsize, ours)
                _source(flattened.sources[row], theirs, start)
                if not np.array_equal(ours, theirs):
                    raise SaveFailed(
                        f"{spec.path} of {manifest.id} is not what its source holds, somewhere in its bytes {start} to "
                        f"{stop}",
                        subject=spec.path,
                        hint="was the source written to meanwhile? Nothing has become visible",
                    )
                compared += stop - start
    finally:
        reader.close()
    return compared


def _ranges(nbytes: int, itemsize: int, check: Check) -> Iterator[tuple[int, int]]:
    """Yields ranges of a tensor's bytes: all of it, or its beginning, its middle and its end."""
    if not nbytes:
        return
    step = max((BLOCK_BYTES if check == "all" else SAMPLE_BYTES) // itemsize, 1) * itemsize
    if check == "all" or nbytes <= 4 * step:
        yield from ((start, min(start + step, nbytes)) for start in range(0, nbytes, step))
        return
    middle = nbytes // 2 // itemsize * itemsize
    yield from ((start, start + step) for start in (0, middle, nbytes - step))


def _source(source: Any, out: Buffer, start: int) -> None:
    if isinstance(source, Tensor):
        source.read_into(out, start)
        return
    data = as_bytes(np.ascontiguousarray(source)) if isinstance(source, np.ndarray) else np.frombuffer(source, np.uint8)
    out[:] = data[start : start + len(out)]
