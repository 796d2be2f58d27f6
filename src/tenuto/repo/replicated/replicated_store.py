"""A repository in several places: its home decides, and `placement` gives the places of each object.

The home is an ordinary store: it has attempts, refs and manifests, and every deciding create-if-absent happens there.
Packs are in `packs_in`, which may be the home, a directory of this node's own, or several stores, of which at least
`copies` must have each pack before its save may commit. What reading them requires (`is_copied`) is copied to each of
these places after the home has it: all places of a repository, copied into one directory, are that repository.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from tenuto.errors import AlreadyExists, CorruptionError, ObjectNotFound, StoreDenied, StoreError, UsageError, in_words
from tenuto.events import warn
from tenuto.model import canonical_json
from tenuto.model.records import Receipt
from tenuto.record import record
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import MAX_MANIFEST
from tenuto.repo.replicated.partial_copy import PartialReader
from tenuto.repo.replicated.replica import LruCache, Replica, ReplicaChoice, UnreachableReplica, exists
from tenuto.store.contract import (
    Bytes,
    Capabilities,
    Content,
    Entry,
    Listing,
    Reader,
    Stat,
    Store,
    is_leftover,
    is_unreadable,
)
from tenuto.store.wrappers.fan_out import put_into_all

Result = TypeVar("Result")


@record
class ReplicationConfig:
    """The replication of packs, equal for all ranks of a job. `per_node`: in a directory of each node's own."""

    per_node: bool
    copies: int
    places: int


@record
class Placement:
    """The places that an object is put into. It counts as put once `acknowledged` of the places for packs have it. All
    but packs go into the home first; the others get copies of what is there."""

    places: tuple[Store, ...]
    acknowledged: int


class ReplicatedStore:
    """A Store over `home` and `packs_in`.

    - `found_members`: further places of the repository that are found here; read and cleaned up, never written.
    - `followers`: places that are filled in the background and keep what they like; read where no other place has
      something, and else left alone: nothing is put there with a save, or deleted with a checkpoint.
    - `report`: called with problems of single places that did not fail the operation.
    - `node`: the name of this node, or empty.
    """

    def __init__(
        self,
        home: Store,
        packs_in: Sequence[Store],
        copies: int,
        *,
        found_members: Sequence[Store] = (),
        per_node: bool = False,
        node: str = "",
        of: str = "",
        followers: Sequence[Store] = (),
    ) -> None:
        """`of`: the home this single place belongs to, if it is none itself: then it is read-only."""
        if not 1 <= copies <= len(packs_in):
            raise UsageError(
                f"copies={copies} cannot be kept in {len(packs_in)} locations",
                subject=f"copies={copies}",
                hint=f"copies= is a number from 1 to {len(packs_in)} here",
            )
        self.home = home
        self.packs_in = tuple(packs_in)
        self.copies = copies
        self.found_members = tuple(found_members)
        self.declared_followers = tuple(followers)
        self.found_followers: Sequence[Store] = ()
        self.node = node
        self.of = of
        self.declared = ReplicationConfig(per_node, copies, len(self.packs_in))
        self.report: Callable[[str], None] = warn
        self.unreachable: Callable[[], Sequence[UnreachableReplica]] = tuple
        self.mirrors: Sequence[Store] = ()
        """Those of `found_members` that are no node's own."""
        self.partial_copies: Mapping[str, str] = {}
        """The names of packs of which the home has a partial copy for this restore, and those of the copies."""
        self.damaged: list[tuple[str, Store]] = []
        """Copies that turned out to be damaged while another one was there, to be written anew."""
        self._kept: set[str] = set()
        """Packs of which enough places are known to have a copy."""
        self._replicas: dict[int, Replica] = {}
        self._warned = LruCache()
        self._choice = ReplicaChoice()

    @property
    def members(self) -> list[Store]:
        """The places for packs other than the home, except those out of reach when training began."""
        return [store for store in self.packs_in if store is not self.home and not self._is_left_out(store)]

    def _is_left_out(self, store: Store) -> bool:
        return self.replica(store).mark == b""

    @property
    def others(self) -> list[Store]:
        """All places but the home."""
        return [*self.members, *self.found_members]

    @property
    def followers(self) -> list[Store]:
        return [*self.declared_followers, *self.found_followers]

    @property
    def url(self) -> str:
        return self.home.url

    @property
    def capabilities(self) -> Capabilities:
        """Those of the home, but packs are read from any place: by the longest reads that one of them needs."""
        own = self.home.capabilities
        every = [own, *(store.capabilities for store in self.others)]
        part, parallel = (max(getattr(one, name) for one in every) for name in ("part_bytes", "parallel"))
        return (
            own
            if (part, parallel) == (own.part_bytes, own.parallel)
            else replace(own, part_bytes=part, parallel=parallel)
        )

    def probe(self) -> Capabilities:
        return self.home.probe()

    # -- putting -------------------------------------------------------------------------------------------------------

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        """Puts an object. A pack goes into all of its places and counts once `copies` of them have it; if fewer can, it
        is in none and StoreError says why. A copied object counts once the home has it."""
        self._only_home(name)
        if object_names.is_pack(name):
            return self._put_pack(name, content, token)
        receipt = self.home.put_if_absent(name, content, token=token)
        placement = self.placement(name)  # asks mirrors, which may hang: the home has the object by then
        if len(placement.places) > 1:
            have = 1 + self._copy(placement, name, b"".join(bytes(piece) for piece in content.pieces()), token)
            if have < placement.acknowledged:
                raise StoreError(f"{name}: {have} of {placement.acknowledged} copies could be put", subject=name)
        return Receipt(name, receipt.length, self.url)

    def placement(self, name: str) -> Placement:
        """Returns where an object is put: packs into `packs_in`, and those for several nodes into the home too;
        everything else into the home. What reading packs requires is copied to the places for packs, and to mirrors
        that have some of that save."""
        if object_names.is_home_pack(name) and self.home not in self.packs_in:
            return Placement((*self.packs_in, self.home), len(self.packs_in) + 1)
        if object_names.is_pack(name):
            return Placement(self.packs_in, self.copies)
        if not object_names.is_copied(name) or (name.startswith("trash/") and self.declared.per_node):
            return Placement((self.home,), 0)
        mirrors = [place for place in self.mirrors if self.replica(place).has_begun(name)]
        needed = self.copies if object_names.is_index(name) else 0
        return Placement((self.home, *self.members, *mirrors), needed)

    def _only_home(self, name: str) -> None:
        if self.of:
            raise StoreDenied(
                f"{self.url} is one location of the repository whose primary is {self.of}: no change is made here",
                subject=self.url,
                hint=f"give {self.of}",
            )

    def _put_pack(self, name: str, content: Content, token: str) -> Receipt:
        placement = self.placement(name)
        failed, ready = self._prepared(name, placement.places)
        found = list(zip(ready, put_into_all(ready, name, content, token=token), strict=True)) if ready else []
        failed += [(store, one) for store, one in found if isinstance(one, BaseException)]
        if len(placement.places) - len(failed) < placement.acknowledged:
            self._remove_pack(name, [store for store, one in found if isinstance(one, Receipt)])
            raise self._too_few(name, failed, placement)
        for store, error in failed:
            self._warn_missing(store, name, error)
        self._kept.add(name)
        return Receipt(name, content.length, self.url)

    def is_kept(self, name: str) -> bool:
        """Returns whether as many places as a save asks for have a pack that was put before: another save may name it
        then, instead of putting the same bytes."""
        if name not in self._kept:
            placement = self.placement(name)
            have = sum(
                exists(store, name) for store in placement.places if store is self.home or not self._is_left_out(store)
            )
            if have < placement.acknowledged:
                return False
            self._kept.add(name)
        return True

    def _prepared(self, name: str, places: Sequence[Store]) -> tuple[list[tuple[Store, BaseException]], list[Store]]:
        """Returns the places that cannot take a pack with their errors, and those that can."""
        failed: list[tuple[Store, BaseException]] = []
        ready: list[Store] = []
        for store in places:
            try:
                if store is not self.home:
                    self.replica(store).prepare(name)
                ready.append(store)
            except StoreError as error:
                failed.append((store, error))
        return failed, ready

    def _too_few(self, name: str, failed: Sequence[tuple[Store, BaseException]], placement: Placement) -> BaseException:
        """Returns the error of the first place; with several places it adds how many copies are required."""
        store, error = failed[0]
        places = len(placement.places)
        if places == 1 or not isinstance(error, StoreError):
            return error
        error.message = (
            f"{places - len(failed)} of the {placement.acknowledged} required copies of this data file: "
            f"{store.url} did not take {name}: {error.message}"
        )
        return error

    def _remove_pack(self, name: str, stores: Sequence[Store]) -> None:
        """Removes a pack from `stores`, so that the save can put it again."""
        for store in stores:
            try:
                store.delete([name])
            except StoreError as error:
                self.warn(f"{name} could not be taken back from {store.url}: {error.message}")

    def _copy(self, placement: Placement, name: str, data: bytes, token: str) -> int:
        """Copies an object of the home to the places that keep it. Returns how many places for packs have it."""
        have = 0
        for replica in self._followers(placement):
            try:
                replica.prepare(name)
                replica.store.put_if_absent(name, Bytes(data), token=token)
            except AlreadyExists:
                pass
            except StoreError as error:
                self._warn_missing(replica.store, name, error)
                continue
            have += replica.store in self.packs_in
        return have

    def _followers(self, placement: Placement) -> list[Replica]:
        """Returns the places that get a copy from the home."""
        return [self.replica(place) for place in placement.places if place is not self.home]

    def _warn_missing(self, place: Store, name: str, error: BaseException) -> None:
        """Warns of a place that is behind, once per save."""
        self.warn_once(place, name.rpartition("/")[0], f"{place.url} has no copy of {name}: {in_words(error)}")

    def warn(self, message: str) -> None:
        """Reports a problem. Where warnings are errors nothing fails by it: the operation has succeeded."""
        with suppress(Warning):
            self.report(message)

    def warn_once(self, place: Store, about: str, message: str) -> None:
        if self._warned.add((place.url, about)):
            self.warn(message)

    def replica(self, place: Store) -> Replica:
        """Returns the replica of one of the other places."""
        return self._replicas.setdefault(id(place), Replica(place, self.home))

    def copy_from_home(self, name: str) -> None:
        """Copies an object of the home to the other places. Warns of problems."""
        for replica in self._followers(self.placement(name)):
            try:
                replica.copy_from_home(name)
            except StoreError as error:
                self._warn_missing(replica.store, name, error)

    # -- reading -------------------------------------------------------------------------------------------------------

    def order(self, name: str) -> list[Store]:
        """Returns the places that may have an object, in search order."""
        if object_names.is_pack(name):
            return [*self.members, self.home, *self.found_members, *self.followers]
        # Deciding objects, such as begin.json and manifests, exist exactly if the home has them.
        if object_names.is_index(name):
            return [self.home, *self.others, *self.followers]
        return [self.home, *self.others] if is_leftover(name) else [self.home]

    def sources(self, directory: str) -> list[str]:
        """Returns the URLs of the places that packs of a checkpoint were last read from."""
        return self._choice.sources(directory)

    def has(self, name: str) -> bool:
        """Returns whether a place in reach has it."""
        return any(exists(store, name) for store in self.order(name))

    def _first(self, name: str, work: Callable[[Store], Result]) -> Result:
        """Returns the result of the first place that has it; damaged copies come last."""
        wrong: Exception = ObjectNotFound(f"there is no {name} at {self.url}", subject=name)
        missed: list[Store] = []
        for store in self._choice.order(name, self.order(name)):
            try:
                found = work(store)
            except ObjectNotFound:
                missed.append(store)
                continue
            except (StoreError, CorruptionError) as error:
                wrong = wrong if not isinstance(wrong, ObjectNotFound) else error
                continue
            self._choice.read(name, store)
            if not self.declared.per_node and store in (*self.members, *self.mirrors) and self.home in missed:
                step = name.rpartition("/")[0]
                self.warn_once(self.home, f"missing {step}", f"{name} is missing in {self.url}: read from {store.url}")
            return found
        raise wrong

    def mark_damaged(self, name: str) -> bool:
        """Marks the copy of `name` read last as damaged. Returns whether there is another copy, which is read from now
        on."""
        used, damaged = self._choice.mark_damaged(name)
        if used is None:
            return False
        for store in self.order(name):
            if store not in damaged and exists(store, name):
                self.warn(f"{name} in {used.url} is damaged: read from {store.url}")
                self.damaged.append((name, used))
                return True
        return False

    def forget(self, name: str) -> None:
        """Forgets what is known of an object's copies: one was written anew."""
        self._choice.forget([name])

    def get(self, name: str, *, limit: int) -> bytes:
        if object_names.is_pack(name) or object_names.is_index(name):
            return self._first(name, lambda store: store.get(name, limit=limit))
        if not object_names.is_copied(name):
            return self.home.get(name, limit=limit)
        try:
            data = self.home.get(name, limit=limit)
            if canonical_json.is_sealed(data, name):
                return data
        except StoreError as error:
            if not is_unreadable(error):
                raise
            return self._copied(name, limit) or self.home.get(name, limit=limit)
        return self._copied(name, limit) or data

    def _copied(self, name: str, limit: int) -> bytes | None:
        """Returns an intact copy of a sealed object that is damaged in the home; not of another line of training."""
        for store in (*self.others, *self.followers):
            try:
                data = store.get(name, limit=limit)
                if not canonical_json.is_sealed(data, name) or self._is_of_another_line(store, name):
                    continue
            except (StoreError, CorruptionError):
                continue
            else:
                self.warn(f"{name} in {self.url} is damaged: read from {store.url}")
                return data
        return None

    def _is_of_another_line(self, store: Store, name: str) -> bool:
        """Returns whether a place has a claim, or a save's `begin.json`, other than the home's, above an object: it is
        another one under the same numbers then."""
        step, attempt = object_names.step_of(name), object_names.attempt_of(name)
        for above in (f"{attempt}/{object_names.ATTEMPT}", f"{step}/{object_names.BEGIN}" if step else ""):
            if attempt is None or above in ("", name):
                continue
            with suppress(StoreError, CorruptionError):  # what cannot be read names no other line
                there, here = (one.get(above, limit=MAX_MANIFEST) for one in (store, self.home))
                if there != here and canonical_json.is_sealed(there, above) and canonical_json.is_sealed(here, above):
                    return True
        return False

    def open(self, name: str) -> Reader:
        try:
            return self._first(name, lambda store: store.open(name))
        except (StoreError, CorruptionError):
            copy = self.partial_copies.get(name)
            if copy is None:
                raise
        inner = self.home.open(copy)
        try:
            return PartialReader(inner, copy)
        except BaseException:
            inner.close()
            raise

    def stat(self, name: str) -> Stat:
        spread = object_names.is_pack(name) or is_leftover(name)
        return self._first(name, lambda store: store.stat(name)) if spread else self.home.stat(name)

    def children(self, prefix: str, *, after: str = "") -> Listing:
        found = self.home.children(prefix, after=after)
        if not found.objects or not object_names.is_step(prefix):
            return found
        objects = set(found.objects)
        for store in self.others:
            there = self._listed(store, prefix, lambda one: list(one.children(prefix).objects))
            objects.update(file for file in there if file > after and object_names.is_pack(f"{prefix}/{file}"))
        return Listing(found.directories, tuple(sorted(objects)))

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        """Yields the objects of the home, and in any place the packs of its saves, and leftovers."""
        found = {entry.name: entry for entry in self.home.walk(prefix, leftovers=leftovers)}
        saves = {name.rpartition("/")[0] for name in found if not is_leftover(name)}
        for store in self.others:
            for entry in self._listed(store, prefix, lambda one: list(one.walk(prefix, leftovers=leftovers))):
                own_pack = object_names.is_pack(entry.name) and entry.name.rpartition("/")[0] in saves
                if own_pack or is_leftover(entry.name):
                    found.setdefault(entry.name, entry)
        yield from (found[name] for name in sorted(found))

    def _listed(self, store: Store, prefix: str, work: Callable[[Store], list[Result]]) -> list[Result]:
        """Lists a place. Warns if that fails: only its own objects are missed."""
        try:
            return work(store)
        except StoreError as error:
            self.warn(f"{prefix or 'all'} of {store.url} cannot be listed: {error.message}")
            return []

    # -- the rest ------------------------------------------------------------------------------------------------------

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        """Deletes from the home, then from the other places. Warns of failures there, which gc sweeps later."""
        names = list(names)
        self._only_home(names[0] if names else "")
        self.home.delete(names)
        self._kept.difference_update(names)
        self._choice.forget(names)
        spread = [name for name in names if object_names.may_be_replicated(name)]
        for store in self.others if spread else ():
            try:
                store.delete([name for name in spread if self.replica(store).is_of_home(name)])
            except StoreError as error:
                self.warn(f"{spread[0]} could not be deleted from {store.url}: {error.message}")

    def settle(self, name: str) -> None:
        if not object_names.is_pack(name):
            self.home.settle(name)
            if object_names.is_copied(name):
                self.copy_from_home(name)
            return
        for store in (self.home, *self.others):
            if store is self.home or exists(store, name):
                store.settle(name)

    def free_bytes(self) -> int | None:
        """Returns the free bytes of the last place needed for `copies`."""
        return self.tightest()[1]

    def tightest(self) -> tuple[str, int | None]:
        """Returns that place and its free bytes. A place without an answer may have room: its put decides."""
        free: list[tuple[str, int | None]] = []
        for store in self.packs_in:
            if store is not self.home and self._is_left_out(store):
                continue
            try:
                free.append((store.url, store.free_bytes()))
            except StoreError:
                free.append((store.url, None))
        known = sorted(((url, nbytes) for url, nbytes in free if nbytes is not None), key=lambda one: -one[1])
        unknown, last = len(free) - len(known), self.copies - 1
        return (self.url, None) if unknown > last or last - unknown >= len(known) else known[last - unknown]

    def close(self) -> None:
        for store in (self.home, *self.others, *self.followers):
            store.close()
