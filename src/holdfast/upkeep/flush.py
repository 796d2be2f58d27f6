"""Flush: writes what a dead process left in memory to its store, as a checkpoint like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from holdfast.crashpoints import crashpoint
from holdfast.engine.images import Image, check_image, open_image
from holdfast.engine.listing import Found, images
from holdfast.errors import CheckpointNotFound, CorruptionError, HoldfastError, Superseded
from holdfast.image import lasting
from holdfast.image.lasting import LastingSlot
from holdfast.model.checkpoint import Index, Manifest, Receipt
from holdfast.model.names import CheckpointId
from holdfast.repo.adoption import Adoptable, judge
from holdfast.repo.attempts import Attempt, claim
from holdfast.repo.commit import abort, begin, commit, free
from holdfast.repo.footer import Footer
from holdfast.repo.layout import index_file
from holdfast.repo.packs import put_index
from holdfast.repo.repository import Repo
from holdfast.store.contract import Bytes

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Judged:
    """An image of a run, and whether the run may go on from it: else `verdict` says why not."""

    found: Found
    verdict: Adoptable | str

    @property
    def adoptable(self) -> bool:
        return not isinstance(self.verdict, str)


@dataclass(frozen=True, slots=True)
class FlushPlan:
    """What a flush would write. `chosen`: None if there is nothing."""

    run: str
    images: tuple[Judged, ...]
    chosen: Judged | None


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush has written: `id`, of the state that `image` was in memory."""

    id: CheckpointId
    image: CheckpointId
    bytes: int


def unfit(found: Found) -> str:
    """Why nobody may go on from an image, whatever its repository says; empty if it is for that to say."""
    if found.footer is None:
        return "its process is running" if found.alive else "it was never finished"
    return "its process is running" if found.alive else ""


def judge_found(repo: Repo, found: Found) -> Adoptable | str:
    """Whether the run that an image is of may go on from it, as far as its seal tells."""
    if found.footer is None or unfit(found):
        return unfit(found)
    return judge(repo, found.footer.id.run, found.footer)


def plan_flush(repo: Repo, run: str) -> FlushPlan:
    """Looks at this node's images of the run, and changes nothing."""
    judged = []
    for found in images():
        if found.footer is not None and found.footer.repository == repo.id and found.footer.id.run == run:
            judged.append(Judged(found, judge_found(repo, found)))
    wanted = [one for one in judged if isinstance(one.verdict, Adoptable) and not one.verdict.durable]
    return FlushPlan(run, tuple(judged), max(wanted, key=_newness, default=None))


def execute(repo: Repo, plan: FlushPlan, *, report: Report | None = None) -> Flushed | None:
    """Writes the chosen image under an attempt of its own, which is given back; None if there is none. The image goes
    then: it is in the store.

    Raises CorruptionError where the image is not what was sealed, RunInUse if the run has a live owner, Superseded if
    another process has gone on with the run since the plan, and errors of the store.
    """
    if plan.chosen is None or plan.chosen.found.footer is None:
        return None
    footer = plan.chosen.found.footer
    with _held(plan.chosen.found) as slot:
        image = _open(repo, slot, footer)
        try:
            flushed = _written(repo, plan.run, image, report)
        finally:
            image.close()
        crashpoint("flushed image committed, still in memory")
        slot.discard()
    return flushed


def _newness(one: Judged) -> tuple[int, int, int]:
    footer = one.found.footer
    assert footer is not None
    return (footer.holder.attempt, footer.id.step, footer.sequence)


@contextmanager
def _held(found: Found) -> Iterator[LastingSlot]:
    try:
        slot = lasting.take_slot(found.slot)
    except OSError as error:
        raise Superseded(
            f"the image {found.name} is another process's now: {error.strerror or error}",
            subject=found.name,
            hint="holdfast ls --memory",
        ) from error
    try:
        yield slot
    finally:
        slot.leave()


def _open(repo: Repo, slot: LastingSlot, footer: Footer) -> Image:
    with slot.descriptor() as descriptor:
        image = open_image(descriptor, slot.name, chunk_bytes=repo.chunk_bytes)
    if image is None or image.footer != footer:
        raise CorruptionError(f"{slot.name} is no longer what it was", subject=slot.name, hint="holdfast ls --memory")
    return image


def _written(repo: Repo, run: str, image: Image, report: Report | None) -> Flushed:
    manifest = image.manifest()
    index = image.repo.index(manifest, image.footer.rank)
    check_image(image, index)
    verdict = judge(repo, run, image.footer)
    if isinstance(verdict, str):
        raise _gone_on(repo, run, verdict)
    crashpoint("image to be flushed is whole, run not yet claimed")
    try:
        attempt = claim(repo, run, verdict.base, wait_s=0.0, report=report)
    except CheckpointNotFound as error:
        raise _gone_on(repo, run, error.message) from error
    try:
        verdict = judge(repo, run, image.footer)  # as seen now that nobody else can claim unseen
        if isinstance(verdict, str):
            raise _gone_on(repo, run, verdict)
        return _commit(repo, attempt, image, manifest, index)
    finally:
        attempt.release()


def _commit(repo: Repo, attempt: Attempt, image: Image, manifest: Manifest, index: Index) -> Flushed:
    """The same bytes under an identity of its own, put in the order of every save."""
    old = manifest.id
    id = CheckpointId(attempt.run, attempt.number, old.step)
    names = [*(pack.name for pack in index.packs), index_file(index.rank)]
    begin(attempt, id.step, manifest.save_id, names)
    try:
        receipts: list[Receipt] = []
        for pack in index.packs:
            with image.repo.store.open(f"{old.directory}/{pack.name}") as reader:
                view = reader.view()
                assert view is not None
                receipts.append(
                    repo.store.put_if_absent(f"{id.directory}/{pack.name}", Bytes(view), token=manifest.save_id)
                )
        crashpoint("flushed pack durable, index not yet")
        receipt, entry = put_index(repo, id, index)
        crashpoint("flushed image written, not committed")
        commit(repo, replace(manifest, id=id, indexes=(entry,)), [*receipts, receipt])
    except HoldfastError:
        _close(repo, id, manifest.save_id, names)
        raise
    return Flushed(id, old, manifest.bytes)


def _close(repo: Repo, id: CheckpointId, save_id: str, names: Sequence[str]) -> None:
    """What a failed flush put goes, as far as the store lets it; the next claim sees to the rest."""
    try:
        if abort(repo, id, save_id, by="the flush failed"):
            free(repo, id, names=names)
    except HoldfastError:
        pass  # the store is in trouble, which is being raised


def _gone_on(repo: Repo, run: str, why: str) -> Superseded:
    return Superseded(
        f"the image in memory is not written: {why}", subject=run, hint=f"holdfast ls {repo.url} --run {run}"
    )
