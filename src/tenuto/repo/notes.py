"""Notes: facts about a checkpoint learned after its commit. Appended, never changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tenuto.errors import CheckpointNotFound, CorruptionError, ObjectNotFound, StoreError, UsageError
from tenuto.model.canonical_json import untag_number
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Note
from tenuto.repo.format import object_names, objects
from tenuto.repo.refs import append, numbers
from tenuto.repo.repository import Repo, now_text

KINDS = frozenset({"metric", "text", "verified", "suspect", "proven", "signed"})


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


def notes(repo: Repo, id: CheckpointId, *, report: Callable[[str], None] | None = None) -> list[Note]:
    """Returns the checkpoint's notes in the order in which they were added, also those of unknown kinds.

    A damaged one raises CorruptionError, or is passed to `report` and skipped. A copy from elsewhere is no note.
    """
    directory = object_names.notes_directory(id)
    found = []
    for number in numbers(repo, directory):
        name = object_names.numbered(directory, number)
        try:
            data = repo.store.get(name, limit=objects.SMALL)
            if objects.is_copy(name, data, repo.id):
                continue
            fields = objects.decode("note", name, data, repo.id)
            created = fields.values.get("created")
            kind, body = fields.text("note"), fields.mapping("body")
            found.append(Note(number, kind, body, created if isinstance(created, str) else ""))
        except ObjectNotFound:
            continue  # the checkpoint is being removed
        except CorruptionError as error:
            if report is None:
                raise
            report(error.message)
    return found


def known_metrics(repo: Repo, id: CheckpointId) -> dict[str, float]:
    """Returns a checkpoint's metrics, as logged with the step and as noted later, the later one counting. One whose
    manifest is damaged has those of its notes; one that is gone has none."""
    try:
        logged = repo.manifest(id).metrics
    except CorruptionError:
        logged = {}
    except CheckpointNotFound:
        return {}
    return with_notes(logged, notes(repo, id, report=ignore))


def noted_metrics(repo: Repo, id: CheckpointId) -> dict[str, float]:
    """Returns the metrics that were noted after the commit. Where the notes cannot be read there are none: a checkpoint
    is restored all the same, and verify reports them."""
    try:
        return with_notes({}, notes(repo, id, report=ignore))
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
    kinds = [note.kind for note in noted if note.kind in ("verified", "proven", "suspect")]
    return "" if not kinds else "suspect" if kinds[-1] == "suspect" else "verified"


def last_of(noted: Sequence[Note], kind: str) -> Note | None:
    """Returns the last note of this kind; None if there is none."""
    return next((note for note in reversed(noted) if note.kind == kind), None)


def last_proof(noted: Sequence[Note]) -> Note | None:
    """Returns the note of the restore that was proven last; None without one, or where damage was noted since."""
    last = next((note for note in reversed(noted) if note.kind in ("proven", "suspect")), None)
    return last if last is not None and last.kind == "proven" else None


def ignore(message: str) -> None:
    """Ignores a damaged note; verify reports it."""
