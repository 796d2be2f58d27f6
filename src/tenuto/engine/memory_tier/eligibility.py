"""The images in shared memory that a run may resume from.

A sealed image counts as a checkpoint of the attempt that sealed it, one that only this boot of this machine has. A run
may resume from it where that attempt is the last one with a commit or an image: every later one has no commit, is no
rollback, and resumed from where the attempt's own durable line ends, or from nothing. And it belongs to the directory
that the repository lies in: a copy of that directory has the same id and the same attempts, and no part in the image.
So an image never brings back a state that training has left behind, by a resume elsewhere, by a rollback, or by
removing checkpoints. There is one exception: an attempt that resumed from that very end on purpose, without memory, and
committed nothing. No record tells it from a restart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tenuto.concurrency.process import this_process
from tenuto.engine.memory_tier.seal import Seal, SealHolder, place_of
from tenuto.errors import CorruptionError, ObjectNotFound, StoreError
from tenuto.model.ids import CheckpointId, parse_step
from tenuto.model.records import AttemptRecord
from tenuto.record import record
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.small_records import decode_begin
from tenuto.repo.repository import Repo

if TYPE_CHECKING:
    from tenuto.engine.memory_tier.slot_pool import MemorySlot


@record
class EligibleImage:
    """An image that the run may resume from. `base`: the newest checkpoint of its line that is durable, None if nothing
    is; `durable`: the image is that very checkpoint, and only quicker to read."""

    base: CheckpointId | None
    durable: bool


def judge(repo: Repo, run: str, footer: Seal) -> EligibleImage | str:
    """Returns whether `run` of this repository may resume from this image, or why not. Damage of the image itself shows
    when it is read. Raises errors of the store."""
    return foreign(repo, run, footer) or judge_line(repo, run, footer.id, footer.save_id, footer.holder)


def foreign(repo: Repo, run: str, footer: Seal) -> str:
    """Returns why an image is not of this run, machine, user and directory, if it is not."""
    return of_another_run(repo, run, footer) or of_another_place(repo, footer)


def of_another_run(repo: Repo, run: str, footer: Seal) -> str:
    """Returns why an image is not of this run, machine and user, if it is not; in whatever directory `repo` lies."""
    if footer.repository != repo.id:
        return "it is of another repository"
    if footer.id.run != run:
        return f"it is of run {footer.id.run}"
    process = this_process()
    if not process.boot or footer.boot != process.boot:
        return "it was sealed before this machine was started, or on another one"
    if footer.uid != os.geteuid():
        return f"user {footer.uid} sealed it"
    return ""


def of_another_place(repo: Repo, footer: Seal) -> str:
    """Returns why an image belongs to another directory with the same repository, which is still there; empty where it
    does not: also where this one was moved from there, or lies at the same path."""
    here = place_of(repo.url)
    if not footer.place or not here or footer.place == here or footer.where == repo.url:
        return ""
    if footer.where and place_of(footer.where) != footer.place:
        return ""  # moved: what lies there now, if anything, is another directory
    return f"it belongs to {footer.where or 'another directory'}, of which {repo.url} is a copy"


def judge_line(repo: Repo, run: str, id: CheckpointId, save_id: str, holder: SealHolder) -> EligibleImage | str:
    """Judges an image that is not `foreign`: whether training has left it behind. Raises errors of the store."""
    try:
        return _on_the_line(repo, run, id, save_id, holder)
    except CorruptionError as error:
        return f"what has happened since cannot be read: {error.message}"


def _on_the_line(repo: Repo, run: str, id: CheckpointId, save_id: str, holder: SealHolder) -> EligibleImage | str:
    number = holder.attempt
    record = repo.find_attempt(run, number)
    if record is None or record.id != holder.claim:
        return f"attempt {number} is no longer the one that sealed it"
    committed = repo.committed(run, number)
    base = CheckpointId(run, number, committed[0]) if committed else record.parent
    for later in repo.attempts(run):
        if later > number:
            reason = _left_behind(repo, run, later, base)
            if reason:
                return reason
    removed = _removed(repo, run, number, above=committed[0] if committed else -1, upto=id.step)
    if removed is not None:
        return f"step {removed} of attempt {number}, at or before it, was removed by hand"
    if base is None:
        return EligibleImage(None, durable=False)
    if base == id and _save_id(repo, base) == save_id:
        return EligibleImage(base, durable=True)
    if committed and id.step <= committed[0]:
        return f"step {committed[0]} of attempt {number} is durable"
    if base.run == run and id.step <= base.step:
        return f"it is no newer than step {base.step}, which attempt {number} resumed from"
    if not repo.exists(base):
        return f"checkpoint {base}, which it resumed from, has been removed"
    return EligibleImage(base, durable=False)


def _removed(repo: Repo, run: str, number: int, *, above: int, upto: int) -> int | None:
    """Returns the newest step of the attempt between the two that was removed by hand, as far as the trash still shows.
    What retention puts there lies on no line that leads to the attempt's newest checkpoint."""
    keys = repo.store.children(object_names.attempt_trash(run, number)).directories
    for step in sorted((step for key in keys if (step := parse_step(key)) is not None), reverse=True):
        if above < step <= upto:
            trash = object_names.trash_directory(CheckpointId(run, number, step))
            if repo.store.children(trash).objects:  # else `undelete` has emptied it
                return step
    return None


def _left_behind(repo: Repo, run: str, later: int, base: CheckpointId | None) -> str:
    """Returns why a later attempt rules the image out; empty if it does not."""
    record: AttemptRecord | None = repo.find_attempt(run, later)
    committed = repo.committed(run, later)
    if committed:
        return f"attempt {later} has gone further, to step {committed[0]}"
    if record is not None and record.by == "rollback":
        return f"the run was rolled back to {record.parent}"
    if record is None or record.parent is None or record.parent == base:
        return ""
    return f"attempt {later} resumed from {record.parent}"


def _save_id(repo: Repo, id: CheckpointId) -> str | None:
    """Returns the save that made a checkpoint, from its `begin.json`."""
    try:
        return decode_begin(repo.store.get(object_names.begin_name(id), limit=objects.SMALL), id, repo.id).save_id
    except (ObjectNotFound, CorruptionError):
        return None


@record
class Candidate:
    """A sealed image from which the run may resume, and the slot that it lies in."""

    slot: MemorySlot
    footer: Seal
    verdict: EligibleImage


def eligible_images(
    repo: Repo, run: str, sealed: Iterable[tuple[MemorySlot, Seal]], report: Callable[[str], None]
) -> list[Candidate]:
    """Returns those from which the run may resume, newest first. `report` is called with why another is passed over."""
    found: list[Candidate] = []
    for slot, footer in sealed:
        try:
            verdict = judge(repo, run, footer)
        except StoreError as error:
            verdict = f"the repository does not answer: {error.message}"
        if isinstance(verdict, str):
            report(f"step {footer.id.step} in memory (attempt {footer.holder.attempt}) is passed over: {verdict}")
        else:
            found.append(Candidate(slot, footer, verdict))
    return sorted(found, key=lambda one: newness(one.footer), reverse=True)


def newness(footer: Seal) -> tuple[int, int, int]:
    """Returns a key that is greater for what is newer, among the images of one rank."""
    return (footer.holder.attempt, footer.id.step, footer.sequence)
