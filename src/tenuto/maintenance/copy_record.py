"""Copies of a repository elsewhere: what each says of itself, the list of them in the primary, and making one primary.

A copy has a member record (`tenuto-member.json`) like any place that is not the primary, so nobody trains in it by
accident. The record also says that it is a copy: the primary neither reads from it nor removes anything there.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from itertools import islice

from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    NotARepository,
    NothingRestorable,
    ObjectNotFound,
    RemovalRefused,
    RepositoryError,
    StoreDenied,
    StoreError,
    UsageError,
    typed,
)
from tenuto.maintenance.inspect import inspect
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.record import record
from tenuto.repo.format import object_names, objects
from tenuto.repo.identity import NAMES, Identity, read_identity
from tenuto.repo.lineage import walk
from tenuto.repo.replicated.members import Member, member_in
from tenuto.repo.replicated.places import home_of, places_of
from tenuto.repo.replicated.replica import exists
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store
from tenuto.store.registry import open_store

_LOOKED_AT = 20
"""How many checkpoints of a run are looked at for a whole one."""


@record
class RegisteredCopy:
    """An entry of the primary's list. `name`: its object's."""

    url: str
    member: str
    name: str


def primary_of(repo: Repo) -> str:
    """Returns where the repository's primary is: here, or as this location says."""
    places = places_of(repo.store)
    return places.of if places is not None and places.of else repo.url


# --------------------------------------------------------------------------------------------------
# Becoming a copy.


def identity_of(repo: Repo) -> Identity:
    """Returns what an open repository says of itself. Raises StoreError if it is not there any more."""
    found = read_identity(repo.store)
    if found is None or found[0].id != repo.id:
        raise StoreError(
            f"the repository that was at {repo.url} is not there now", subject=repo.url, hint="is its disk mounted?"
        )
    return found[0]


def check_target(repo: Repo, target: Store) -> Member | None:
    """Returns what a place that shall get a copy says of itself; None where nothing of a repository is there yet, or
    where its record is damaged and the rest is this repository's.

    Raises RepositoryError where something else is there: another repository, a primary, or one of this repository's
    locations.
    """
    try:
        member, record = member_in(target), True
    except CorruptionError:
        member, record = None, False
    found = read_identity(target)
    if (found is not None and found[0].id != repo.id) or (member is not None and member.repository != repo.id):
        raise RepositoryError(
            f"another repository lies in {target.url}",
            subject=target.url,
            hint="give an empty directory, or the copy that was made before",
        )
    if member is not None and not member.copy:
        raise RepositoryError(
            f"{target.url} is one of the repository's own locations, not a copy",
            subject=target.url,
            hint=f"{typed('tenuto', 'replicate', member.home)} brings it what it lacks",
        )
    if member is None and record and (found is not None or target.children(object_names.RUNS).directories):
        raise RepositoryError(
            f"{target.url} is a primary of its own: nothing is copied over it",
            subject=target.url,
            hint="give an empty directory, or the copy that was made before",
        )
    return member


def become_copy(repo: Repo, target: Store) -> str | None:
    """Makes the target a copy of this repository, unless it is one; puts it on the primary's list. Returns why it is
    not on the list, None if it is. Raises like `check_target`."""
    return _register(repo, target, mark_copy(repo, target))


def mark_copy(repo: Repo, target: Store) -> Member:
    """Makes the target a copy of this repository, unless it is one, which the primary's list does not have. Raises like
    `check_target`."""
    member = check_target(repo, target) or _mark(repo, target)
    identity = identity_of(repo)
    for name in NAMES:
        put_whole(target, name, identity.encode(name))
    return member


def _mark(repo: Repo, target: Store) -> Member:
    """Puts the member record, before anything else: without one, what lies there would be a primary."""
    made = Member(secrets.token_hex(16), repo.id, primary_of(repo), "", copy=True)
    body = {"copy": True, "follows": False, "home": made.home, "id": made.id, "node": ""}
    data = objects.encode("member", object_names.MEMBER, body, repo.id)
    try:
        put_whole(target, object_names.MEMBER, data)
    except AlreadyExists:  # another process copies to the same place
        return check_target(repo, target) or made
    return made


def is_copy(target: Store) -> bool:
    """Returns whether the target has some of a copy, whosever."""
    return exists(target, object_names.MEMBER)


def put_whole(target: Store, name: str, data: bytes) -> None:
    """Puts a sealed object, in place of a damaged one; one that is whole stays."""
    try:
        there = target.get(name, limit=objects.SMALL)
    except ObjectNotFound:
        there = b""
    except CorruptionError:
        there = b"too long"
    if there and canonical_json.is_sealed(there, name):
        return
    if there:
        target.delete([name])
    objects.put(target, name, data, token=secrets.token_hex(16))


def _register(repo: Repo, target: Store, member: Member) -> str | None:
    places = places_of(repo.store)
    if places is not None and places.of:
        return f"{repo.url} is a copy itself: only a primary lists its copies"
    place = hashlib.sha256(target.url.encode()).hexdigest()[:12]
    name = f"{object_names.COPIES}/{place}-{member.id}.json"
    data = objects.encode("copy", name, {"member": member.id, "url": target.url}, repo.id)
    home = home_of(repo.store)
    try:
        # Another one that was there once is gone: a place holds one copy.
        before = [file for file in home.children(object_names.COPIES).objects if file.startswith(place)]
        home.delete([old for file in before if (old := f"{object_names.COPIES}/{file}") != name])
        put_whole(home, name, data)
    except StoreError as error:
        return error.message
    return None


def registered_copies(repo: Repo) -> Iterator[RegisteredCopy]:
    """Yields the copies on the primary's list. An entry that cannot be read is left to `verify`, which names it."""
    home = home_of(repo.store)
    for file in home.children(object_names.COPIES).objects:
        name = f"{object_names.COPIES}/{file}"
        if object_names.is_place(file):
            try:
                found = objects.decode("copy", name, home.get(name, limit=objects.SMALL), repo.id)
                yield RegisteredCopy(found.text("url"), found.hex("member", 32), name)
            except (ObjectNotFound, CorruptionError):
                continue


# --------------------------------------------------------------------------------------------------
# Promoting: a location becomes the primary, since the primary is lost.


@record
class PromotePlan:
    """`lost`: the former primary, and `why` it counts as lost. `newest`: of each run, the newest checkpoint that is
    there with everything that it needs."""

    where: str
    lost: str
    why: str
    newest: tuple[CheckpointId, ...]


def plan_promote(repo: Repo) -> PromotePlan:
    """Raises RemovalRefused while the primary answers, NothingRestorable where no checkpoint is complete here, and
    UsageError for a primary."""
    home = home_of(repo.store)
    member = member_in(home)
    if member is None:
        raise UsageError(f"{repo.url} is a primary already", subject=repo.url)
    why = _why_lost(repo, member)
    if not home.probe().commits:
        raise RepositoryError(
            f"{repo.url} cannot be a primary: it lets a second writer replace an object that exists",
            subject=repo.url,
            hint=f"{typed('tenuto', 'replicate', repo.url, 'ANOTHER')} copies it to a place that can",
        )
    newest, some = [], False
    for run in repo.runs():
        for id in islice(walk(repo, run), _LOOKED_AT):
            some = True
            if not inspect(repo, id).harmed:
                newest.append(id)
                break
    if some and not newest:
        raise NothingRestorable(
            f"no checkpoint is complete in {repo.url}: other locations have the rest",
            subject=repo.url,
            hint="promote a location that has all data files, such as a mirror or a copy",
        )
    return PromotePlan(repo.url, member.home, why, tuple(newest))


def _why_lost(repo: Repo, member: Member) -> str:
    """Returns why the primary counts as lost. Raises RemovalRefused if it answers, and the error of one that may be
    there and cannot be asked."""
    try:
        primary = open_store(member.home)
        found = read_identity(primary)
    except CorruptionError as error:
        raise _answers(repo, member, f"it is there, but {error.message}") from None
    except StoreDenied:
        raise
    except (StoreError, NotARepository) as error:
        return error.message
    if found is None or found[0].id != repo.id:
        return "nothing of this repository is there"
    if member_in(primary) is not None:
        return "it is a copy now"
    raise _answers(repo, member, "it is there and can be read")


def _answers(repo: Repo, member: Member, how: str) -> RemovalRefused:
    return RemovalRefused(
        f"{repo.url} stays a copy: its primary {member.home} answers ({how})",
        subject=repo.url,
        hint=f"train in {member.home}; to have a second line of training, remove {object_names.MEMBER} from the copy",
    )


def promote(repo: Repo) -> None:
    """Makes this location the primary, from the next start on: removes its member record."""
    home = home_of(repo.store)
    home.delete([object_names.MEMBER])
