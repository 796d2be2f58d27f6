"""Lists a repository's content, one row for each save; broken saves are listed too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from tenuto.cli.views.ages import age_s, since
from tenuto.errors import (
    RunNotFound,
    StoreError,
    did_you_mean,
    typed,
)
from tenuto.model.exactness import Exactness, exactness
from tenuto.model.ids import CheckpointId, run_key
from tenuto.record import record
from tenuto.repo.best import INTERNAL, Measured, Mode, best_of_each, modes_of
from tenuto.repo.format.object_names import MANIFEST, NOTES
from tenuto.repo.notes import unread, verification_of
from tenuto.units import age, count

if TYPE_CHECKING:
    from tenuto.maintenance.census import SaveDirectory
    from tenuto.model.health import Health
    from tenuto.model.records import Note, Owner
    from tenuto.policy.spikes import Spike
    from tenuto.repo.refs import Ref
    from tenuto.repo.repository import Repo


STATES: Final[Mapping[str, str]] = {
    "committed": "",
    "damaged": "DAMAGED",
    "unfinished": "not finished",
    "closed": "aborted",
    "removed": "removed",
    "copied": "a copy",
}
"""States of `maintenance.census` in words; foreign directories are no checkpoints and not shown."""

SEALED: Final[Mapping[str, str]] = {
    "sealed": "sealed",
    "plain": "plain",
    "refused": "NOT VOUCHED FOR",
}
"""What the keys of a repository say of a checkpoint, in words."""

EXACTNESS: Final[Mapping[str, str]] = {
    "proven": "proven exact",
    "unknown": "exactness unknown",
    "not exact": "not exact",
}
"""Verdicts of certificates as marks of what training resumes from; "no known gap" is the usual one."""


@record
class RunRow:
    """One step's directory. `message`: the problem, in words of the reader that rejected it. `goes`: when the space of
    a removed one may come free, as text like `created`; empty if nobody has marked it yet."""

    id: CheckpointId
    state: str
    latest: bool = False
    on_walk: bool = False
    bytes: int | None = None
    leaves: int | None = None
    ranks: int | None = None
    created: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    tags: tuple[str, ...] = ()
    pins: tuple[Ref, ...] = ()
    """Its pins and holds."""
    message: str = ""
    modes: Mapping[str, Mode] = field(default_factory=dict)
    """In which direction its training says that metrics improve."""
    verdict: Exactness | None = None
    """Whether a resume from it is exact, as its certificate says."""
    goes: str = ""
    until: str = ""
    """When a removed checkpoint's bytes may go, and until when it can be brought back."""
    needed_by: str = ""
    """What of those listed rests on a removed one's data files, so that they stay."""
    health: Health | None = None
    """What its save has found of its values."""
    sealed: str = ""
    """Whether it is sealed, where the repository has keys: a name in SEALED."""
    freed: bool = False
    """Whether nothing is left of it but the mark of an aborted save, as where gc has emptied the trash."""

    @property
    def suspect(self) -> bool:
        return verification_of(self.notes) == "suspect"

    @property
    def unread(self) -> str:
        """Which note cannot be read, in words; empty where all could."""
        return unread(self.id, self.notes)

    @property
    def healthy(self) -> bool:
        return self.health is None or self.health.healthy

    def marks(self, best: Sequence[str] = (), *, of_these: bool = False) -> list[str]:
        """Returns its marks, a few words each. `best`: the metrics by which it is the best; `of_these`: of those that
        are shown, which are not all."""
        marks = ["latest"] if self.latest else []
        marks += [f"best {metric}{' of these' if of_these else ''}" for metric in best]
        if STATES[self.state]:
            marks.append(STATES[self.state])
            if self.needed_by:
                marks.append(f"data files needed by {self.needed_by}")
            elif self.until:
                marks.append(f"kept until {self.until[5:16].replace('T', ' ')}")
        if self.state == "committed" and not self.on_walk:
            marks.append("left behind")
        verdicts = [note.kind for note in self.notes if note.kind in ("verified", "suspect", "proven")]
        if self.unread and self.state == "committed":
            marks.append("A NOTE CANNOT BE READ")
        elif verdicts and self.state == "committed":
            proof = restorable(self.notes)
            marks.append("SUSPECT" if verdicts[-1] == "suspect" else proof or verdicts[-1])
        if self.sealed and self.state == "committed":
            marks.append(SEALED[self.sealed])
        if self.health is not None and not self.healthy and self.state == "committed":
            marks.append(unhealthy(self.health.leaves))
        if self.latest and self.verdict is not None and self.verdict in EXACTNESS:
            marks.append(EXACTNESS[self.verdict])
        return [*marks, *(f"tagged {name}" for name in self.tags), *marks_of_refs(self.pins)]

    def json(self, best: Sequence[str], spiked: Mapping[str, Spike] | None = None) -> dict[str, Any]:
        """`spiked`: what those of its metrics do that do not follow the ones before it."""
        seconds = age_s(self.created)
        return {
            "attempt": self.id.attempt,
            "step": self.id.step,
            "state": self.state,
            "latest": self.latest,
            "on_walk": self.on_walk,
            "bytes": self.bytes,
            "leaves": self.leaves,
            "ranks": self.ranks,
            "created": self.created or None,
            "age_s": None if seconds is None else round(seconds, 3),
            "best": list(best),
            "metrics": dict(self.metrics),
            "notes": notes_json(self.notes),
            "tags": list(self.tags),
            "pins": pins_json(self.pins),
            "message": self.message or None,
            "verdict": self.verdict,
            "sealed": self.sealed or None,
            "health": None if self.health is None else self.health.to_json(),
            "spikes": {name: spike.kind for name, spike in (spiked or {}).items()},
            "goes": self.goes or None,
        }


def unhealthy(leaves: int | None = None) -> str:
    """Returns the mark of an unhealthy checkpoint. `leaves`: how many have NaN or infinities; None where that is not
    known."""
    return f"UNHEALTHY: {'leaves' if leaves is None else count(leaves, 'leaf')} with NaN or infinities"


def restorable(notes: Sequence[Note]) -> str:
    """Returns when a drill has last proven the restore, as `restorable: proven 3 d ago`; empty where none has, or where
    damage was noted since."""
    from tenuto.repo.notes import last_proof

    proof = last_proof(notes)
    if proof is None:
        return ""
    seconds = age_s(str(proof.body.get("when", "")))
    ago = "" if seconds is None else age(max(seconds, 0.0))
    return f"restorable: proven{f' {ago} ago' if ago else ''}"


@record
class RunOwner:
    """The process that trains a run. `alive`: None where this machine cannot tell at once, as of another host's."""

    attempt: int
    owner: Owner | None
    since: str
    alive: bool | None

    def __str__(self) -> str:
        who = f"pid {self.owner.pid} on {self.owner.host} ({self.owner.user})" if self.owner else "an unknown process"
        when = f"{who}, since {since(self.since)}"
        return f"training now: {when}" if self.alive else f"perhaps training, on another machine: {when}"

    def json(self) -> dict[str, Any]:
        owner = self.owner
        return {
            "attempt": self.attempt,
            "alive": self.alive,
            "pid": owner.pid if owner else None,
            "host": owner.host if owner else None,
            "user": owner.user if owner else None,
            "since": self.since or None,
        }


@record
class RunRows:
    """One run: its rows, newest first (a higher attempt is newer), and all attempts, even those that saved nothing.

    latest: what the run means, shown or not.
    more: how many older saves were left out.
    trash: how many removed ones were left out, because they were not asked for.
    owner: the process that trains it, if one does.
    best: of the rows, the best by each metric whose direction training has recorded.
    counted: the state of the rows that `checkpoints` and `bytes` are of.
    """

    run: str
    attempts: tuple[int, ...]
    rows: tuple[RunRow, ...]
    latest: CheckpointId | None = None
    more: int = 0
    owner: RunOwner | None = None
    best: Mapping[str, CheckpointId] = field(default_factory=dict)
    counted: str = "committed"
    trash: int = 0

    @property
    def checkpoints(self) -> int:
        return sum(row.state == self.counted for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of the checkpoints among the rows."""
        return sum(row.bytes or 0 for row in self.rows if row.state == self.counted)

    @property
    def removed(self) -> list[RunRow]:
        return [row for row in self.rows if row.state == "removed"]

    def spikes(self) -> dict[CheckpointId, dict[str, Spike]]:
        """Returns which metrics jump at which of the rows on the line of training, by the metrics of the rows."""
        from tenuto.policy.spikes import falls, spikes

        line = sorted((row for row in self.rows if row.on_walk and row.state == "committed"), key=lambda row: row.id)
        modes = {name: mode for row in line for name, mode in row.modes.items()}
        found: dict[CheckpointId, dict[str, Spike]] = {}
        for name in sorted({name for row in line for name in row.metrics}):
            if falls(name, modes.get(name)):
                having = [row for row in line if name in row.metrics]
                for spike in spikes(enumerate(row.metrics[name] for row in having)):
                    found.setdefault(having[spike.step].id, {})[name] = spike
        return found

    def best_of(self, row: RunRow) -> list[str]:
        return [metric for metric, id in self.best.items() if id == row.id and metric not in INTERNAL]


def in_trash(runs: list[RunRows]) -> list[RunRows]:
    """Leaves only removed checkpoints, and runs that have any."""
    found = [replace(run, rows=tuple(run.removed), counted="removed") for run in runs]
    return [run for run in found if run.rows]


def listing(repo: Repo, only: str | None = None, limit: int | None = None, *, trash: bool = True) -> list[RunRows]:
    """Returns every run, or `only` one; of each at most the `limit` newest saves. Raises RunNotFound, listing the runs
    that exist. `trash`: with what is removed and still there, which is only counted otherwise.

    With a limit, the directories of the attempts are listed, and only what is shown is read.
    """
    from tenuto.repo.lineage import latest

    runs = _all_saves(repo, trash=trash) if limit is None else _newest_saves(repo, only, limit, trash=trash)
    saves = [save for found in runs.values() for save in found.saves if save.state == "committed"]
    resting = {base: str(save.id) for save in saves for base in save.bases}
    if only is not None:
        key = run_key(only)
        if key not in runs:
            there = ", ".join(sorted(runs)) or "none"
            raise RunNotFound(
                f"no run {only!r} at {repo.url}; there are: {there}",
                subject=only,
                hint=did_you_mean(key, runs) or typed("tenuto", "ls", repo.url),
            )
        runs = {key: runs[key]}
    refs, rows = refs_of(repo), []
    for run, found in sorted(runs.items()):
        newest = latest(repo, run)
        listed = tuple(_rows(repo, run, found.saves, newest, refs, resting=resting))
        owner, best = owner_of(repo, run), _best(run, listed)
        rows.append(RunRows(run, found.attempts, listed, newest, found.more, owner, best, trash=found.trash))
    return rows


def owner_of(repo: Repo, run: str) -> RunOwner | None:
    """Returns the process that trains the run now; None if none does."""
    from tenuto.repo.ownership.owner_watch import OwnerWatch

    found = OwnerWatch(repo, run).inspect()
    if found.verdict in ("free", "dead"):
        return None
    record, alive = found.record, None if found.verdict == "unknown" else True
    return RunOwner(found.number, record.owner if record else None, record.created if record else "", alive)


def _best(run: str, rows: Sequence[RunRow]) -> dict[str, CheckpointId]:
    """Returns the best of `rows` by each metric whose direction is recorded; none where all of them are NaN."""
    return best_of_each(
        [
            Measured(row.id, row.metrics, row.suspect, row.healthy, row.modes, row.unread)
            for row in rows
            if row.state == "committed"
        ],
        run,
    )


@dataclass(slots=True)
class _RunSaves:
    attempts: tuple[int, ...] = ()
    saves: list[SaveDirectory] = field(default_factory=list)
    more: int = 0
    trash: int = 0


def _all_saves(repo: Repo, *, trash: bool) -> dict[str, _RunSaves]:
    from tenuto.maintenance.census import take_census

    census = take_census(repo)
    runs: dict[str, _RunSaves] = {}
    for run, number in sorted(census.attempts):
        found = runs.setdefault(run, _RunSaves())
        found.attempts = (*found.attempts, number)
    for save in census.saves.values():
        if save.state in STATES:
            found = runs.setdefault(save.id.run, _RunSaves())
            if save.state == "removed" and not trash:
                found.trash += 1
            else:
                found.saves.append(save)
    return runs


def _newest_saves(repo: Repo, only: str | None, limit: int, *, trash: bool) -> dict[str, _RunSaves]:
    from tenuto.maintenance.census import census_of, names_of_runs

    if repo.store.capabilities.remote:
        return _newest_of_one_listing(repo, only, limit, trash=trash)
    runs: dict[str, _RunSaves] = {}
    for run, names in names_of_runs(repo).items():
        found = _RunSaves(tuple(sorted(names.claimed)))
        if only is None or run == run_key(only):
            # What was brought back may have left a directory in the trash.
            there = set() if trash else {CheckpointId(run, attempt, step) for attempt, step in names.trash}
            gone = {id for id in there if not repo.exists(id)}
            found.trash = len(gone)
            found.more = sum(map(len, names.steps.values())) - len(gone)
            for id in names.newest_first(run):
                if id in gone:
                    continue
                save = census_of(repo, id)
                found.more -= 1
                if save.state in STATES:
                    found.saves.append(save)
                    if len(found.saves) == limit:
                        break
        if found.attempts or found.saves or found.trash:
            runs[run] = found
    return runs


def _newest_of_one_listing(repo: Repo, only: str | None, limit: int, *, trash: bool) -> dict[str, _RunSaves]:
    """Does what `_newest_saves` does where each call is a request: lists everything in one go, which is a request for
    each thousand objects, and reads what is shown, several at once."""
    from tenuto.maintenance.census import classify_all, list_names

    census = list_names(repo)
    runs: dict[str, _RunSaves] = {}
    for run, number in sorted(census.attempts):
        found = runs.setdefault(run, _RunSaves())
        found.attempts = (*found.attempts, number)
    for run in [*runs] if only is None else [run_key(only)]:
        of_run = {id: save for id, save in census.saves.items() if id.run == run}
        gone = {id for id, save in of_run.items() if not trash and save.trash and not save.has(MANIFEST)}
        waiting = sorted(of_run.keys() - gone, reverse=True)
        found = runs.get(run, _RunSaves())
        found.trash = len(gone)
        while waiting and len(found.saves) < limit:
            wanted = limit - len(found.saves)
            some = [census.saves[id] for id in waiting[:wanted]]
            del waiting[:wanted]
            classify_all(repo, some)
            found.saves += [save for save in some if save.state in STATES]
        found.more = len(waiting)
        if found.attempts or found.saves or found.trash:
            runs[run] = found
    return runs


def _has_notes(save: SaveDirectory) -> bool:
    """Returns whether the listing that a save came with has notes of it."""
    return any(entry.name.startswith(f"{save.id.directory}/{NOTES}/") for entry in save.entries)


def _rows(
    repo: Repo,
    run: str,
    saves: list[SaveDirectory],
    newest: CheckpointId | None,
    refs: Mapping[CheckpointId, tuple[Ref, ...]],
    *,
    resting: Mapping[CheckpointId, str],
) -> Iterator[RunRow]:
    from tenuto.maintenance.marks import valid_marks
    from tenuto.repo.lineage import stretches
    from tenuto.repo.notes import with_notes

    committed = {save.id for save in saves if save.state == "committed"}
    lowest = min((save.id.attempt for save in saves), default=0)
    line = []
    for stretch in stretches(repo, run, known=committed):
        if stretch.run == run and stretch.attempt < lowest:
            break
        line.append(stretch)
    for save in sorted(saves, key=lambda save: (save.id.attempt, save.id.step), reverse=True):
        manifest, cut = save.manifest, _cut(repo, save)
        notes = notes_of(repo, save.id) if save.state == "committed" and _has_notes(save) else ()
        marks = list(valid_marks(repo, save)) if save.state == "removed" else []
        others = "others" if any(mark.by == "needed" for mark in marks) else ""
        yield RunRow(
            id=save.id,
            state="damaged" if cut else save.state,
            latest=save.id == newest,
            on_walk=(save.state == "committed" or save.id == newest or repo.exists(save.id))
            and any(stretch.covers(save.id) for stretch in line),
            bytes=manifest.bytes if manifest else None,
            leaves=manifest.leaves if manifest else None,
            ranks=len(manifest.indexes) if manifest else None,
            created=manifest.created if manifest else "",
            metrics=with_notes(manifest.metrics, notes) if manifest else {},
            notes=notes,
            tags=tags_among(refs.get(save.id, ())),
            pins=pins_among(refs.get(save.id, ())),
            message=cut or save.message,
            modes=modes_of(manifest) if manifest else {},
            verdict=exactness(manifest.certificate) if manifest else None,
            health=manifest.health if manifest else None,
            sealed=save.sealed,
            freed=save.state == "closed" and save.begin is None and not any(True for _ in save.own()),
            goes=max((mark.goes for mark in marks), default=""),
            until=max((mark.until for mark in marks), default=""),
            needed_by=resting.get(save.id, others) if save.state == "removed" else "",
        )


def _cut(repo: Repo, save: SaveDirectory) -> str:
    """Returns what is missing or cut of a committed save. The listing that it came with has the lengths; where they
    differ, it is listed again, since it may have been committed, or removed, between that and its manifest."""
    from tenuto.maintenance.census import census_of
    from tenuto.repo.replicated.places import places_of

    if places_of(repo.store) is not None or not save.cut():  # data files may lie in places that this listing lacks
        return ""
    return census_of(repo, save.id).cut()


def notes_json(notes: Sequence[Note]) -> list[dict[str, Any]]:
    """Returns notes as JSON documents have them; `created` tells when a checkpoint was verified, or proven."""
    return [{"created": note.created or None, **note.body, "kind": note.kind} for note in notes]


def refs_of(repo: Repo) -> dict[CheckpointId, tuple[Ref, ...]]:
    """Returns the tags, pins and holds of each checkpoint that has any. Says on stderr which cannot be read."""
    from tenuto.cli.console import output
    from tenuto.repo.refs import KINDS, list_refs

    found: dict[CheckpointId, tuple[Ref, ...]] = {}
    damaged: list[str] = []
    with contextlib.suppress(StoreError):
        there = repo.store.children("refs").directories  # most repositories have one kind or none: a listing each
        for ref in list_refs(repo, [kind for kind in KINDS if kind in there], damaged=damaged.append):
            found[ref.id] = (*found.get(ref.id, ()), ref)
    if damaged:
        output.story(f"note: {', '.join(damaged)}: `{typed('tenuto', 'repair', repo.url)}` says what can be done")
    return found


def tags_among(refs: Sequence[Ref]) -> tuple[str, ...]:
    return tuple(ref.name for ref in refs if ref.kind == "tag")


def pins_among(refs: Sequence[Ref]) -> tuple[Ref, ...]:
    return tuple(ref for ref in refs if ref.kind != "tag")


def pins_json(pins: Sequence[Ref]) -> list[dict[str, Any]]:
    return [{"kind": ref.kind, "name": ref.name, "reason": ref.reason or None} for ref in pins]


def marks_of_refs(refs: Sequence[Ref]) -> Iterator[str]:
    """Yields a mark for each: a tag's name, a reason for a pin or a hold."""
    for ref in refs:
        what = {"pin": "pinned", "hold": "on hold"}.get(ref.kind)
        yield f"tagged {ref.name}" if what is None else f"{what}: {ref.reason}" if ref.reason else what


def notes_of(repo: Repo, id: CheckpointId) -> tuple[Note, ...]:
    """Returns the checkpoint's notes; none if the store does not give them, which `verify` reports."""
    from tenuto.repo.notes import notes

    try:
        return tuple(notes(repo, id))
    except StoreError:
        return ()
