"""Who needs a checkpoint: what a removal asks after it has announced itself, and before it removes anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import typed
from holdfast.model.checkpoint import Note
from holdfast.model.names import CheckpointId
from holdfast.repo.lineage import walk
from holdfast.repo.notes import notes
from holdfast.repo.refs import list_refs
from holdfast.repo.repository import Repo
from holdfast.upkeep.owners import Finished, is_finished


@dataclass(frozen=True, slots=True)
class Need:
    """`reason` follows "it is needed: ". `hint`: what to do first. `forcible`: nobody but a person can mind."""

    reason: str
    hint: str
    forcible: bool = False


def needs(repo: Repo, id: CheckpointId, finished: Finished) -> list[Need]:
    """Everything that needs `id` now. Raises CorruptionError where a ref cannot be read: it may mean `id`."""
    return [*_refs(repo, id), *(need for run in repo.runs() for need in _run(repo, run, id, finished))]


def _refs(repo: Repo, id: CheckpointId) -> Iterator[Need]:
    for ref in list_refs(repo):
        if ref.id == id:
            way = (
                typed("holdfast", "tag", repo.url, ref.name, "--delete")
                if ref.kind == "tag"
                else f"clear the {ref.kind} first"
            )
            yield Need(f"{ref.kind} {ref.name!r} names it", way)


def _run(repo: Repo, run: str, id: CheckpointId, finished: Finished) -> Iterator[Need]:
    """What a run would go on from: `latest`, and if that is known to be damaged the newest that is not."""
    line = walk(repo, run)
    first = next(line, None)
    if first is None:
        return
    whole: CheckpointId | None = first
    while whole is not None and is_suspect(repo, whole):
        whole = next(line, None)
    if id not in (first, whole):
        return
    what = "what `latest` means in" if id == first else "the newest not known to be damaged in"
    if is_finished(repo, run, finished):
        yield Need(f"it is {what} run {run!r}", f"--force removes it; run {run!r} then goes on from an older one", True)
    else:
        yield Need(f"it is {what} run {run!r}, which a process is training now", "stop that process first")


def is_suspect(repo: Repo, id: CheckpointId) -> bool:
    """Whether the last verification that left a note found it damaged."""
    return standing(repo, id) == "suspect"


def standing(repo: Repo, id: CheckpointId) -> str:
    """What the last verification noted: verified, suspect, or empty if none did. Damaged notes are passed over."""
    return standing_of(notes(repo, id, report=_pass))


def standing_of(told: Sequence[Note]) -> str:
    kinds = [note.kind for note in told if note.kind in ("verified", "proven", "suspect")]
    return "" if not kinds else "suspect" if kinds[-1] == "suspect" else "verified"


def _pass(message: str) -> None:
    """A damaged note says nothing about the checkpoint; verify reports it."""
