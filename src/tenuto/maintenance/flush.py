"""Flush: writes what dead processes left in memory to their store, as a checkpoint like any other.

A state is the image of one process, or those of all ranks of a job, where all of them lie on this node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from tenuto.crashpoints import crashpoint
from tenuto.engine.memory_tier import slot_file
from tenuto.engine.memory_tier.eligibility import EligibleImage, judge, newness
from tenuto.engine.memory_tier.image_store import Image, check_image, open_image
from tenuto.engine.memory_tier.listing import FoundImage, images
from tenuto.engine.memory_tier.seal import Seal
from tenuto.engine.memory_tier.slot_file import LastingSlot
from tenuto.errors import CheckpointNotFound, CorruptionError, KeyMissing, Superseded, TenutoError, typed
from tenuto.maintenance.save_images import save_images
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Receipt
from tenuto.record import record
from tenuto.repo.commit import begin, commit, put_index
from tenuto.repo.format.object_names import index_file
from tenuto.repo.keys import unlock
from tenuto.repo.ownership.claim import Attempt, claim
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import abort, free
from tenuto.store.contract import Bytes

Report = Callable[[str], None]


@record
class JudgedImage:
    """An image of a run, and whether the run may go on from it: else `verdict` says why not."""

    found: FoundImage
    verdict: EligibleImage | str

    @property
    def adoptable(self) -> bool:
        return not isinstance(self.verdict, str)


@record
class FlushPlan:
    """What a flush would write: the first of `states` that is whole, each its images by rank. Nothing if there is
    none."""

    run: str
    images: tuple[JudgedImage, ...]
    states: tuple[tuple[JudgedImage, ...], ...]

    @property
    def chosen(self) -> Seal | None:
        """Returns the seal of the first image that would be written."""
        return self.states[0][0].found.footer if self.states else None


@record
class Flushed:
    """What a flush has written: `id`, of the state that `image` was in memory."""

    id: CheckpointId
    image: CheckpointId
    bytes: int


def unfit(found: FoundImage) -> str:
    """Returns why no process may resume from an image, whatever its repository says; empty if that decides."""
    if found.footer is None:
        return "its process is running" if found.alive else "it was never finished"
    return "its process is running" if found.alive else ""


def judge_found(repo: Repo, found: FoundImage) -> EligibleImage | str:
    """Judges by its seal whether the image's run may resume from it."""
    if found.footer is None or unfit(found):
        return unfit(found)
    return judge(repo, found.footer.id.run, found.footer)


def plan_flush(repo: Repo, run: str) -> FlushPlan:
    """Looks at this node's images of the run, and changes nothing."""
    judged = []
    for found in images():
        if found.footer is not None and found.footer.repository == repo.id and found.footer.id.run == run:
            judged.append(JudgedImage(found, judge_found(repo, found)))
    wanted = [one for one in judged if isinstance(one.verdict, EligibleImage) and not one.verdict.durable]
    return FlushPlan(run, tuple(judged), tuple(whole_states(wanted)))


def lacking(found: FoundImage, among: Iterable[FoundImage]) -> list[int]:
    """Returns the ranks whose images of the same state are not among these; a restart or a flush needs them."""
    if found.footer is None or found.footer.ranks == 1:
        return []
    there = {one.footer.rank for one in among if one.footer is not None and one.footer.save_id == found.footer.save_id}
    return [rank for rank in range(found.footer.ranks) if rank not in there]


def whole_states(wanted: Sequence[JudgedImage]) -> list[tuple[JudgedImage, ...]]:
    """Returns the states of which every rank's image is present, newest first."""
    by_save: dict[str, list[JudgedImage]] = {}
    for one in wanted:
        assert one.found.footer is not None
        by_save.setdefault(one.found.footer.save_id, []).append(one)
    found = [some for some in by_save.values() if not lacking(some[0].found, [one.found for one in some])]
    found.sort(key=lambda some: max(map(_newness, some)), reverse=True)
    return [tuple(sorted(some, key=_rank)) for some in found]


def _rank(one: JudgedImage) -> int:
    assert one.found.footer is not None
    return one.found.footer.rank


def execute(repo: Repo, plan: FlushPlan, *, report: Report | None = None) -> Flushed | None:
    """Writes the newest whole state under an attempt of its own, which is given back; None if there is none. Its images
    go then: it is in the store.

    Raises CorruptionError where the image of a process is not what was sealed, and no state of several ranks is, a
    damaged one of which is passed over, and reported; RunInUse if the run has a live owner, Superseded if another
    process has gone on with the run since the plan, KeyMissing where the repository is sealed and none is given, and
    errors of the store.
    """
    damaged: CorruptionError | None = None
    for state in plan.states:
        try:
            return _flushed(repo, plan.run, state, report)
        except CorruptionError as error:
            if len(state) == 1:
                raise
            damaged = error
            if report is not None:
                report(f"the state that {len(state)} ranks have kept is passed over: {error.message}")
    if damaged is not None:
        raise damaged
    return None


def _flushed(repo: Repo, run: str, state: Sequence[JudgedImage], report: Report | None) -> Flushed:
    unlock(repo, writing=True)
    with opened_state(repo, state) as (opened, slots):
        flushed = _written(repo, run, opened, report)
        crashpoint("flushed image committed, still in memory")
        for image in opened:
            image.close()
        for slot in slots:
            slot.discard()
    return flushed


@contextmanager
def opened_state(repo: Repo, state: Sequence[JudgedImage]) -> Iterator[tuple[list[Image], list[LastingSlot]]]:
    """Opens the images of a state, by rank, and takes their slots for as long as the block lasts. Raises Superseded
    where a process holds one by now, CorruptionError where one is not what was sealed, KeyMissing where they are to be
    written unsealed and their repository is sealed."""
    with ExitStack() as stack:
        slots: list[LastingSlot] = []
        opened: list[Image] = []
        for one in state:
            assert one.found.footer is not None
            if one.found.footer.keyed and repo.keys is None:
                raise KeyMissing(
                    f"what {one.found.footer.id} left in memory is of a sealed repository, and there are no keys in "
                    f"{repo.url}: it would lie there unsealed",
                    subject=repo.url,
                    hint="put the newest object below keys/ back, from a copy of the repository",
                )
            slots.append(stack.enter_context(_open_slot(one.found)))
            opened.append(_open(repo, slots[-1], one.found.footer))
            stack.callback(opened[-1].close)
        yield opened, slots


def _newness(one: JudgedImage) -> tuple[int, int, int]:
    assert one.found.footer is not None
    return newness(one.found.footer)


@contextmanager
def _open_slot(found: FoundImage) -> Iterator[LastingSlot]:
    try:
        slot = slot_file.take_slot(found.slot)
    except OSError as error:
        raise Superseded(
            f"the image {found.name} is another process's now: {error.strerror or error}",
            subject=found.name,
            hint="tenuto ls --memory",
        ) from error
    try:
        yield slot
    finally:
        slot.leave()


def _open(repo: Repo, slot: LastingSlot, footer: Seal) -> Image:
    with slot.descriptor() as descriptor:
        image = open_image(descriptor, slot.name, chunk_bytes=repo.chunk_bytes, keys=repo.keys)
    if image is None or image.footer != footer:
        raise CorruptionError(f"{slot.name} has changed", subject=slot.name, hint="tenuto ls --memory")
    return image


def _written(repo: Repo, run: str, images: Sequence[Image], report: Report | None) -> Flushed:
    for image in images:
        check_image(image, image.repo.index(image.manifest(), image.footer.rank))
    verdict = _judged(repo, run, images)
    crashpoint("image to be flushed is whole, run not yet claimed")
    try:
        # Looked at again right before the claim is put: one that commits nothing would hide what came meanwhile.
        judge_again = partial(_judged, repo, run, images)
        attempt = claim(repo, run, verdict.base, wait_s=0.0, report=report, before_put=judge_again)
    except CheckpointNotFound as error:
        raise _gone_on(repo, run, error.message) from error
    attempt.leave()
    try:
        _judged(repo, run, images)  # as seen now that nobody else can claim unseen
        if len(images) == 1 and repo.keys is None:
            flushed = _commit(repo, attempt, images[0])
        else:  # an image is not sealed: a sealed repository gets other bytes than lie in memory
            id = save_images(repo, attempt, images)
            flushed = Flushed(id, images[0].footer.id, repo.manifest(id).bytes)
        attempt.committed(flushed.id.step)
        return flushed
    finally:
        attempt.release()


def _judged(repo: Repo, run: str, images: Sequence[Image]) -> EligibleImage:
    """Judges the images of all ranks together. Raises Superseded."""
    found: list[EligibleImage] = []
    for image in images:
        verdict = judge(repo, run, image.footer)
        if isinstance(verdict, str):
            raise _gone_on(repo, run, verdict)
        found.append(verdict)
    if len(set(found)) > 1:
        raise _gone_on(repo, run, "its images belong to different lines of training")
    return found[0]


def _commit(repo: Repo, attempt: Attempt, image: Image) -> Flushed:
    """Commits the same bytes under an identity of its own, put in the order of every save."""
    manifest = image.manifest()
    index, old = image.repo.index(manifest, image.footer.rank), manifest.id
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
    except TenutoError:
        _close(repo, id, manifest.save_id, names)
        raise
    return Flushed(id, old, manifest.bytes)


def _close(repo: Repo, id: CheckpointId, save_id: str, names: Sequence[str]) -> None:
    """Frees what a failed flush has put, as far as the store permits; the next claim frees the rest."""
    try:
        if abort(repo, id, save_id, by="the flush failed"):
            free(repo, id, names=names)
    except TenutoError:
        pass  # the store is in trouble, which is being raised


def _gone_on(repo: Repo, run: str, why: str) -> Superseded:
    return Superseded(
        f"the image in memory is not written: {why}", subject=run, hint=typed("tenuto", "ls", repo.url, "--run", run)
    )
