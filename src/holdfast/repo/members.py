"""Which places a repository lies in: its home has a list of them, and each says whose it is.

`places/<place>-<member>.json` in the home names a place and the member that was there; `holdfast-member.json` in the
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

from holdfast.errors import (
    AlreadyExists,
    CorruptionError,
    HoldfastError,
    ObjectNotFound,
    RepositoryError,
    StoreDenied,
    StoreError,
    UsageError,
)
from holdfast.model.checkpoint import Json
from holdfast.repo import layout, objects
from holdfast.repo.follower import Away, holds
from holdfast.repo.objects import Fields
from holdfast.repo.places import Places
from holdfast.store.contract import Store
from holdfast.store.registry import open_store

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
    declared = isinstance(store, Places)
    home = store.home if isinstance(store, Places) else store
    itself = member_in(home)
    if itself is not None:
        if declared:
            raise one_of_many(home.url, itself.home)
        return Places(home, [home], 1, of=itself.home)
    names = _names(home)
    if not isinstance(store, Places):
        if not names:
            return store
        store = Places(home, [home], 1)
    given = {member.url for member in store.members}
    store.beside = tuple(_found(home, names, repository, given, store.node))
    store.mirrors = tuple(place for place in store.beside if not node_of(place))
    store.away = cache(partial(_away, store))  # a list of thousands is read once
    return store


def _away(places: Places) -> list[Away]:
    """The places on the list that are not found from here. Of one whose disk was replaced the old one is no longer
    looked for."""
    said = {place.url: member for place in places.others if (member := _said(place)) is not None}
    listed = {_name(url, member.id) for url, member in said.items()}
    here = {Away(url, member.node) for url, member in said.items()}
    told = (_told(places.home, name) for name in _names(places.home) if name not in listed)
    found = {Away(one.text("url"), one.text("node")) for one in told if one is not None}
    return sorted(found - here, key=str)


def _said(place: Store) -> Member | None:
    try:
        return member_in(place)
    except HoldfastError:
        return None


def one_of_many(url: str, home: str) -> RepositoryError:
    """What is said to whoever wants to train in a place that is not the home."""
    return RepositoryError(
        f"{url} is one of the places of the repository whose home is {home}",
        subject=url,
        hint=f"give {home}; where that is lost for good, remove {layout.MEMBER} from a place that holds all packs: "
        "then that is the home",
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
        except HoldfastError:
            continue  # nothing of this repository is found there; what is missed is told where it is wanted
        if member is None or member.repository != repository or _name(url, member.id) not in listed:
            continue
        if not (node and member.node and member.node != node):
            yield store


def _names(home: Store) -> list[str]:
    """What is on the list; what else lies there is somebody else's, as is a directory that may not be listed."""
    try:
        return [name for name in home.children(layout.PLACES).objects if layout.is_place(name)]
    except StoreDenied:
        return []


def _name(url: str, member: str) -> str:
    return f"{hashlib.sha256(url.encode()).hexdigest()[:_KEY]}-{member}.json"


def _told(home: Store, name: str) -> Fields | None:
    """What the list says of a place; None where the object is damaged, or gone."""
    whole = f"{layout.PLACES}/{name}"
    try:
        return objects.decode("place", whole, home.get(whole, limit=objects.SMALL))
    except (CorruptionError, StoreError):
        return None


def node_of(place: Store) -> str:
    """Which node's the place is; empty where it is no node's own, or does not say."""
    member = _said(place)
    return member.node if member is not None else ""


def member_in(store: Store) -> Member | None:
    """What a place says of itself; None where it says nothing. CorruptionError where that is damaged."""
    try:
        data = store.get(layout.MEMBER, limit=objects.SMALL)
    except ObjectNotFound:
        return None
    found: Fields = objects.decode("member", layout.MEMBER, data)
    return Member(found.hex("id", 32), found.hex("repository", 32), found.text("home"), found.text("node"))


def join(store: Store, repository: str) -> tuple[str, ...]:
    """Makes each place that packs are put into known to the home, and the home to it. The members, by place; empty for
    one that cannot be reached, which is told where there are enough without it.

    Raises RepositoryError where another repository lies in one of them; StoreError.
    """
    if not isinstance(store, Places):
        return ()
    spare, members = len(store.packs_in) - store.copies, []
    for place in store.packs_in:
        if place is store.home:
            continue
        follower = store.follower(place)
        try:
            members.append(_join(store, place, repository))
            follower.mark = place.get(layout.MEMBER, limit=objects.SMALL)
        except (StoreError, CorruptionError) as error:
            spare -= 1
            if spare < 0:
                raise
            store.say(f"{place.url} is left out: {error.message}")
            members.append("")
            follower.mark = b""
    return tuple(members)


def _join(places: Places, place: Store, repository: str) -> str:
    there = member_in(place)
    before = _names(places.home)
    if there is None:
        there = _mark(places, place, repository)
    if there.repository != repository:
        raise _another(place)
    own = _name(place.url, there.id)
    others = [one for one in before if one[:_KEY] == own[:_KEY]]
    if others and own not in others and not places.declared.per_node:
        places.say(f"{place.url} is not the place that it was: what was put there before is not found")
    _list(places, place, there)
    return there.id


def _check_empty(places: Places, place: Store) -> None:
    """Raises RepositoryError where something of a repository lies there that is none of its places yet."""
    whose = places.home.get(layout.REPOSITORY, limit=objects.SMALL)
    try:
        if place.get(layout.REPOSITORY, limit=objects.SMALL) != whose:
            raise _another(place)
    except ObjectNotFound:
        return
    if place.children(layout.RUNS).directories:
        raise RepositoryError(
            f"{place.url} has checkpoints of its own: it is a copy of {places.home.url}, or was made a home",
            subject=place.url,
            hint="give an empty directory",
        )


def _list(places: Places, place: Store, member: Member) -> None:
    """Puts the place on the list, unless it is on it."""
    name = f"{layout.PLACES}/{_name(place.url, member.id)}"
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


def _mark(places: Places, place: Store, repository: str) -> Member:
    """Makes it a member: on the list first, which is not to be found in the place itself."""
    node = (places.node or socket.gethostname()) if places.declared.per_node else ""
    made = Member(secrets.token_hex(16), repository, places.home.url, node)
    _list(places, place, made)
    name = f"{layout.PLACES}/{_name(place.url, made.id)}"
    body: dict[str, Json] = {"home": made.home, "id": made.id, "node": node, "repository": repository}
    try:
        if holds(place, name):
            raise UsageError(
                f"{place.url} and {places.home.url} are one directory by two names",
                subject=place.url,
                hint="give another directory",
            )
        _check_empty(places, place)
        places.follower(place).bring(layout.REPOSITORY)
        objects.put(place, layout.MEMBER, objects.encode("member", layout.MEMBER, body), token=made.id)
    except HoldfastError as error:
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
