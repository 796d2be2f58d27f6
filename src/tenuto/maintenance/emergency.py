"""Emergency places: where the newest state goes when the run's own store does not take it at the end of a training.

Each is a directory or URL for any number of repositories. What lies there of one is a copy of it, with its claims and
at most the checkpoints that its own store did not take, under the names that they would have had in that store. So the
rules of runs hold there too: `latest` is what the highest attempt that is announced there has put. The own store
decides: a state is taken over from there, as a checkpoint of an attempt of its own, where training has not gone on from
something else. Of a sealed repository it has the key ring too, and what lies there is sealed by the same keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from tenuto.concurrency.deadlines import while_moving, within
from tenuto.crashpoints import crashpoint
from tenuto.engine.memory_tier.eligibility import EligibleImage, judge_line, of_another_run
from tenuto.engine.memory_tier.image_store import check_image
from tenuto.engine.memory_tier.listing import images
from tenuto.engine.memory_tier.seal import SealHolder
from tenuto.engine.save.commit_protocol import CommitProtocol
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    DeadlineExceeded,
    KeyMissing,
    ObjectNotFound,
    OwnershipError,
    RepositoryError,
    RunNotFound,
    StoreError,
    TenutoError,
    in_words,
    typed,
)
from tenuto.events import Emitter
from tenuto.maintenance.checkpoint_copy import CheckpointCopier
from tenuto.maintenance.copy_record import mark_copy, put_whole
from tenuto.maintenance.flush import JudgedImage, opened_state, whole_states
from tenuto.maintenance.place_copy import put_small
from tenuto.maintenance.replica_tidy import free_in
from tenuto.maintenance.save_images import save_images
from tenuto.model.ids import CheckpointId
from tenuto.record import record
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.object_names import KEYS, numbered
from tenuto.repo.format.small_records import decode_begin, encode_attempt
from tenuto.repo.identity import Identity, read_identity
from tenuto.repo.keys import unlock
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.claim import Attempt, claim, joined
from tenuto.repo.refs import numbers
from tenuto.repo.replicated.members import member_in
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import close_unfinished
from tenuto.state.contract import Flattened
from tenuto.store.contract import Store
from tenuto.store.registry import open_store
from tenuto.store.wrappers.watched import WatchedStore

AFTER_S: Final = 10.0
"""Seconds without progress after which a store counts as one that does not answer."""
ANSWER_S: Final = 10.0
"""How long a start waits for an emergency place."""
LOOK_S: Final = 30.0
"""How long it waits to know what lies there: training on without it leaves that behind."""
BYTES_PER_S: Final = 1 << 30
"""At what rate at least an image is verified before anything of it goes to a store."""
_ID_DIGITS: Final = 12

Report = Callable[[str], None]


def place_in(directory: str, repository: str) -> str:
    """Returns where the repository of this id has its copy in an emergency directory."""
    name = repository[:_ID_DIGITS]
    if "://" not in directory:
        return os.path.join(os.path.abspath(os.path.expanduser(directory)), name)
    parts = urlsplit(directory)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def open_place(url: str, repo: Repo) -> Repo:
    """Returns the repository as an emergency place has it, by itself. A path of a file system that hangs hangs here."""
    there = Repo(open_store(url), repo.id, repo.chunk_bytes)
    there.share_keys(repo)
    return there


def reached_place(url: str, repo: Repo, seconds: float) -> Repo:
    """Returns the repository as an emergency place has it. Raises DeadlineExceeded where it does not answer."""

    def reach() -> Repo:
        there = open_place(url, repo)
        there.store.children("")
        return there

    return within(seconds, f"asking {url}", reach, subject=url)


def prepare(repo: Repo, url: str, attempt: Attempt) -> None:
    """Announces a claimed attempt in an emergency place, which is made a copy of the repository if need be; closes what
    earlier attempts have begun there. From then on those put nothing there that anybody takes over.

    Raises RepositoryError where something else lies there, or keys that are not the repository's, Superseded where a
    later attempt is announced there, and StoreError.
    """
    there = open_place(url, repo)
    mark_copy(repo, there.store)
    _bring_ring(repo, there)
    name = object_names.attempt_name(attempt.run, attempt.number)
    put_small(there.store, name, encode_attempt(attempt.record, repo.id, repo.signer))
    joined(there, attempt.record).check()
    for earlier in there.attempts(attempt.run):
        if earlier < attempt.number:
            by = "a later attempt is announced"
            close_unfinished(there, attempt.run, earlier, by=by, owner_dead=False, report=_ignore)
            if not there.steps(attempt.run, earlier):
                there.store.delete([object_names.attempt_name(attempt.run, earlier)])


def _bring_ring(repo: Repo, there: Repo) -> None:
    """Brings the place the key ring that counts, and removes older ones: slots that were removed open those. Raises
    RepositoryError where what lies there may be all that is left of keys, or this process would save there unsealed."""
    ours, theirs = (numbers(one, KEYS) for one in (repo, there))
    if not ours and not theirs:
        return
    if ours and repo.keys is None:
        raise RepositoryError(f"{repo.url} was sealed after this process had opened it", subject=repo.url)
    name, newest = numbered(KEYS, max(ours, default=0)), max(theirs, default=0)
    if ours and ours[-1] >= newest:
        data = repo.store.get(name, limit=objects.SMALL)
        put_whole(there.store, name, data)
        if there.store.get(name, limit=objects.SMALL) == data:
            there.store.delete([numbered(KEYS, one) for one in theirs if one != ours[-1]])
            return
    raise RepositoryError(
        f"its key ring {numbered(KEYS, newest)} is none that {repo.url} has: were keys lost there?",
        subject=there.url,
        hint=f"put it back into {repo.url}, or remove {KEYS} in {there.url}, and what it sealed",
    )


def save_there(
    there: Repo,
    attempt: Attempt,
    flattened: Flattened,
    step: int,
    about: ManifestDetails,
    *,
    protocol: CommitProtocol,
    patience_s: float,
) -> CheckpointId:
    """Saves a state, as it is, in an emergency place in which this attempt is announced. Raises DeadlineExceeded once
    the place has not got on for `patience_s`, StoreError where the attempt is not announced there any more; what a save
    raises."""
    found = within(patience_s, f"asking {there.url}", partial(there.attempts, attempt.run), subject=there.url)
    if attempt.number not in found:
        raise StoreError(
            f"{there.url} has lost what was there at the start of the training",
            subject=there.url,
            hint="is it mounted?",
        )
    saver = Saver(there, attempt.run, lasting=False, protocol=protocol)
    saver.attempt = joined(there, attempt.record)
    try:
        handle = saver.plan_save(step, reason=about.reason)
        handle.patience_s = patience_s
        saver.save(flattened, step, wait=True, about=about, handle=handle, eager=True)
        if handle.error is not None:
            raise handle.error
        return handle.id
    finally:
        saver.close()


def _identity(store: Store) -> Identity | None:
    """Returns what a place says of its repository; None where it is no copy of one."""
    identity, member = read_identity(store), member_in(store)
    return identity[0] if identity is not None and member is not None and member.copy else None


def _ignore(message: str) -> None:
    """Reports nothing: what is damaged there is of no attempt that counts."""


# --------------------------------------------------------------------------------------------------
# The next start.


@record
class EmergencyCheckpoint:
    """A checkpoint in an emergency place, and whether its run may go on from it: else `verdict` says why not.
    `obsolete`: the run's own store has the state, or a later one of the same attempt. `damaged`: nobody can take it."""

    there: Repo
    id: CheckpointId
    verdict: EligibleImage | str
    obsolete: bool = False
    damaged: bool = False


@record
class _Held:
    """A checkpoint in an emergency place, as that has it. `newest`: whether it is what `latest` means there; `damage`:
    why it cannot be read."""

    id: CheckpointId
    newest: bool
    claim: str = ""
    save_id: str = ""
    content: str = ""
    damage: str = ""


def _held(there: Repo, run: str) -> list[_Held]:
    """Returns what lies in an emergency place of the run; empty where nothing of the repository is there."""
    identity = _identity(there.store)
    if identity is None or identity.id != there.id:
        return []
    try:
        newest = latest(there, run)
    except (CheckpointNotFound, RunNotFound):
        newest = None
    found = []
    for number in there.attempts(run):
        for step in there.committed(run, number):
            id = CheckpointId(run, number, step)
            try:
                record = there.find_attempt(run, number)
                begin = decode_begin(there.store.get(object_names.begin_name(id), limit=objects.SMALL), id, there.id)
                manifest, claim = there.manifest(id), "" if record is None else record.id
                found.append(_Held(id, id == newest, claim, begin.save_id, manifest.content))
            except (CorruptionError, CheckpointNotFound, KeyMissing, ObjectNotFound) as error:
                found.append(_Held(id, id == newest, damage=_unreadable(error)))
    return found


def _unreadable(error: TenutoError) -> str:
    return f"it {'cannot be opened' if isinstance(error, KeyMissing) else 'is damaged'}: {error.message}"


def _judged(repo: Repo, there: Repo, held: _Held) -> EmergencyCheckpoint:
    """Judges it by the run's own store, whose errors are raised."""
    id = held.id
    if held.damage:
        return EmergencyCheckpoint(there, id, held.damage, damaged=True)
    try:
        ours = repo.find_attempt(id.run, id.attempt)
    except CorruptionError as error:
        return EmergencyCheckpoint(there, id, f"whose it is cannot be read: {error.message}")
    if ours is None or ours.id != held.claim:
        return EmergencyCheckpoint(there, id, f"attempt {id.attempt} is another one's in {repo.url}")
    if _is_stored(repo, id, held.content):
        return EmergencyCheckpoint(there, id, "it is in the store", obsolete=True)
    if not held.newest:
        return EmergencyCheckpoint(there, id, "a later attempt is announced there")
    holder = SealHolder(id.attempt, held.claim)
    return EmergencyCheckpoint(there, id, judge_line(repo, id.run, id, held.save_id, holder))


def _is_stored(repo: Repo, id: CheckpointId, content: str) -> bool:
    """Returns whether the run's own store has the state: from the attempt itself, at its step or later, or as the
    newest checkpoint."""
    committed = repo.committed(id.run, id.attempt)
    if committed and committed[0] >= id.step:
        return True
    newest = latest(repo, id.run)
    try:
        return newest is not None and newest.step == id.step and repo.manifest(newest).content == content
    except (CorruptionError, CheckpointNotFound):
        return False


def take_over(
    repo: Repo, run: str, urls: Iterable[str], *, report: Report, beyond: tuple[int, int] = (0, 0), **options: Any
) -> CheckpointId | None:
    """Brings the run's own store the newest state that lies in one of these emergency places, where the run may go on
    from it, as a checkpoint of an attempt of its own, which is given back; returns under what name it lay there. Every
    byte is verified. What is in the store then goes from the emergency place; what training has left behind stays, and
    is reported, and so is what is damaged, or is not what a holder of the repository's keys has put there.

    `beyond`: attempt and step of the newest state in this process's memory, which is resumed from where it is newer.
    `options`: of the claim. Raises RunInUse where the run has a live owner, and errors of its own store: training on
    from something older would leave the state behind.
    """
    found: list[EmergencyCheckpoint] = []
    for url in urls:
        try:
            there = reached_place(url, repo, LOOK_S)
            held = within(LOOK_S, f"looking into {url}", partial(_held, there, run), subject=url)
        except (StoreError, RepositoryError, CorruptionError, DeadlineExceeded) as error:
            report(f"what may lie in the emergency location {url} is not taken over: {error.message}")
            continue
        found += [_judged(repo, there, one) for one in held]
    eligible = [one for one in found if isinstance(one.verdict, EligibleImage)]
    newer = [one for one in eligible if (one.id.attempt, one.id.step) >= beyond]
    newer.sort(key=lambda one: (one.id.attempt, one.id.step), reverse=True)  # the places in their order
    tries = (_taken_over(repo, one, report, options) for one in newer)
    made = next((one for one in tries if one is not None), None)
    for one in found:
        if one.obsolete or (made is not None and one.id == made[0].id):
            _free(one, report)
        elif isinstance(one.verdict, str):
            _report_left(repo, one, one.verdict, report)
    if made is None:
        return None
    report(f"took over step {made[1].step} of run {run} from the emergency location {made[0].there.url}: {made[1]}")
    return made[0].id


def _report_left(repo: Repo, one: EmergencyCheckpoint, why: str, report: Report) -> None:
    url, word = one.there.url, f"{one.id.run}/a{one.id.attempt}/{one.id.step}"
    taken = "" if one.damaged else f" `{typed('tenuto', 'cp', url, word, repo.url)} --to-run NEWRUN` takes it;"
    report(
        f"step {one.id.step} of run {one.id.run} in the emergency location {url} is left alone: {why};{taken} it goes "
        f"with its directory {one.id.directory} there"
    )


def _free(one: EmergencyCheckpoint, report: Report) -> None:
    url = one.there.url
    try:
        within(ANSWER_S, f"freeing {one.id} in {url}", partial(free_in, one.there.store, one.id), subject=url)
    except (StoreError, DeadlineExceeded) as error:
        report(f"{one.id} is in the store, and stays in the emergency location {url}: {error.message}")


def _taken_over(
    repo: Repo, chosen: EmergencyCheckpoint, report: Report, options: dict[str, Any]
) -> tuple[EmergencyCheckpoint, CheckpointId] | None:
    """Returns None where another process has taken it over meanwhile, the run went on otherwise, or it is damaged."""
    id, there = chosen.id, chosen.there
    assert isinstance(chosen.verdict, EligibleImage)

    def judge_again() -> None:
        now = next((one for one in _held(there, id.run) if one.id == id), None)
        if now is None or _judged(repo, there, now).verdict != chosen.verdict:
            raise CheckpointNotFound(f"{id} in {there.url} is another process's by now", subject=str(id))

    try:
        attempt = claim(repo, id.run, chosen.verdict.base, before_put=judge_again, report=report, **options)
    except CheckpointNotFound as error:
        report(f"step {id.step} in the emergency location {there.url} is not taken over: {error.message}")
        return None
    attempt.leave()
    copier = CheckpointCopier(there, attempt, shares=False, emitter=Emitter())
    try:
        copier.write(id, id.step)
        made = copier.show()[0].id
        crashpoint("emergency checkpoint taken over, still in its place")
        return chosen, made
    except (CorruptionError, KeyMissing) as error:
        _report_left(repo, replace(chosen, damaged=True), _unreadable(error), report)
        return None
    except StoreError as error:
        report(f"step {id.step} of run {id.run} stays in the emergency location {there.url}: {error.message}")
        raise
    finally:
        try:
            copier.take_back()
        finally:
            attempt.release()


# --------------------------------------------------------------------------------------------------
# What dead processes left in memory.


def flush_there(url: str, report: Report, *, patience_s: float = AFTER_S) -> list[CheckpointId]:
    """Writes the newest whole state that dead processes of this machine have left in memory to an emergency place, for
    each run of which the attempt is announced there last. It stays in memory as well. Returns what is there then.

    Asks nothing of the run's own store. Raises what the place raises, DeadlineExceeded where it does not get on,
    KeyMissing where it is of a sealed repository and nothing opens its keys, and CorruptionError for a damaged image.
    """
    store = WatchedStore(within(patience_s, f"asking {url}", partial(open_store, url), subject=url))
    identity = within(patience_s, f"asking {url}", partial(_identity, store), subject=url)
    if identity is None:
        raise StoreError(f"the training has not announced itself in {url}", subject=url)
    there = Repo(store, identity.id, identity.chunk_bytes)
    within(patience_s, f"reading the keys in {url}", partial(unlock, there, writing=True), subject=url)
    saved = []
    for run in sorted({one.footer.id.run for one in images(repository=there.id) if one.footer is not None}):
        found = [one for one in images(repository=there.id) if one.footer is not None and one.footer.id.run == run]
        work = partial(_flushed, there, run, found, report)
        seconds = patience_s + sum(one.bytes for one in found) / BYTES_PER_S
        id = while_moving(seconds, f"writing to {url}", work, lambda: store.moved_s, subject=url)
        saved += [] if id is None else [id]
    return saved


def _flushed(there: Repo, run: str, found: Sequence[Any], report: Report) -> CheckpointId | None:
    number = max(there.attempts(run), default=0)
    record = there.find_attempt(run, number) if number else None
    if record is None:
        return None
    holder = SealHolder(number, record.id)  # says whose they are: of the run's own directory this is always a copy
    fit = [
        JudgedImage(one, EligibleImage(None, durable=False))
        for one in found
        if not one.alive and not of_another_run(there, run, one.footer) and one.footer.holder == holder
    ]
    for state in whole_states(fit):
        footer = state[0].found.footer
        assert footer is not None
        id, newest = CheckpointId(run, number, footer.id.step), there.committed(run, number)
        if newest and newest[0] >= id.step:  # its own process has put it there, or a newer one
            return CheckpointId(run, number, newest[0])
        # What its own processes have begun there: they are dead, as the locks of their slots say.
        free_in(there.store, id)
        try:
            if footer.keyed and there.keys is not None:
                # Whoever can write there may have put another ring: of a service that this process asks too.
                there.keys.check_object(footer.save_id.encode(), footer.keyed, f"the key ring in {there.url}")
            with ExitStack() as stack:
                opened, _ = stack.enter_context(opened_state(there, state))
                for image in opened:
                    check_image(image, image.repo.index(image.manifest(), image.footer.rank))
                return save_images(there, joined(there, record), opened)
        except CorruptionError as error:
            report(f"step {footer.id.step} in memory is passed over: {error.message}")
    return None


def flush_anywhere(urls: Iterable[str], report: Report) -> str | None:
    """Writes what is left in memory to the first of these emergency places that takes it; returns in words what was
    saved where, None where none takes it, which is reported, or nothing is left."""
    for url in urls:
        try:
            saved = flush_there(url, report)
        except (TenutoError, OSError) as error:
            if isinstance(error, OwnershipError):
                report(f"nothing goes to the emergency location {url}: {in_words(error)}")
                return None
            report(f"the emergency location {url} does not take it either: {in_words(error)}")
            continue
        if saved:
            return (
                f"{', '.join(map(str, saved))} in the emergency location {url}, from which the next start takes it over"
            )
    return None
