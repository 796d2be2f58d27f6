"""What retention has to know of a run's checkpoints: where they are on the walk, how good, and who needs them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from datetime import UTC, datetime

from tenuto.errors import CheckpointNotFound, CorruptionError
from tenuto.maintenance.remove import verification_of, verification_state
from tenuto.model.canonical_json import untag_number
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Note
from tenuto.policy.keep import CheckpointFacts
from tenuto.repo.lineage import walk
from tenuto.repo.notes import notes
from tenuto.repo.refs import list_refs
from tenuto.repo.repository import Repo


def gather_facts(repo: Repo, run: str, *, without: Container[CheckpointId] = frozenset()) -> list[CheckpointFacts]:
    """Every checkpoint of `run`, also on lines of training that were left behind. `without`: as if these were not
    there.

    Raises CorruptionError where a ref cannot be read: it may name any of them.
    """
    # Before the walk: what commits between the two is not judged yet. The other way round it would seem left behind.
    there = (
        CheckpointId(run, attempt, step) for attempt in repo.attempts(run) for step in repo.committed(run, attempt)
    )
    ids = [id for id in there if id not in without]
    refs = list_refs(repo)
    line = {id: place for place, id in enumerate(id for id in walk(repo, run) if id not in without)}
    needed = list(_needed_elsewhere(repo, run))
    found = []
    for id in ids:
        try:
            damaged, logged, created_s = _manifest_facts(repo, id)
        except CheckpointNotFound:
            continue  # removed since it was listed
        told = notes(repo, id, report=_pass)
        logged = with_notes(logged, told)
        note = verification_of(told)
        facts = CheckpointFacts(
            id=id,
            walk=line.get(id),
            metrics=logged,
            verified=note == "verified" and not damaged,
            suspect=damaged or note == "suspect",
            created_s=created_s,
            pinned=any(ref.id == id and ref.kind == "pin" for ref in refs),
            tags=tuple(ref.name for ref in refs if ref.id == id and ref.kind == "tag"),
            held=any(ref.id == id and ref.kind == "hold" for ref in refs),
            needed_by=tuple(reason for needed_id, reason in needed if needed_id == id),
        )
        found.append(facts)
    return found


def known_metrics(repo: Repo, id: CheckpointId) -> dict[str, float]:
    """A checkpoint's metrics, as logged with the step and as noted later, the later one counting. What is damaged says
    none; one that is gone has none."""
    try:
        return with_notes(_manifest_facts(repo, id)[1], notes(repo, id, report=_pass))
    except CheckpointNotFound:
        return {}


def _manifest_facts(repo: Repo, id: CheckpointId) -> tuple[bool, dict[str, float], float | None]:
    """Whether the manifest is damaged, the metrics in it, and when it says that it was saved."""
    try:
        manifest = repo.manifest(id)
    except CorruptionError:
        return True, {}, None
    return False, dict(manifest.metrics), seconds_of(manifest.created)


def seconds_of(created: str) -> float | None:
    """A time as manifests have it, in seconds since 1970; None for anything else."""
    try:
        when = datetime.fromisoformat(created)
        return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def with_notes(logged: Mapping[str, float], told: Iterable[Note]) -> dict[str, float]:
    """Metrics as logged with the step and as noted later, the later one counting; what is no number is passed over."""
    out = dict(logged)
    for note in told:
        if note.kind == "metric":
            for name, value in note.body.items():
                try:
                    out[name] = float(untag_number(value))
                except (CorruptionError, OverflowError):
                    continue
    return out


def _needed_elsewhere(repo: Repo, run: str) -> Iterator[tuple[CheckpointId, str]]:
    """Checkpoints of `run` that other runs, forked from it, go on from or would fall back to."""
    for other in repo.runs():
        if other == run or not _forked_from(repo, other, run):
            continue
        fallback = True
        for place, id in enumerate(walk(repo, other)):
            state = "suspect" if _manifest_facts(repo, id)[0] else verification_state(repo, id)
            if id.run == run and place == 0:
                yield id, f"what latest means in run {other!r}"
            elif id.run == run and state == "verified":
                yield id, f"the last one verified that run {other!r} has"
            elif id.run == run and state != "suspect" and fallback:
                yield id, f"the newest not known to be damaged that run {other!r} has"
            fallback = fallback and state == "suspect"
            if state == "verified":
                break


def _forked_from(repo: Repo, other: str, run: str) -> bool:
    """Whether an attempt of `other` may lead to `run`, directly or through other runs: any parent elsewhere will do."""
    for number in repo.attempts(other):
        try:
            record = repo.find_attempt(other, number)
        except CorruptionError:
            return True
        if record is not None and record.parent is not None and record.parent.run != other:
            return True
    return False


def _pass(message: str) -> None:
    """A damaged note says nothing about the checkpoint; verify reports it."""
