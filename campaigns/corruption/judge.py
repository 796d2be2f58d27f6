"""Judges one fault: reading gives exactly what was saved or names what is damaged (I5), and verify reports it.

Narrow reading asks only for what the fault can concern: the checkpoint that the object lies under, and of `verify`
either that checkpoint or everything but the checkpoints. Both are the calls that `load` and `verify` make; for a share
of the faults all is asked for, without the fast path, and the answers must be the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from campaigns.corruption.faults import FOREIGN, MISSING, Fault
from campaigns.corruption.shapes import Shape, match_private
from tenuto.engine.read.choose import CheckpointLeaves, RestoreResult, restore_checkpoint, restore_latest
from tenuto.errors import TenutoError
from tenuto.events import Emitter, Event, Warned
from tenuto.maintenance.findings import Finding
from tenuto.maintenance.verify import VerifyPlan, execute, plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.repo.repository import Repo
from tenuto.state.contract import Prepared

CHECKPOINT_OWN: Final = frozenset({"manifest", "index", "pack"})
"""Without these a checkpoint cannot be read."""
INSPECTED: Final = CHECKPOINT_OWN | {"begin", "note", "attempt"}
"""What the verification of one checkpoint looks at."""

UNREAD: Final = frozenset({"ref", "tombstone", "gc mark", "trash", "aborted mark"})
"""No reading looks at these: that it gives the same all the same is asked for in a share of the faults only."""

NOTHING_TELLS: Final[Mapping[tuple[str, str], str]] = {
    (MISSING, "lease"): "the owner removes beats itself, and its successor the rest",
    (MISSING, "note"): "only a gap tells that a note is gone: the last one leaves none",
    (MISSING, "repository"): "one of two: a single save puts no second, and the next training does",
    (MISSING, "ref"): "only a gap tells that a version is gone: the newest leaves none",
    (MISSING, "tombstone"): "it is taken back when a removal ends",
    (MISSING, "gc mark"): "it is taken back when its subject is needed again",
    (MISSING, "aborted mark"): "the save's other objects are gone already",
    (FOREIGN, "aborted mark"): "whose save it closed is written nowhere else once its objects are gone",
}
"""(kind of fault, kind of object) after which the store is as another history would have left it: no object says that
there was more. No checkpoint's bytes depend on these. They are counted apart, and reading is judged all the same."""


@dataclass
class Verdict:
    """`reading`: exact, refused, fell back, or not concerned. `verify`: error, shown (as unusual), or legal, where
    nothing can tell."""

    fault: Fault
    reading: str = ""
    verify: str = ""
    problems: list[str] = field(default_factory=list)


def judge(shape: Shape, fault: Fault, *, walk: bool, whole: bool) -> Verdict:
    """Strikes, looks, and puts the object back. `walk`: reads as `load` does without a step. `whole`: verifies the
    whole store too, which must say the same."""
    verdict = Verdict(fault)
    name = fault.target.name
    was = shape.place.objects[name]
    if fault.data is None:
        del shape.place.objects[name]
    else:
        shape.place.objects[name] = fault.data, was[1]
    try:
        if fault.target.kind == "repository":
            _judge_repository(shape, verdict)
        else:
            _judge_reading(shape, verdict, walk=walk)
            _judge_verify(shape, shape.repo, verdict, whole=whole)
            _judge_resting(shape, verdict)
    finally:
        shape.place.objects[name] = was
    return verdict


def _judge_repository(shape: Shape, verdict: Verdict) -> None:
    try:
        repo = Repo.open(shape.store)
    except TenutoError as error:
        verdict.reading, verdict.verify = "refused", "error"
        if not _names(error, verdict.fault) and shape.store.url not in str(error):
            verdict.problems.append(f"the error names neither object nor place: {error}")
        return
    _judge_reading(shape, verdict, walk=True, repo=repo)
    _judge_verify(shape, repo, verdict, whole=True)


def _judge_reading(shape: Shape, verdict: Verdict, *, walk: bool, repo: Repo | None = None) -> None:
    target = verdict.fault.target
    id = target.id if target.id in shape.saved else None
    if id is None and target.kind in UNREAD and not walk:
        verdict.reading = "not concerned"
        return
    if id is None or (walk and id == shape.line[id.run][0]):
        _by_walk(shape, verdict, repo or shape.repo, id.run if id is not None else target.run)
    else:
        _by_step(shape, verdict, repo or shape.repo, id)


def _judge_resting(shape: Shape, verdict: Verdict) -> None:
    """What names a damaged pack of another checkpoint is exact, or refused by the pack's name; and verifying it says
    so."""
    target = verdict.fault.target
    if target.kind != "pack" or target.id is None:
        return
    for id in shape.resting.get(target.id, ()):
        other = Verdict(verdict.fault)
        _by_step(shape, other, shape.repo, id)
        if other.reading == "refused":
            findings = execute(shape.repo, plan_verify(shape.repo, (id,)), threads=1).findings
            if _reported(verdict.fault, findings) != "error":
                other.problems.append("it cannot be read, and verifying it reports nothing")
        verdict.problems += [f"{id}, which rests on it: {problem}" for problem in other.problems]


def _by_step(shape: Shape, verdict: Verdict, repo: Repo, id: CheckpointId) -> None:
    reading = Reading()
    try:
        result = restore_checkpoint(repo, id, reading.match)
    except TenutoError as error:
        verdict.reading = "refused"
        if not _names(error, verdict.fault):
            verdict.problems.append(f"the error does not name the object: {error}")
        return
    verdict.reading = "exact"
    verdict.problems += reading.differences(shape, result)


def _by_walk(shape: Shape, verdict: Verdict, repo: Repo, run: str) -> None:
    reading = Reading()
    try:
        result = restore_latest(repo, run, reading.match, emitter=Emitter.of([reading]))
    except TenutoError as error:
        verdict.reading = "refused"
        if not _names(error, verdict.fault):
            verdict.problems.append(f"the error does not name the object: {error}")
        return
    if result is None:
        verdict.problems.append(f"run {run} reads as if it had no checkpoint")
        return
    verdict.problems += reading.differences(shape, result)
    verdict.reading = "exact"
    if result.id == shape.line[run][0]:
        return
    verdict.reading = "fell back"
    # The manifest is the checkpoint: without one there is none to be skipped, as after a crash.
    unborn = verdict.fault.kind == MISSING and verdict.fault.target.kind == "manifest"
    told = [reason for _, reason in result.skipped] + reading.warnings
    names = {verdict.fault.target.name}
    if verdict.fault.kind == FOREIGN and verdict.fault.target.id is not None:
        names.add(verdict.fault.target.id.directory)  # it fits its place, but not what lies beside it
    if not unborn and not any(name in reason for name in names for reason in told):
        verdict.problems.append(f"{result.id} was restored, and nothing says why not {shape.line[run][0]}")


class Reading:
    """One restore: keeps what belongs to one process alone, and what the restore warns of."""

    def __init__(self) -> None:
        self.own: Any = None
        self.warnings: list[str] = []

    def match(self, manifest: Manifest, leaves: CheckpointLeaves) -> Prepared:
        prepared, self.own = match_private(manifest, leaves)
        return prepared

    def emit(self, event: Event) -> None:
        if isinstance(event, Warned):
            self.warnings.append(event.message)

    def differences(self, shape: Shape, result: RestoreResult) -> Iterator[str]:
        if result.id not in shape.saved:
            yield f"{result.id} was restored, which was never saved"
        elif not same((result.state, self.own), shape.saved[result.id]):
            yield f"I5: {result.id} came back with other values than were saved"


def _names(error: TenutoError, fault: Fault) -> bool:
    return fault.target.name in error.message or fault.target.name == error.subject or _names_place(error, fault)


def _names_place(error: TenutoError, fault: Fault) -> bool:
    """Where the manifest is gone there is no object to name, but the checkpoint; where another one fits the place, it
    does not fit what lies beside it."""
    id = fault.target.id
    if fault.target.kind != "manifest" or id is None:
        return False
    return str(id) in error.message or (fault.kind == FOREIGN and id.directory in error.message)


def _judge_verify(shape: Shape, repo: Repo, verdict: Verdict, *, whole: bool) -> None:
    fault = verdict.fault
    findings = list(verify_narrowly(shape, repo, fault))
    verdict.verify = _reported(fault, findings)
    if whole:
        full = _reported(fault, execute(repo, plan_verify(repo)).findings)
        if full != verdict.verify:
            verdict.problems.append(f"verifying everything says {full!r}, the concerned alone {verdict.verify!r}")
    if verdict.verify == "unseen":
        if (fault.kind, fault.target.kind) in NOTHING_TELLS:
            verdict.verify = "legal"
        else:
            verdict.problems.append("verify reports nothing")


def verify_narrowly(shape: Shape, repo: Repo, fault: Fault) -> Iterator[Finding]:
    """What verifying everything finds about the faulted object, without what it finds about others."""
    target = fault.target
    ids: tuple[CheckpointId, ...] = ()
    if target.kind == "repository":
        ids = tuple(shape.saved)
    elif target.kind == "attempt":
        ids = tuple(id for id in shape.saved if target.name.startswith(f"runs/{id.run}/"))
    elif target.id is not None and target.id in shape.saved and target.kind in INSPECTED and repo.exists(target.id):
        ids = (target.id,)
    if ids:
        yield from execute(repo, plan_verify(repo, ids), threads=1).findings
    if not ids or target.kind in ("attempt", "repository", "note"):
        yield from execute(repo, VerifyPlan(repo.url, (), True, True, 0), threads=1).findings


def _reported(fault: Fault, findings: Iterable[Finding]) -> str:
    """error: an error about the object; shown: the same as something unusual."""
    about = [finding for finding in findings if _concerns(fault, finding)]
    if any(finding.severity == "error" for finding in about):
        return "error"
    return "shown" if about else "unseen"


def _concerns(fault: Fault, finding: Finding) -> bool:
    """Whether a finding that an untouched store does not have is about the faulted object. Where nothing is left of the
    object, or another one fits its place, it may name what lies beside it."""
    target = fault.target
    if finding.message.startswith(("a removal was begun", "gc has found that nothing needs it")):
        return False
    if target.kind == "repository":
        return finding.severity == "error" or finding.object == target.name
    name = finding.object or ""
    if name == target.name or target.name in finding.message:
        return True
    directory = target.id.directory if target.id is not None else target.name.rpartition("/")[0]
    return (fault.data is None or fault.kind == FOREIGN) and (name == directory or name.startswith(f"{directory}/"))


def same(found: Any, saved: Any) -> bool:
    """Equal in every bit, and of one type throughout."""
    if type(found) is not type(saved):
        return False
    if isinstance(saved, np.ndarray):
        return bool(found.dtype == saved.dtype and found.shape == saved.shape and found.tobytes() == saved.tobytes())
    if hasattr(saved, "numpy"):  # a tensor of a framework that this module does not load
        return same(found.numpy(), saved.numpy())
    if isinstance(saved, dict):
        return list(found) == list(saved) and all(same(found[key], value) for key, value in saved.items())
    if isinstance(saved, list | tuple):
        return len(found) == len(saved) and all(map(same, found, saved))
    if isinstance(saved, float):
        return struct.pack("<d", found) == struct.pack("<d", saved)
    return bool(found == saved)
