"""Which places a repository lies in: its home has a list of them, and each says whose it is.

`places/<place>-<member>.json` in the home names a place and the member that was there; `tenuto-member.json` in the
place says which member it is. A place belongs to the repository for whoever finds that member in it: a directory of one
name on each node is one place, and another member on each.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Final

from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    ObjectNotFound,
    RepositoryError,
    StoreDenied,
    StoreError,
    TenutoError,
    UsageError,
)
from tenuto.model.records import Json
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.objects import Fields
from tenuto.repo.replicated.replica import UnreachableReplica, holds
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.store.contract import Store
from tenuto.store.registry import open_store

_KEY: Final = 12


@dataclass(frozen=True, slots=True)
class Member:
    """A place of a repository, as it says of itself. `node`: which one's it is; empty where it is no node's own."""

    id: str
    repository: str
    home: str
    node: str


def known(store: Store, repository: str) -> Store:
    """The store of a repository that has been opened in `store`, with the other places of it that are found here.

    Raises RepositoryError where `store` is given as the home of others, and is a place of another one itself.
    """
    declared = isinstance(store, ReplicatedStore)
    home = store.home if isinstance(store, ReplicatedStore) else store
    itself = member_in(home)
    if itself is not None:
        if declared:
            raise one_of_many(home.url, itself.home)
        return ReplicatedStore(home, [home], 1, of=itself.home)
    names = _names(home)
    if not isinstance(store, ReplicatedStore):
        if not names:
            return store
        store = ReplicatedStore(home, [home], 1)
    given = {member.url for member in store.members}
    store.beside = tuple(_found(home, names, repository, given, store.node))
    store.mirrors = tuple(place for place in store.beside if not node_of(place))
    store.away = cache(partial(_away, store))  # a list of thousands is read once
    return store


def _away(places: ReplicatedStore) -> list[UnreachableReplica]:
    """The places on the list that are not found from here. Of one whose disk was replaced the old one is no longer
    looked for."""
    said = {place.url: member for place in places.others if (member := _describe(place)) is not None}
    listed = {_name(url, member.id) for url, member in said.items()}
    here = {UnreachableReplica(url, member.node) for url, member in said.items()}
    told = (_told(places.home, name) for name in _names(places.home) if name not in listed)
    found = {UnreachableReplica(one.text("url"), one.text("node")) for one in told if one is not None}
    return sorted(found - here, key=str)


def _describe(place: Store) -> Member | None:
    try:
        return member_in(place)
    except TenutoError:
        return None


def one_of_many(url: str, home: str) -> RepositoryError:
    """What is said to whoever wants to train in a place that is not the home."""
    return RepositoryError(
        f"{url} is one of the places of the repository whose home is {home}",
        subject=url,
        hint=f"give {home}; where that is lost for good, remove {object_names.MEMBER} from a place that holds all "
        "packs: then that is the home",
    )


def _found(home: Store, names: Sequence[str], repository: str, given: set[str], node: str) -> Iterator[Store]:
    """The places on the list that are there, and have a member that is on it."""
    listed = set(names)
    for _, some in groupby(sorted(names), key=lambda name: name[:_KEY]):
        url = next((told.text("url") for name in some if (told := _told(home, name)) is not None), None)
        if url is None or url in given:
            continue
        try:
            store = open_store(url)
            member = member_in(store)
        except TenutoError:
            continue  # nothing of this repository is found there; what is missed is told where it is wanted
        if member is None or member.repository != repository or _name(url, member.id) not in listed:
            continue
        if not (node and member.node and member.node != node):
            yield store


def _names(home: Store) -> list[str]:
    """What is on the list; what else lies there is somebody else's, as is a directory that may not be listed."""
    try:
        return [name for name in home.children(object_names.PLACES).objects if object_names.is_place(name)]
    except StoreDenied:
        return []


def _name(url: str, member: str) -> str:
    return f"{hashlib.sha256(url.encode()).hexdigest()[:_KEY]}-{member}.json"


def _told(home: Store, name: str) -> Fields | None:
    """What the list says of a place; None where the object is damaged, or gone."""
    whole = f"{object_names.PLACES}/{name}"
    try:
        return objects.decode("place", whole, home.get(whole, limit=objects.SMALL))
    except (CorruptionError, StoreError):
        return None


def node_of(place: Store) -> str:
    """Which node's the place is; empty where it is no node's own, or does not say."""
    member = _describe(place)
    return member.node if member is not None else ""


def member_in(store: Store) -> Member | None:
    """What a place says of itself; None where it says nothing. CorruptionError where that is damaged."""
    try:
        data = store.get(object_names.MEMBER, limit=objects.SMALL)
    except ObjectNotFound:
        return None
    found: Fields = objects.decode("member", object_names.MEMBER, data)
    return Member(found.hex("id", 32), found.hex("repository", 32), found.text("home"), found.text("node"))


def join(store: Store, repository: str) -> tuple[str, ...]:
    """Makes each place that packs are put into known to the home, and the home to it. The members, by place; empty for
    one that cannot be reached, which is told where there are enough without it.

    Raises RepositoryError where another repository lies in one of them; StoreError.
    """
    if not isinstance(store, ReplicatedStore):
        return ()
    spare, members = len(store.packs_in) - store.copies, []
    for place in store.packs_in:
        if place is store.home:
            continue
        follower = store.follower(place)
        try:
            members.append(_join(store, place, repository))
            follower.mark = place.get(object_names.MEMBER, limit=objects.SMALL)
        except (StoreError, CorruptionError) as error:
            spare -= 1
            if spare < 0:
                raise
            store.warn(f"{place.url} is left out: {error.message}")
            members.append("")
            follower.mark = b""
    return tuple(members)


def _join(places: ReplicatedStore, place: Store, repository: str) -> str:
    there = member_in(place)
    before = _names(places.home)
    if there is None:
        there = _mark(places, place, repository)
    if there.repository != repository:
        raise _another(place)
    own = _name(place.url, there.id)
    others = [one for one in before if one[:_KEY] == own[:_KEY]]
    if others and own not in others and not places.declared.per_node:
        places.warn(f"{place.url} is not the place that it was: what was put there before is not found")
    _list(places, place, there)
    return there.id


def _check_empty(places: ReplicatedStore, place: Store) -> None:
    """Raises RepositoryError where something of a repository lies there that is none of its places yet."""
    whose = places.home.get(object_names.REPOSITORY, limit=objects.SMALL)
    try:
        if place.get(object_names.REPOSITORY, limit=objects.SMALL) != whose:
            raise _another(place)
    except ObjectNotFound:
        return
    if place.children(object_names.RUNS).directories:
        raise RepositoryError(
            f"{place.url} has checkpoints of its own: it is a copy of {places.home.url}, or was made a home",
            subject=place.url,
            hint="give an empty directory",
        )


def _list(places: ReplicatedStore, place: Store, member: Member) -> None:
    """Puts the place on the list, unless it is on it."""
    name = f"{object_names.PLACES}/{_name(place.url, member.id)}"
    body: dict[str, Json] = {
        "member": member.id,
        "node": member.node,
        "repository": member.repository,
        "url": place.url,
    }
    try:
        objects.put(places.home, name, objects.encode("place", name, body), token=secrets.token_hex(16))
    except AlreadyExists:
        pass


def _mark(places: ReplicatedStore, place: Store, repository: str) -> Member:
    """Makes it a member: on the list first, which is not to be found in the place itself."""
    node = (places.node or socket.gethostname()) if places.declared.per_node else ""
    made = Member(secrets.token_hex(16), repository, places.home.url, node)
    _list(places, place, made)
    name = f"{object_names.PLACES}/{_name(place.url, made.id)}"
    body: dict[str, Json] = {"home": made.home, "id": made.id, "node": node, "repository": repository}
    try:
        if holds(place, name):
            raise UsageError(
                f"{place.url} and {places.home.url} are one directory by two names",
                subject=place.url,
                hint="give another directory",
            )
        _check_empty(places, place)
        places.follower(place).bring(object_names.REPOSITORY)
        objects.put(place, object_names.MEMBER, objects.encode("member", object_names.MEMBER, body), token=made.id)
    except TenutoError as error:
        places.home.delete([name])
        there = member_in(place) if isinstance(error, AlreadyExists) else None
        if there is None:
            raise
        return there
    return made


def _another(place: Store) -> RepositoryError:
    return RepositoryError(
        f"another repository lies in {place.url}", subject=place.url, hint="give an empty directory, or the one it had"
    )
