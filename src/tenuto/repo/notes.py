"""Notes: facts about a checkpoint learned after its commit. Appended, never changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tenuto.errors import CheckpointNotFound, CorruptionError, ObjectNotFound, StoreError, UsageError, typed
from tenuto.model.canonical_json import untag_number
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Note
from tenuto.repo.format import object_names, objects
from tenuto.repo.refs import append, numbers
from tenuto.repo.repository import Repo, now_text
from tenuto.store.contract import is_unreadable

KINDS = frozenset({"metric", "text", "verified", "suspect", "proven", "signed"})
UNREADABLE: Final = "unreadable"
"""The kind of what stands among the notes that were read in place of one that cannot be: it may have said anything."""
FORGOTTEN: Final = "forgotten"
"""The kind of what a person has put in place of a note that nobody can read any more."""


def add_note(repo: Repo, id: CheckpointId, kind: str, body: Mapping[str, Json]) -> Note:
    """Adds a note to a checkpoint that exists. Numbers beyond JSON have to be tagged by the caller (`tag_number`).

    Raises CheckpointNotFound; UsageError for an unknown kind; Unserialisable for a body that JSON cannot hold.
    """
    if kind not in KINDS:
        raise UsageError(f"{kind!r} is not a kind of note; there are {', '.join(sorted(KINDS))}", subject=kind)
    if not repo.exists(id):
        raise CheckpointNotFound(f"no checkpoint {id} at {repo.url} to add a note to", subject=str(id))
    created = now_text()
    content: dict[str, Json] = {"body": dict(body), "created": created, "note": kind}
    directory = object_names.notes_directory(id)
    number = append(repo, directory, "note", content)
    if not repo.exists(id):  # removed meanwhile, and whoever removed it may have passed here already
        repo.store.delete([object_names.numbered(directory, number)])
        raise CheckpointNotFound(f"checkpoint {id} was removed while a note was added to it", subject=str(id))
    if repo.observer is not None:
        repo.observer.noted(id)
    return Note(number, kind, dict(body), created)


def notes(repo: Repo, id: CheckpointId) -> list[Note]:
    """Returns the checkpoint's notes in the order in which they were added, also those of unknown kinds.

    One that is damaged, that a copy has replaced, or that is missing below a later one is in the list with the kind
    `unreadable`: whoever judges by the notes cannot judge this checkpoint (`unread`). Copies alone are no notes.
    """
    directory = object_names.notes_directory(id)
    found: dict[int, Note] = {}
    copies: dict[int, str] = {}
    there = numbers(repo, directory)
    for number in there:
        name = object_names.numbered(directory, number)
        try:
            data = repo.store.get(name, limit=objects.SMALL)
            if objects.is_copy(name, data, repo.id):
                copies[number] = "a copy of another object lies there"
                continue
            fields = repo.decode("note", name, data)
            created = fields.values.get("created")
            kind, body = fields.text("note"), fields.mapping("body")
            found[number] = Note(number, kind, body, created if isinstance(created, str) else "")
        except ObjectNotFound:
            continue  # the checkpoint is being removed
        except CorruptionError as error:
            found[number] = _unreadable(number, error.message)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            found[number] = _unreadable(number, error.message)
    if found:  # beside notes that are its own a copy has replaced one, and a number that nothing has is a loss
        gaps = dict.fromkeys(set(range(1, max(found))) - set(there), "it is missing, although a later one is there")
        below = {number: why for number, why in copies.items() if number < max(found)}
        found |= {number: _unreadable(number, why) for number, why in (gaps | below).items()}
    return [found[number] for number in sorted(found)]


_NAMED: Final = 3
"""Reasons that a line names."""


def judged_without(unread: Mapping[CheckpointId, str], what: str, where: str) -> str:
    """Returns in one line which checkpoints were not judged, with what cannot be read, and the next command; empty if
    there are none. `what`: what became of them."""
    reasons: dict[str, list[CheckpointId]] = {}
    for id, why in sorted(unread.items()):
        reasons.setdefault(why, []).append(id)
    named = [f"{ids[0] if len(ids) == 1 else 'several'} ({why})" for why, ids in reasons.items()][:_NAMED]
    if not named:
        return ""
    more = f" and {len(reasons) - _NAMED:,} more" if len(reasons) > _NAMED else ""
    return f"{what}: {', '.join(named)}{more}; `{typed('tenuto', 'repair', where)}` says what can be done"


def _unreadable(number: int, why: str) -> Note:
    return Note(number, UNREADABLE, {"why": why})


def unread(id: CheckpointId, noted: Iterable[Note]) -> str:
    """Returns which note of a checkpoint cannot be read, in words; empty where all could."""
    first = next((note for note in noted if note.kind == UNREADABLE), None)
    if first is None:
        return ""
    return f"{object_names.numbered(object_names.notes_directory(id), first.number)} cannot be read"


def known_metrics(repo: Repo, id: CheckpointId) -> dict[str, float]:
    """Returns a checkpoint's metrics, as logged with the step and as noted later, the later one counting. One whose
    manifest is damaged has those of its notes; one that is gone has none."""
    try:
        logged = repo.manifest(id).metrics
    except CorruptionError:
        logged = {}
    except CheckpointNotFound:
        return {}
    return with_notes(logged, notes(repo, id))


def noted_metrics(repo: Repo, id: CheckpointId) -> dict[str, float]:
    """Returns the metrics that were noted after the commit. Where the notes cannot be read there are none: a checkpoint
    is restored all the same, and verify reports them."""
    try:
        return with_notes({}, notes(repo, id))
    except StoreError:
        return {}


def with_notes(logged: Mapping[str, float], noted: Iterable[Note]) -> dict[str, float]:
    """Metrics as logged with the step and as noted later, the later one counting; what is no number is passed over."""
    out = dict(logged)
    for note in noted:
        if note.kind == "metric":
            for name, value in note.body.items():
                try:
                    out[name] = float(untag_number(value))
                except (CorruptionError, OverflowError):
                    continue
    return out


def texts_of(noted: Iterable[Note]) -> tuple[str, ...]:
    """Returns what people have written on a checkpoint, in that order."""
    return tuple(str(note.body["text"]) for note in noted if note.kind == "text" and "text" in note.body)


def verification_of(noted: Sequence[Note]) -> str:
    """Returns the last verification's verdict: verified, suspect, or empty without one; `unreadable` where a later note
    cannot be read."""
    kinds = [note.kind for note in noted if note.kind in ("verified", "proven", "suspect", UNREADABLE)]
    return "" if not kinds else "verified" if kinds[-1] == "proven" else kinds[-1]


def last_of(noted: Sequence[Note], kind: str) -> Note | None:
    """Returns the last note of this kind; None if there is none."""
    return next((note for note in reversed(noted) if note.kind == kind), None)


def last_proof(noted: Sequence[Note]) -> Note | None:
    """Returns the note of the restore that was proven last; None without one, or where damage was noted
    since, or may have been."""
    last = next((note for note in reversed(noted) if note.kind in ("proven", "suspect", UNREADABLE)), None)
    return last if last is not None and last.kind == "proven" else None
