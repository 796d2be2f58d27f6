"""What a copy in another store lacks of a repository: compares two listings, and reads next to nothing."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import groupby
from typing import Final

from tenuto.concurrency.process import judge, this_process
from tenuto.maintenance.census import ids_in_trash, is_run
from tenuto.maintenance.copy_record import check_target, identity_of
from tenuto.model.ids import CheckpointId, run_key
from tenuto.record import record
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import MAX_ABORTED
from tenuto.repo.refs import Kind
from tenuto.repo.repository import Repo
from tenuto.store.contract import Entry, Store, is_leftover

_DAY_NS: Final = 24 * 3600 * 10**9
NAMED_BY: Final[tuple[Kind, ...]] = ("tag", "pin", "hold")
"""The kinds of refs that are copied: what people keep stays kept where a copy is promoted."""

Lengths = Mapping[str, int]


@record
class CopyTask:
    """What a copy lacks of a checkpoint, by name. `bytes`: of its data files. `missed`: whether the checkpoint is not
    there at all."""

    id: CheckpointId
    lacks: tuple[str, ...]
    bytes: int
    missed: bool


@record
class CopyPlan:
    """What to copy.

    tasks: the newest of each run first.
    whole: how many checkpoints the copy has already.
    bases: removed here, and kept in the trash there for the packs that others need: those that lack something.
    small: claims, refs and proofs that it lacks.
    removed: what the copy has and this repository has no more.
    parts: saves of which the copy has some, and this repository nothing.
    leftovers: of puts there that did not finish, whoever's.
    there: the copy's objects and their lengths.
    """

    where: str
    to: str
    tasks: tuple[CopyTask, ...]
    whole: int
    small: tuple[str, ...]
    removed: tuple[CheckpointId, ...]
    parts: tuple[CheckpointId, ...]
    leftovers: tuple[str, ...]
    there: Lengths = field(repr=False)
    bases: tuple[CopyTask, ...] = ()
    resting: frozenset[CheckpointId] = frozenset()
    """What lies in the trash of the copy for others that rest on it."""

    @property
    def bytes(self) -> int:
        return sum(task.bytes for task in (*self.tasks, *self.bases))

    @property
    def behind(self) -> int:
        """Returns how many checkpoints the copy does not have."""
        return sum(task.missed for task in self.tasks)


def plan_copy(
    repo: Repo,
    target: Store,
    *,
    run: str | None = None,
    ids: Collection[CheckpointId] | None = None,
    damaged: Collection[str] = (),
) -> CopyPlan:
    """Plans a copy, from one listing of each store. `run`, `ids`: only these. `damaged`: objects of the copy that are
    known to be, and count as not there.

    Raises StoreError if the repository is not where it was when it was opened: nothing there would look like all
    removed; and RepositoryError if the target cannot be this repository's copy.
    """
    identity_of(repo)
    check_target(repo, target)
    prefix = object_names.RUNS if run is None else object_names.run_directory(run)
    listed = list(target.walk(prefix, leftovers=True))
    there = {entry.name: entry.length for entry in listed if not is_leftover(entry.name)}
    for name in damaged:
        if name in there:
            there[name] = -1  # it is there, and no object has this length
    here = {entry.name: entry.length for entry in repo.store.walk(prefix)}
    tasks, whole = [], 0
    mine, theirs = _saves(here), _saves(there)
    resting = frozenset(_in_trash(target, run))
    bases = []
    for id, names in mine.items():
        lacks = tuple(name for name in names if there.get(name) != here[name])
        nbytes = sum(here[name] for name in lacks if object_names.is_pack(name))
        if id in resting and id.manifest not in here:
            lacks = tuple(name for name in lacks if not object_names.is_note(name[len(id.directory) + 1 :]))
            bases += [CopyTask(id, lacks, nbytes, False)] if lacks else []
            continue
        if (ids is not None and id not in ids) or not _is_checkpoint(repo, id, here, there):
            continue
        whole += not lacks
        tasks += [CopyTask(id, lacks, nbytes, id.manifest not in there)] if lacks else []
    claims = [name for name in here if name.endswith(f"/{object_names.ATTEMPT}")]
    small = [name for name in claims if there.get(name) != here[name]]
    if run is None and ids is None:
        for other in (*(f"refs/{kind}" for kind in NAMED_BY), object_names.PROOFS):
            small += _missing(repo.store, target, other)
    small += _missing(repo.store, target, object_names.KEYS)
    removed = [id for id, names in theirs.items() if id.manifest in names and not _is_checkpoint(repo, id, here, there)]
    parts = [id for id, names in theirs.items() if id.manifest not in names and id not in mine and id not in resting]
    return CopyPlan(
        where=repo.url,
        to=target.url,
        tasks=tuple(_by_age(tasks)),
        whole=whole,
        small=tuple(small),
        removed=tuple(removed) if ids is None else (),
        parts=tuple(parts) if ids is None else (),
        leftovers=tuple(_dead(listed)),
        there=there,
        bases=tuple(bases),
        resting=resting,
    )


def _in_trash(target: Store, run: str | None) -> Iterator[CheckpointId]:
    copy = Repo(target, "", 0)
    for one in filter(is_run, target.children("trash").directories) if run is None else [run_key(run)]:
        yield from ids_in_trash(copy, one)


def _missing(here: Store, there: Store, prefix: str) -> list[str]:
    known = {entry.name for entry in there.walk(prefix)}
    return [entry.name for entry in here.walk(prefix) if entry.name not in known]


def _saves(names: Lengths) -> dict[CheckpointId, list[str]]:
    """Returns the objects that belong to saves, by save."""
    found: dict[CheckpointId, list[str]] = {}
    for name in names:
        id = object_names.save_of(name)
        if id is None:
            continue
        file = name[len(id.directory) + 1 :]
        own = file in (object_names.BEGIN, object_names.MANIFEST) or object_names.is_note(file)
        if own or object_names.is_pack(name) or object_names.is_index(name):
            found.setdefault(id, []).append(name)
    return found


def _is_checkpoint(repo: Repo, id: CheckpointId, here: Lengths, there: Lengths) -> bool:
    """Returns whether the listing shows a checkpoint; reads only what may be the mark of an aborted save."""
    length = here.get(id.manifest)
    if length is None:
        return False
    return length > MAX_ABORTED or length == there.get(id.manifest) or repo.exists(id)


def _by_age(tasks: Sequence[CopyTask]) -> Iterator[CopyTask]:
    """Yields the newest of each run, then the second newest of each, and so on."""
    newest = sorted(tasks, key=lambda task: task.id, reverse=True)
    aged = [(age, task) for _, some in groupby(newest, lambda task: task.id.run) for age, task in enumerate(some)]
    yield from (task for _, task in sorted(aged, key=lambda one: one[0]))


# --------------------------------------------------------------------------------------------------
# Leftovers of puts that did not finish.

_TOKEN: Final = re.compile(r"copy-([0-9]+)-([0-9]+)-([0-9a-f]{12})-[0-9a-f]+")


def token() -> str:
    """Returns a token for this process's puts that tells others on this machine whether it still runs."""
    own = this_process()
    started = own.started if own.started.isdigit() else "0"
    return f"copy-{own.pid}-{started}-{_machine()}-{secrets.token_hex(8)}"


def _machine() -> str:
    own = this_process()
    return hashlib.sha256(f"{own.boot} {own.pid_namespace} {own.host}".encode()).hexdigest()[:12]


def _dead(listed: Sequence[Entry]) -> Iterator[str]:
    """Yields the leftovers whose writer is dead: a process of this machine that has ended, or one that has written
    nothing for a day, by the store's own times."""
    times = [entry.modified_ns for entry in listed if entry.modified_ns is not None]
    machine = _machine()
    for entry in listed:
        if not is_leftover(entry.name):
            continue
        found = _TOKEN.search(entry.name)
        if found is not None and found[3] == machine:
            if judge(replace(this_process(), pid=int(found[1]), started=found[2])) == "dead":
                yield entry.name
        elif entry.modified_ns is not None and entry.modified_ns < max(times) - _DAY_NS:
            yield entry.name
