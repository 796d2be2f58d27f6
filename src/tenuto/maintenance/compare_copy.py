"""Compares a copy with its original: what it lacks, what differs, and what is damaged or missing in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Literal

from tenuto.engine.read.chunk_reader import scan_threads
from tenuto.errors import CopyDiverged, CorruptionError, ObjectNotFound, StoreError
from tenuto.events import Emitter, Progress
from tenuto.maintenance.copy_elsewhere import diverged
from tenuto.maintenance.copy_plan import CopyPlan, plan_copy
from tenuto.maintenance.inspect import inspect, scan
from tenuto.maintenance.replica_tidy import is_ahead
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.record import record
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import MAX_MANIFEST
from tenuto.repo.replicated.places import home_of
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store, is_inconclusive

Kind = Literal["behind", "missing", "damaged", "diverged", "unread"]
BEHIND = 24
"""The exit status where a copy lacks checkpoints or names, and nothing else is wrong with it."""


@record
class CopyProblem:
    """behind: not copied yet. missing: an object of a checkpoint that the copy has. damaged: not what was saved.
    diverged: undamaged, and other than in the original. unread: its store did not let it be read, so nobody can say."""

    kind: Kind
    id: CheckpointId | None
    object: str
    message: str


@record
class CopyCheck:
    """checked: the checkpoints of the copy that were looked at. kept: those that the original has removed. every_byte:
    whether data files were read."""

    where: str
    to: str
    checked: tuple[CheckpointId, ...]
    kept: tuple[CheckpointId, ...]
    problems: tuple[CopyProblem, ...]
    bytes_read: int
    every_byte: bool

    @property
    def behind(self) -> int:
        return len({problem.object for problem in self.problems if problem.kind == "behind" and problem.id is not None})

    @property
    def names_behind(self) -> int:
        """Returns how many objects of no checkpoint are not copied yet: claims, versions of tags, pins and holds,
        proofs, keys."""
        return len({problem.object for problem in self.problems if problem.kind == "behind" and problem.id is None})

    @property
    def damaged(self) -> tuple[str, ...]:
        """Returns the objects of the copy that are missing or damaged."""
        return tuple(one.object for one in self.problems if one.kind in ("missing", "damaged"))

    @property
    def exit_code(self) -> int:
        kinds = {problem.kind for problem in self.problems}
        if kinds & {"missing", "damaged"}:
            return CorruptionError.exit_code
        if "diverged" in kinds:
            return CopyDiverged.exit_code
        return StoreError.exit_code if "unread" in kinds else BEHIND if kinds else 0


def check_copy(
    repo: Repo, target: Store, *, run: str | None = None, every_byte: bool = False, emitter: Emitter | None = None
) -> CopyCheck:
    """Compares claims, `begin.json` and manifests byte for byte, checks every other small object, index and header of
    the copy against its digest, and with `every_byte` its data files too. Writes nothing.

    Raises NotARepository where no copy is, RepositoryError where something else is.
    """
    plan = plan_copy(repo, target, run=run)
    return _Check(repo, target, plan, every_byte, emitter or Emitter()).run()


class _Check:
    def __init__(self, repo: Repo, target: Store, plan: CopyPlan, every_byte: bool, emitter: Emitter) -> None:
        self.repo, self.copy, self.target, self.plan = repo, Repo.open(target), target, plan
        self.every_byte = every_byte
        self.problems: list[CopyProblem] = []
        self.bytes_read = 0
        self._emitter = emitter
        self._lock = threading.Lock()
        self._scanned = 0
        self._total = sum(length for name, length in plan.there.items() if object_names.is_pack(name))

    def run(self) -> CopyCheck:
        missed = {task.id for task in self.plan.tasks if task.missed}
        for task in self.plan.tasks:
            # What else a checkpoint there lacks is found missing below, but for notes: they came later.
            later = [task.id.manifest] if task.missed else [name for name in task.lacks if "/notes/" in name]
            for name in later:
                self._add("behind", task.id, name, "is not copied yet")
        for name in self.plan.small:
            self._add("behind", None, name, "is not copied yet")
        for name in sorted(name for name in self.plan.there if name.endswith(f"/{object_names.ATTEMPT}")):
            self._compare(None, name)
        found = (object_names.save_of(name) for name in self.plan.there if name.endswith(f"/{object_names.MANIFEST}"))
        ids = sorted({id for id in found if id is not None and id not in missed}, reverse=True)
        home = home_of(self.repo.store)
        pair = ReplicatedStore(home, [home, self.target], 1)
        for id in ids:
            if id in self.plan.removed:
                if is_ahead(pair, self.target, id, self.repo.id):
                    message = (
                        f"{self.plan.where} does not know it and ought to: it was set back, or the copy was changed"
                    )
                    self._add("diverged", id, id.manifest, message)
            else:
                self._compare(id, object_names.begin_name(id))
                self._compare(id, id.manifest)
            self._inspect(id)
        return CopyCheck(
            self.plan.where,
            self.plan.to,
            tuple(ids),
            tuple(id for id in ids if id in self.plan.removed),
            tuple(self._once()),
            self.bytes_read,
            self.every_byte,
        )

    def _add(self, kind: Kind, id: CheckpointId | None, name: str, message: str) -> None:
        self.problems.append(CopyProblem(kind, id, name, message))

    def _once(self) -> Iterator[CopyProblem]:
        """Yields one problem for each object: what differs and is damaged has two."""
        seen: set[str] = set()
        for problem in self.problems:
            if problem.object not in seen:
                seen.add(problem.object)
                yield problem

    def _compare(self, id: CheckpointId | None, name: str) -> None:
        """Compares an object that is in both places, or that the original must have."""
        try:
            copied = self.target.get(name, limit=MAX_MANIFEST)
            original = self.repo.store.get(name, limit=MAX_MANIFEST)
        except ObjectNotFound:
            if id is None and name in self.plan.there:
                self._add("diverged", None, name, f"{self.plan.where} has no such attempt")
            return
        except (CorruptionError, StoreError) as error:
            self._add("unread" if is_inconclusive(error) else "damaged", id, name, error.message)
            return
        if copied == original:
            return
        if not canonical_json.is_sealed(copied, name):
            self._add("damaged", id, name, "is damaged: its digest is not that of its content")
        elif canonical_json.is_sealed(original, name):
            self._add("diverged", id, name, diverged(self.plan.to, name, self.plan.where).message)

    def _inspect(self, id: CheckpointId) -> None:
        found = inspect(self.copy, id)
        if self.every_byte:
            scan(found, on_bytes=self._advance, threads=scan_threads(self.copy))
        self.bytes_read += found.bytes_read
        for finding in found.findings:
            if finding.severity == "unread":
                self._add("unread", id, finding.object or id.manifest, finding.message)
            if finding.severity == "error":
                name = finding.object or id.manifest
                where = "" if finding.offset is None else f" (byte {finding.offset})"
                leaf = "" if finding.leaf is None else f"{finding.leaf}: "
                self._add(
                    "damaged" if name in self.plan.there else "missing", id, name, f"{leaf}{finding.message}{where}"
                )

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self._scanned += nbytes
            done = self._scanned
        if self._emitter.listened:
            self._emitter.emit(Progress("verify", self.plan.to, done, max(done, self._total)))
