"""The places of a repository: its home lists them, and each identifies its repository.

`places/<place>-<member>.json` in the home names a place and its member; `tenuto-member.json` in the place identifies
the member. A place belongs to the repository where that member is found in it: a directory of one name on each node is
one place with another member on each.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import groupby
from typing import Final

from tenuto.concurrency.deadlines import within
from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    ObjectNotFound,
    RepositoryError,
    StoreDenied,
    StoreError,
    TenutoError,
    UsageError,
    in_words,
    typed,
)
from tenuto.events import warn
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.objects import Fields
from tenuto.repo.replicated.places import places_of
from tenuto.repo.replicated.replica import UnreachableReplica, exists
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.store.contract import Bytes, Store
from tenuto.store.registry import open_store

_KEY: Final = 12
ANSWER_S: Final = 5.0
"""How long a listed place is waited for: whoever opens a repository may need nothing of it."""


@record
class Member:
    """A place of a repository, as recorded in it. `node`: its node; empty if it is no node's own. `follows`: it is
    filled in the background, and keeps what it likes. `copy`: it is none of the repository's places but a copy
    elsewhere, which the home neither reads nor cleans up."""

    id: str
    repository: str
    home: str
    node: str
    follows: bool = False
    copy: bool = False


def known(store: Store, repository: str, report: Callable[[str], None] = warn) -> tuple[Store, frozenset[str] | None]:
    """Returns the store of a repository opened in `store`, with its other places that are found here, and which
    directories its home has at the top: one listing tells most repositories that they have nothing else to ask for.
    None where that may not be listed. Says to `report` which place does not answer: it is left out.

    Raises RepositoryError if `store` is declared as a home but is itself a place of another one.
    """
    places = places_of(store)
    home = store if places is None else places.home
    try:
        top = home.children("")
    except StoreDenied:
        top = None
    directories = None if top is None else frozenset(top.directories)
    itself = member_in(home) if top is None or object_names.MEMBER in top.objects else None
    if itself is not None:
        if places is not None:
            raise one_of_many(home.url, itself.home)
        return ReplicatedStore(home, [home], 1, of=itself.home), directories
    names = _names(home) if directories is None or object_names.PLACES in directories else []
    if places is None:
        if not names:
            return store, directories
        places = ReplicatedStore(home, [home], 1)
    given = {member.url for member in (*places.members, *places.declared_followers)}
    found = list(_found(home, names, repository, given, node=places.node, report=report))
    places.found_members = tuple(place for place, member in found if not member.follows)
    places.found_followers = tuple(place for place, member in found if member.follows)
    places.mirrors = tuple(place for place in places.found_members if not node_of(place))
    places.unreachable = cache(partial(_unreachable, places, repository))  # a list of thousands is read once
    return places, directories


def _unreachable(places: ReplicatedStore, repository: str) -> list[UnreachableReplica]:
    """Returns the listed places that are out of reach from here. The old place of a replaced disk is ignored."""
    others = (*places.others, *places.followers)
    described = {place.url: member for place in others if (member := _describe(place)) is not None}
    listed = {_name(url, member.id) for url, member in described.items()}
    here = {UnreachableReplica(url, member.node) for url, member in described.items()}
    entry = (_read_entry(places.home, name, repository) for name in _names(places.home) if name not in listed)
    found = {UnreachableReplica(one.text("url"), one.text("node")) for one in entry if one is not None}
    return sorted(found - here, key=str)


def _describe(place: Store) -> Member | None:
    try:
        return member_in(place)
    except TenutoError:
        return None


def one_of_many(url: str, home: str) -> RepositoryError:
    """Returns the error for training in a place that is not the home."""
    return RepositoryError(
        f"{url} is one location of the repository whose primary is {home}",
        subject=url,
        hint=f"give {home}; where that is lost for good: {typed('tenuto', 'promote', url)}",
    )


def _found(
    home: Store, names: Sequence[str], repository: str, given: set[str], *, node: str, report: Callable[[str], None]
) -> Iterator[tuple[Store, Member]]:
    """Yields the listed places that exist and have a listed member, with that."""
    listed = set(names)
    for _, some in groupby(sorted(names), key=lambda name: name[:_KEY]):
        url = next(
            (entry.text("url") for name in some if (entry := _read_entry(home, name, repository)) is not None), None
        )
        if url is None or url in given:
            continue
        try:
            store, member = within(ANSWER_S, f"asking {url}", partial(_asked, url), subject=url)
        except TenutoError as error:
            report(f"{url} is left out, and what only it has is not found: {in_words(error)}")
            continue
        if member is None or member.repository != repository or _name(url, member.id) not in listed:
            continue
        if not (node and member.node and member.node != node):
            yield store, member


def _asked(url: str) -> tuple[Store, Member | None]:
    store = open_store(url)
    return store, member_in(store)


def _names(home: Store) -> list[str]:
    """Returns the names on the list; ignores foreign objects, and a directory that may not be listed."""
    try:
        return [name for name in home.children(object_names.PLACES).objects if object_names.is_place(name)]
    except StoreDenied:
        return []


def _name(url: str, member: str) -> str:
    return f"{hashlib.sha256(url.encode()).hexdigest()[:_KEY]}-{member}.json"


def _read_entry(home: Store, name: str, repository: str) -> Fields | None:
    """Reads an entry of the list; None if it is damaged or gone."""
    path = f"{object_names.PLACES}/{name}"
    try:
        return objects.decode("place", path, home.get(path, limit=objects.SMALL), repository)
    except (CorruptionError, StoreError):
        return None


def node_of(place: Store) -> str:
    """Returns the node of the place; empty if it is no node's own, or unknown."""
    member = _describe(place)
    return member.node if member is not None else ""


def member_in(store: Store) -> Member | None:
    """Returns the member recorded in a place, None without a record. Raises CorruptionError if it is damaged."""
    try:
        data = store.get(object_names.MEMBER, limit=objects.SMALL)
    except ObjectNotFound:
        return None
    found: Fields = objects.decode("member", object_names.MEMBER, data, None)
    id, whose = found.hex("id", 32), found.hex("repository", 32)
    return Member(id, whose, found.text("home"), found.text("node"), found.flag("follows"), found.flag("copy"))


def identity_of_followers(store: Store) -> bytes | None:
    """Returns the `tenuto.json` that a follower of a home without one has: the home was lost, or is a new one. None if
    no follower has one. Raises RepositoryError where that cannot be found out."""
    places = places_of(store)
    for follower in () if places is None else places.declared_followers:
        try:
            if member_in(follower) is not None:
                return follower.get(object_names.REPOSITORY, limit=objects.SMALL)
        except StoreError as error:
            raise RepositoryError(
                f"there is no repository at {store.url}, and {follower.url}, which may have its checkpoints, cannot be "
                f"asked: {error.message}",
                subject=store.url,
                hint="try again when it answers; to begin without it, leave that tier out",
            ) from error
    return None


def keys_of_followers(store: Store) -> None:
    """Brings a home that was lost the key ring that a follower has, before the home is a repository again: else what is
    saved there next would not be sealed. Of several the newest: slots that were removed open the others. Raises
    StoreError."""
    places = places_of(store)
    found = [(rings[-1], one) for one in (places.declared_followers if places else ()) if (rings := _rings(one))]
    if found:
        name, follower = max(found, key=lambda one: _number(one[0]))
        with suppress(AlreadyExists):
            store.put_if_absent(name, Bytes(follower.get(name, limit=objects.SMALL)), token=secrets.token_hex(16))


def _rings(store: Store) -> list[str]:
    """Returns the names of the key rings, the one that counts last."""
    names = (f"{object_names.KEYS}/{file}" for file in store.children(object_names.KEYS).objects)
    return sorted(filter(object_names.is_key_ring, names), key=_number)


def _number(ring: str) -> int:
    return object_names.parse_numbered(ring.rpartition("/")[2]) or 0


def _bring_ring(places: ReplicatedStore, place: Store) -> None:
    """Brings a place for packs the key ring that counts, and removes older ones: it may have been away when the ring
    was changed, and slots that were removed open those."""
    rings = _rings(places.home)
    if rings:
        places.replica(place).copy_from_home(rings[-1])
        place.delete([one for one in _rings(place) if _number(one) < _number(rings[-1])])


def join_follower(store: Store, follower: Store, repository: str) -> None:
    """Registers a follower with the home. Raises RepositoryError if it has another repository, and StoreError."""
    places = places_of(store)
    assert places is not None, "it has a follower"
    _join(places, follower, repository, follows=True)
    places.replica(follower).mark = follower.get(object_names.MEMBER, limit=objects.SMALL)


def join(store: Store, repository: str) -> tuple[str, ...]:
    """Registers each place for packs with the home, and the home with it. Returns the members by place; empty for a
    place out of reach, with a warning, if enough others remain.

    Raises RepositoryError if a place has another repository, and StoreError.
    """
    places = places_of(store)
    if places is None:
        return ()
    spare, members = len(places.packs_in) - places.copies, []
    for place in places.packs_in:
        if place is places.home:
            continue
        replica = places.replica(place)
        try:
            members.append(_join(places, place, repository))
            _bring_ring(places, place)
            replica.mark = place.get(object_names.MEMBER, limit=objects.SMALL)
        except (StoreError, CorruptionError) as error:
            spare -= 1
            if spare < 0:
                raise
            places.warn(f"{place.url} is left out: {error.message}")
            members.append("")
            replica.mark = b""
    return tuple(members)


def _join(places: ReplicatedStore, place: Store, repository: str, *, follows: bool = False) -> str:
    there = member_in(place)
    before = _names(places.home)
    if there is None:
        there = _mark(places, place, repository, follows=follows)
    if there.repository != repository:
        raise _another(place)
    if there.copy:
        raise RepositoryError(
            f"{place.url} is a copy of {there.home}, which `tenuto replicate` made: it keeps what retention removes",
            subject=place.url,
            hint="give another directory",
        )
    own = _name(place.url, there.id)
    others = [one for one in before if one[:_KEY] == own[:_KEY]]
    if others and own not in others and not places.declared.per_node:
        places.warn(f"{place.url} is not the location that it was: what was put there before is not found")
    _list(places, place, there)
    return there.id


def _check_empty(places: ReplicatedStore, place: Store) -> None:
    """Raises RepositoryError if the place contains parts of a repository without being one of its places."""
    whose = places.home.get(object_names.REPOSITORY, limit=objects.SMALL)
    try:
        if place.get(object_names.REPOSITORY, limit=objects.SMALL) != whose:
            raise _another(place)
    except ObjectNotFound:
        return
    if place.children(object_names.RUNS).directories:
        raise RepositoryError(
            f"{place.url} has checkpoints of its own: it is a copy of {places.home.url}, or was made a primary",
            subject=place.url,
            hint="give an empty directory",
        )


def _list(places: ReplicatedStore, place: Store, member: Member) -> None:
    """Puts the place on the list, unless it is there."""
    name = f"{object_names.PLACES}/{_name(place.url, member.id)}"
    body: dict[str, Json] = {
        "member": member.id,
        "node": member.node,
        "url": place.url,
    }
    try:
        data = objects.encode("place", name, body, member.repository)
        objects.put(places.home, name, data, token=secrets.token_hex(16))
    except AlreadyExists:
        pass


def _mark(places: ReplicatedStore, place: Store, repository: str, *, follows: bool) -> Member:
    """Makes the place a member: on the list first, which must not appear in the place itself."""
    node = (places.node or socket.gethostname()) if places.declared.per_node and not follows else ""
    made = Member(secrets.token_hex(16), repository, places.home.url, node, follows)
    _list(places, place, made)
    name = f"{object_names.PLACES}/{_name(place.url, made.id)}"
    body: dict[str, Json] = {"copy": False, "follows": follows, "home": made.home, "id": made.id, "node": node}
    try:
        if exists(place, name):
            raise UsageError(
                f"{place.url} and {places.home.url} are one directory by two names",
                subject=place.url,
                hint="give another directory",
            )
        _check_empty(places, place)
        places.replica(place).copy_from_home(object_names.REPOSITORY)
        data = objects.encode("member", object_names.MEMBER, body, repository)
        objects.put(place, object_names.MEMBER, data, token=made.id)
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
