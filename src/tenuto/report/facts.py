"""Gathers what a report says of a repository: its runs, their checkpoints, and what needs attention.

Reads names, manifests, notes, refs and records, and no data file. What is damaged is reported, and stops nothing.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from tenuto.errors import CorruptionError, RunNotFound, did_you_mean, typed
from tenuto.maintenance.census import Census, SaveDirectory, census_of, classify_all, list_names
from tenuto.maintenance.facts import gather_facts
from tenuto.model.exactness import Exactness, exactness
from tenuto.model.health import Health
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import Manifest, Note
from tenuto.model.sizes import seconds_of
from tenuto.model.timing import Timing
from tenuto.policy.keep import protections, recorded
from tenuto.policy.spikes import falls
from tenuto.policy.spikes import spikes as jumps
from tenuto.record import record
from tenuto.repo.best import INTERNAL, Measured, Mode, best_of_each, is_healthy, modes_of
from tenuto.repo.catalog import Catalog, Snapshot
from tenuto.repo.lineage import latest
from tenuto.repo.notes import unread, with_notes
from tenuto.repo.ownership.lease import read_last
from tenuto.repo.ownership.owner_watch import OwnerWatch
from tenuto.repo.refs import Ref, list_refs
from tenuto.repo.replicated.places import places_of
from tenuto.repo.repository import Repo
from tenuto.report.series import spikes as outliers
from tenuto.report.supervision import Supervision, supervisions
from tenuto.units import count
from tenuto.version import __version__

State = Literal["committed", "damaged", "unfinished", "aborted"]
Level = Literal["damage", "warning", "note"]
"""damage: bytes are wrong. warning: something is not as it should be. note: worth knowing."""

_STATES: Mapping[str, State] = {
    "committed": "committed",
    "damaged": "damaged",
    "unfinished": "unfinished",
    "closed": "aborted",
}
MANY: Final = 500
"""From so many saves on, reading them is announced."""
BEFORE: Final = 50
"""Checkpoints before a line that was left behind with which its values are compared."""
clock = time.time


@record
class Attention:
    """Something that a person should look at. run: empty where it is about the whole repository. command: what to type
    next, empty where nothing follows."""

    level: Level
    text: str
    run: str = ""
    command: str = ""


@record
class CheckpointReport:
    """One save: a checkpoint, or what has become of one. Times are seconds since 1970 by the clock of the machine that
    wrote them, None where nothing says them; sizes are bytes."""

    id: CheckpointId
    state: State
    message: str = ""
    """What is wrong with it, in words."""
    created_s: float | None = None
    logical: int = 0
    """Bytes of the state."""
    stored: int = 0
    """Bytes of its own files."""
    on_line: bool = False
    """Whether it leads to the latest; False on a line of training that was left behind."""
    latest: bool = False
    parent: CheckpointId | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    checked: Literal["", "verified", "proven", "suspect"] = ""
    """What was noted last: every byte read and whole, restored by a drill, or found damaged."""
    checked_s: float | None = None
    best: tuple[str, ...] = ()
    """The metrics by which it is the best of the run."""
    kept: tuple[str, ...] = ()
    """Why retention keeps it: what protects it under any policy, and what the training's own policy says, where that is
    recorded."""
    goes: str = ""
    """Why the recorded policy would remove it now; empty if it keeps it, or none is recorded."""
    verdict: Exactness | None = None
    timing: Timing | None = None
    health: Health | None = None
    """What its save found of the values; None where it has not looked."""

    @property
    def damaged(self) -> bool:
        return self.state == "damaged" or self.checked == "suspect"

    @property
    def unhealthy(self) -> bool:
        """Returns whether its save found leaves with NaN or infinities that had none before."""
        return self.health is not None and not self.health.healthy


@record
class MetricReport:
    """One metric of a run. mode: in which direction it improves, where training has recorded that. spikes: checkpoints
    whose value jumps up, as `Repository.spikes` has it, where the metric falls; of others, whose value stands out from
    its neighbours'. nonfinite: whose value is not a finite number. diverges: since which checkpoint it jumps at each
    one up to the latest; None where it does not, and for metrics that do not fall."""

    name: str
    mode: Mode | None
    best: CheckpointId | None
    spikes: tuple[CheckpointId, ...]
    nonfinite: tuple[CheckpointId, ...]
    diverges: CheckpointId | None = None


@record
class AttemptReport:
    """One process lifetime of training. parent: what it resumed from."""

    number: int
    parent: CheckpointId | None
    created_s: float | None


@record
class RunReport:
    """One run. saves: oldest first, by attempt and step. trainer: of the newest attempt's process, as far as this
    machine can know. usual_s: the usual time between two saves, None where too few say it."""

    run: str
    saves: tuple[CheckpointReport, ...]
    attempts: tuple[AttemptReport, ...]
    metrics: tuple[MetricReport, ...]
    latest: CheckpointId | None
    trainer: Literal["training", "unknown", "finished", "died", "none"]
    host: str
    usual_s: float | None
    keep: str = ""
    """The policy by which its training keeps checkpoints, as the newest one records it; empty if it does not."""

    @property
    def checkpoints(self) -> tuple[CheckpointReport, ...]:
        """Returns the committed ones, damaged or not."""
        return tuple(one for one in self.saves if one.state in ("committed", "damaged"))

    @property
    def line(self) -> tuple[CheckpointReport, ...]:
        """Returns those that lead to the latest, oldest first."""
        return tuple(one for one in self.checkpoints if one.on_line)

    @property
    def newest(self) -> CheckpointReport | None:
        """Returns the latest, where it is one of this run's own."""
        return next((one for one in reversed(self.saves) if one.latest), None)


@record
class Report:
    """What there is to know of a repository at one moment. made_s: that moment, in seconds since 1970. trash,
    unfinished: bytes of removed checkpoints, and of saves that did not become one. free: bytes that are left where it
    lies, None where the store does not say."""

    where: str
    repository: str
    made_s: float
    version: str
    runs: tuple[RunReport, ...]
    attention: tuple[Attention, ...]
    logical: int
    stored: int
    trash: int
    unfinished: int
    free: int | None
    supervision: tuple[Supervision, ...] = ()
    """What the journals of `tenuto run` say, the earliest first."""

    def to_html(self, *, title: str | None = None) -> str:
        """Returns the report as one page that needs no network. Raises MissingExtra without the extra `report`."""
        from tenuto.report.page import page

        return page(self, title)

    def write(self, path: str | Path, *, title: str | None = None) -> int:
        """Writes the page to `path`, at once and whole, and returns its bytes. Raises UsageError where something else
        than a report lies there, StoreError where it cannot be written, and what `to_html` raises."""
        from tenuto.report.page import write

        return write(Path(path), self.to_html(title=title))


def report(
    repo: Repo,
    runs: Sequence[str] | None = None,
    *,
    journals: Sequence[Path] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Returns the report of all runs, or of those named. Raises RunNotFound, with the names that there are. journals:
    of `tenuto run`. progress: gets a line where it will take a while."""
    from tenuto.report.attention import of_repository, of_run

    made_s, there = clock(), repo.runs()
    chosen = there if runs is None else [_existing(repo, run_key(run), there) for run in dict.fromkeys(runs)]
    census = list_names(repo)
    saves = [save for save in census.saves.values() if save.id.run in chosen]
    if len(saves) >= MANY:
        progress(f"reading {count(len(saves), 'checkpoint')}")
    classify_all(repo, saves)
    try:
        refs: list[Ref] | None = list_refs(repo)
    except CorruptionError as error:
        refs, unreadable = None, error.message
    catalog = Catalog()  # one for all: a fork's line is read in its own run and in the other
    snapshots = [catalog.snapshot(repo, run) for run in chosen]
    for save in saves:
        if save.state == "committed" and save.manifest is not None:
            catalog.add(save.manifest, save.manifest_length, save.manifest_digest)
    found = tuple(_run(repo, snapshot, census, refs or ()) for snapshot in snapshots)
    free = repo.store.free_bytes()
    attention = [one for run in found for one in of_run(run, repo.url, made_s)]
    if refs is None:
        attention.append(
            Attention("damage", f"a ref is damaged: {unreadable}", "", typed("tenuto", "verify", repo.url))
        )
    attention += of_repository(found, repo.url, free)
    kept = [save for run in found for save in run.saves]
    return Report(
        where=repo.url,
        repository=repo.id,
        made_s=made_s,
        version=__version__,
        runs=found,
        attention=tuple(sorted(attention, key=lambda one: ("damage", "warning", "note").index(one.level))),
        logical=sum(save.logical for save in kept),
        stored=sum(save.stored for save in kept if save.state in ("committed", "damaged")),
        trash=sum(_own(save) for save in saves if save.state == "removed"),
        unfinished=sum(save.stored for save in kept if save.state not in ("committed", "damaged")),
        free=free,
        supervision=tuple(supervisions(journals)),
    )


def _existing(repo: Repo, run: str, there: Sequence[str]) -> str:
    if run in there:
        return run
    raise RunNotFound(
        f"no run {run!r} at {repo.url}; there are: {', '.join(there) or 'none'}",
        subject=run,
        hint=did_you_mean(run, there) or typed("tenuto", "ls", repo.url),
    )


def _own(save: SaveDirectory) -> int:
    return sum(entry.length for entry in save.own())


def _run(repo: Repo, snapshot: Snapshot, census: Census, refs: Iterable[Ref]) -> RunReport:
    run = snapshot.run
    newest = latest(repo, run)
    saves = sorted(
        (save for save in census.saves.values() if save.id.run == run and save.state in _STATES),
        key=lambda save: save.id,
    )
    notes = {save.id: snapshot.notes(save.id) for save in saves if save.state == "committed"}
    modes = {save.id: modes_of(save.manifest) for save in saves if save.manifest is not None}
    facts = gather_facts(snapshot, run)
    facts.sort(key=lambda one: one.age_key, reverse=True)
    protected = protections(facts)
    last = max((save.manifest for save in saves if save.state == "committed" and save.manifest), key=_age, default=None)
    policy = None if last is None else recorded(last.certificate)
    verdicts = {} if policy is None else {one.id: one for one in policy.decide(facts)}
    on_line = {one.id for one in facts if one.walk is not None}
    measured = [
        Measured(
            id,
            with_notes(save.manifest.metrics, notes[id]),
            suspect=_checked(notes[id])[0] == "suspect",
            healthy=is_healthy(save.manifest),
            modes=modes[id],
            unread=unread(id, notes[id]),
        )
        for save in saves
        if save.state == "committed" and save.manifest is not None and (id := save.id)
    ]
    best = best_of_each(measured, run)
    named: dict[CheckpointId, list[Ref]] = {}
    for ref in refs:
        named.setdefault(ref.id, []).append(ref)
    rows = []
    for save in saves:
        own = [name for name, id in best.items() if id == save.id and name not in INTERNAL]
        rows.append(
            _checkpoint(
                repo,
                save,
                notes.get(save.id, ()),
                named.get(save.id, ()),
                newest=newest,
                best=own,
                kept=verdicts[save.id].reason.split("; ") if save.id in verdicts else protected.get(save.id, ()),
                keeps=save.id not in verdicts or verdicts[save.id].keep,
                on_line=save.id in on_line,
            )
        )
    trainer, host = _trainer(repo, run)
    checkpoints = tuple(rows)
    return RunReport(
        run=run,
        saves=checkpoints,
        attempts=tuple(_attempts(snapshot, checkpoints, run)),
        metrics=tuple(_metrics(checkpoints, best, measured)),
        latest=newest,
        trainer=trainer,
        host=host,
        usual_s=_usual_s(checkpoints),
        keep="" if policy is None else repr(policy),
    )


def _checkpoint(
    repo: Repo,
    save: SaveDirectory,
    notes: Sequence[Note],
    refs: Sequence[Ref],
    *,
    newest: CheckpointId | None,
    best: Sequence[str],
    kept: Sequence[str],
    keeps: bool,
    on_line: bool,
) -> CheckpointReport:
    manifest, cut = save.manifest, _cut(repo, save)
    elsewhere = manifest.stored_bytes if manifest is not None and places_of(repo.store) is not None else 0
    checked, checked_s = _checked(notes)
    by_kind = {kind: tuple(ref.name for ref in refs if ref.kind == kind) for kind in ("tag", "pin", "hold")}
    return CheckpointReport(
        id=save.id,
        state="damaged" if cut else _STATES[save.state],
        message=cut or save.message,
        created_s=seconds_of(manifest.created) if manifest else None,
        logical=manifest.bytes if manifest else 0,
        stored=max(_own(save), elsewhere),
        on_line=on_line,
        latest=save.id == newest,
        parent=manifest.parent if manifest else None,
        metrics=with_notes(manifest.metrics, notes) if manifest else {},
        tags=by_kind["tag"],
        pins=by_kind["pin"],
        holds=by_kind["hold"],
        checked=checked,
        checked_s=checked_s,
        best=tuple(best),
        kept=tuple(kept) if keeps else (),
        goes="" if keeps else "; ".join(kept),
        verdict=exactness(manifest.certificate) if manifest else None,
        timing=Timing.read(manifest.environment.get("timing"), manifest.bytes) if manifest else None,
        health=manifest.health if manifest else None,
    )


def _age(manifest: Manifest) -> CheckpointId:
    return manifest.id


def _cut(repo: Repo, save: SaveDirectory) -> str:
    """Returns what a committed save lacks. It is listed again: it may have been committed or removed since."""
    if places_of(repo.store) is not None or not save.cut():  # data files may lie in places that this listing lacks
        return ""
    return census_of(repo, save.id).cut()


def _checked(notes: Sequence[Note]) -> tuple[Literal["", "verified", "proven", "suspect"], float | None]:
    for note in reversed(notes):
        if note.kind in ("verified", "proven", "suspect"):
            kind: Any = note.kind
            return kind, seconds_of(note.created)
    return "", None


def _attempts(snapshot: Snapshot, saves: Sequence[CheckpointReport], run: str) -> Iterable[AttemptReport]:
    for number in snapshot.attempts(run):
        first = next((one for one in saves if one.id.attempt == number and one.created_s is not None), None)
        try:
            record = snapshot.find_attempt(run, number)
        except CorruptionError:
            record = None
        if record is not None:
            yield AttemptReport(number, record.parent, seconds_of(record.created))
        elif first is not None:
            yield AttemptReport(number, first.parent, first.created_s)


def _metrics(
    saves: Sequence[CheckpointReport], best: Mapping[str, CheckpointId], measured: Sequence[Measured]
) -> Iterable[MetricReport]:
    modes = {name: mode for one in measured for name, mode in one.modes.items()}
    names = {name for one in saves for name in one.metrics} - INTERNAL
    for name in [*sorted(names & modes.keys()), *sorted(names - modes.keys())]:
        there = [one for one in saves if name in one.metrics]
        wrong = tuple(one.id for one in there if not np.isfinite(one.metrics[name]))
        out: set[CheckpointId] = set()
        diverges: CheckpointId | None = None
        for line in lines_of(there):
            values = [one.metrics[name] for one in line]
            if falls(name, modes.get(name)):
                judged = {jump.step: jump.kind for jump in jumps(enumerate(values)) if jump.kind != "nan"}
                on_line = not line or line[-1].on_line
                out.update(line[place].id for place in judged if on_line or not line[place].on_line)
                since = _diverges(values, judged) if on_line else None
                diverges = diverges if since is None else line[since].id
            else:
                out.update(line[place].id for place in outliers(np.array(values)))
        yield MetricReport(name, modes.get(name), best.get(name), tuple(sorted(out)), wrong, diverges)


def _diverges(values: Sequence[float], judged: Mapping[int, str]) -> int | None:
    """Returns the place since which a metric diverges up to its last value; None if it does not. judged: which values
    jump, by place."""
    since = None
    for place in reversed(range(len(values))):
        if place in judged:
            since = place
        elif np.isfinite(values[place]):
            break
    return since if since is not None and "divergence" in (judged[at] for at in judged if at >= since) else None


def lines_of(saves: Sequence[CheckpointReport]) -> Iterator[list[CheckpointReport]]:
    """Yields the line of training that leads to the latest, and each that was left behind with up to BEFORE checkpoints
    from before it. All are oldest first, and so are `saves`, of one run."""
    line = [one for one in saves if one.on_line]
    yield line
    steps = [one.id.step for one in line]
    behind: dict[int, list[CheckpointReport]] = {}
    for one in saves:
        if not one.on_line:
            behind.setdefault(one.id.attempt, []).append(one)
    for number, own in behind.items():
        end = bisect_left(steps, own[0].id.step)
        yield [*(one for one in line[max(end - BEFORE, 0) : end] if one.id.attempt <= number), *own]


def _trainer(repo: Repo, run: str) -> tuple[Literal["training", "unknown", "finished", "died", "none"], str]:
    found = OwnerWatch(repo, run).inspect()
    host = found.record.owner.host if found.record else ""
    if found.verdict == "free":
        return "none", ""
    if found.verdict == "dead":
        beat = read_last(repo, run, found.number)[1]
        return ("finished" if beat is not None and beat.released else "died"), host
    return ("unknown" if found.verdict == "unknown" else "training"), host


def _usual_s(saves: Sequence[CheckpointReport]) -> float | None:
    """Returns the median time between the last saves of one attempt; None for fewer than three such times."""
    line = [one for one in saves if one.on_line and one.created_s is not None][-50:]
    gaps = [
        later.created_s - earlier.created_s
        for earlier, later in pairwise(line)
        if earlier.id.attempt == later.id.attempt and later.created_s is not None and earlier.created_s is not None
    ]
    return float(np.median(gaps)) if len(gaps) >= 3 else None
