"""A repository in several places: its home decides, and packs lie where they are meant to.

The home is a store like that of any repository: attempts, refs and manifests lie there, and every create-if-absent that
decides something is decided there. Packs lie in `packs_in`, which may be the home, a directory of this node's own, or
several stores, of which at least `copies` have to hold each pack before its save may commit. What one needs to read
them (`is_copied`) is copied to each of these places too, after the home has it: all places of a repository, copied into
one directory, are that repository.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from tenuto.errors import AlreadyExists, CorruptionError, ObjectNotFound, StoreDenied, StoreError, UsageError, in_words
from tenuto.model import canonical_json
from tenuto.model.records import Receipt
from tenuto.repo.format import object_names
from tenuto.repo.replicated.read_memory import LruCache, ReplicaChoice
from tenuto.repo.replicated.replica import Replica, UnreachableReplica, holds
from tenuto.store.contract import Bytes, Capabilities, Content, Entry, Listing, Reader, Stat, Store, is_unreadable
from tenuto.store.names import is_leftover
from tenuto.store.wrappers.fan_out import put_into_all

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ReplicationConfig:
    """How packs are kept, which is the same for all ranks of a job. `per_node`: in a directory of each node's own."""

    per_node: bool
    copies: int
    places: int


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


class ReplicatedStore:
    """A Store over `home` and `packs_in`. `beside`: further places of the same repository that are found here, which
    are read and freed, and put nothing into.

    `tell` is called with what went wrong in a place without failing what was asked for. `node`: what this node calls
    itself; empty: nothing.
    """

    def __init__(
        self,
        home: Store,
        packs_in: Sequence[Store],
        copies: int,
        *,
        beside: Sequence[Store] = (),
        per_node: bool = False,
        node: str = "",
        of: str = "",
    ) -> None:
        """`of`: the home that this one place belongs to, where it is none itself: then it is only read."""
        if not 1 <= copies <= len(packs_in):
            raise UsageError(
                f"copies={copies} cannot be kept in {len(packs_in)} places",
                subject=f"copies={copies}",
                hint=f"copies= is a number from 1 to {len(packs_in)} here",
            )
        self.home = home
        self.packs_in = tuple(packs_in)
        self.copies = copies
        self.beside = tuple(beside)
        self.node = node
        self.of = of
        self.declared = ReplicationConfig(per_node, copies, len(self.packs_in))
        self.tell: Callable[[str], None] = _warn
        self.away: Callable[[], Sequence[UnreachableReplica]] = tuple
        self.mirrors: Sequence[Store] = ()
        """Those of `beside` that are no node's own."""
        self._followers: dict[int, Replica] = {}
        self._told = LruCache()
        self._chosen = ReplicaChoice()

    @property
    def members(self) -> list[Store]:
        """The places that hold packs beside the home, but for what was out of reach when training began."""
        return [store for store in self.packs_in if store is not self.home and not self._is_left_out(store)]

    def _is_left_out(self, store: Store) -> bool:
        return self.follower(store).mark == b""

    @property
    def others(self) -> list[Store]:
        """All places but the home."""
        return [*self.members, *self.beside]

    @property
    def url(self) -> str:
        return self.home.url

    @property
    def capabilities(self) -> Capabilities:
        return self.home.capabilities

    def probe(self) -> Capabilities:
        return self.home.probe()

    # -- putting -------------------------------------------------------------------------------------------------------

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        """As every store. A pack is put into all of its places, and counts once `copies` of them have it; where fewer
        can, it is in none, and StoreError says why. What is copied counts once the home has it."""
        self._only_home(name)
        if object_names.is_pack(name):
            return self._put_pack(name, content, token)
        receipt = self.home.put_if_absent(name, content, token=token)
        if self.others and object_names.is_copied(name):
            have = 1 + self._copy(name, b"".join(bytes(piece) for piece in content.pieces()), token)
            if object_names.is_index(name) and have < self.copies:
                raise StoreError(f"{name}: {have} of {self.copies} copies could be put", subject=name)
        return Receipt(name, receipt.length, self.url)

    def _only_home(self, name: str) -> None:
        if self.of:
            raise StoreDenied(
                f"{self.url} is one of the places of the repository whose home is {self.of}: no change is made here",
                subject=self.url,
                hint=f"give {self.of}",
            )

    def _put_pack(self, name: str, content: Content, token: str) -> Receipt:
        failed, ready = self._escorted(name)
        found = list(zip(ready, put_into_all(ready, name, content, token=token), strict=True)) if ready else []
        failed += [(store, one) for store, one in found if isinstance(one, BaseException)]
        if len(self.packs_in) - len(failed) < self.copies:
            self._take_back(name, [store for store, one in found if isinstance(one, Receipt)])
            raise self._too_few(name, failed, len(self.packs_in))
        for store, error in failed:
            self._lacks(store, name, error)
        return Receipt(name, content.length, self.url)

    def _escorted(self, name: str) -> tuple[list[tuple[Store, BaseException]], list[Store]]:
        """The places that cannot take a pack, and those that can."""
        failed: list[tuple[Store, BaseException]] = []
        ready: list[Store] = []
        for store in self.packs_in:
            try:
                if store is not self.home:
                    self.follower(store).escort(name)
                ready.append(store)
            except StoreError as error:
                failed.append((store, error))
        return failed, ready

    def _too_few(self, name: str, failed: Sequence[tuple[Store, BaseException]], places: int) -> BaseException:
        """What the first place had against it; of several it says how many copies there have to be."""
        store, error = failed[0]
        if places == 1 or not isinstance(error, StoreError):
            return error
        error.message = (
            f"{places - len(failed)} of the {self.copies} copies that each pack has to have: "
            f"{store.url} did not take {name}: {error.message}"
        )
        return error

    def _take_back(self, name: str, stores: Sequence[Store]) -> None:
        """So that the save may put it once more."""
        for store in stores:
            try:
                store.delete([name])
            except StoreError as error:
                self.warn(f"{name} could not be taken back from {store.url}: {error.message}")

    def _copy(self, name: str, data: bytes, token: str) -> int:
        """Copies what the home has to the places that keep it; how many of those that packs are put into have it."""
        have = 0
        for follower in self._keeping(name):
            try:
                follower.escort(name)
                follower.store.put_if_absent(name, Bytes(data), token=token)
            except AlreadyExists:
                pass
            except StoreError as error:
                self._lacks(follower.store, name, error)
                continue
            have += follower.store in self.packs_in
        return have

    def _keeping(self, name: str) -> list[Replica]:
        """The places that get a copy: where packs are put, and mirrors that have had some of that save."""
        members = [self.follower(store) for store in self.members]
        mirrors = [self.follower(store) for store in self.mirrors]
        return members + [one for one in mirrors if one.has_begun(name)]

    def _lacks(self, place: Store, name: str, error: BaseException) -> None:
        """Tells of a place that is behind: once for each save."""
        self.warn_once(place, name.rpartition("/")[0], f"{place.url} has no copy of {name}: {in_words(error)}")

    def warn(self, message: str) -> None:
        """Where warnings are errors nothing fails by one: what was asked for has been done."""
        with suppress(Warning):
            self.tell(message)

    def warn_once(self, place: Store, about: str, message: str) -> None:
        if self._told.add((place.url, about)):
            self.warn(message)

    def follower(self, place: Store) -> Replica:
        """One of the other places."""
        return self._followers.setdefault(id(place), Replica(place, self.home))

    def bring(self, name: str) -> None:
        """Has other places hold a copy of what the home holds under `name`, if it does. What goes wrong is told."""
        for follower in self._keeping(name):
            try:
                follower.bring(name)
            except StoreError as error:
                self._lacks(follower.store, name, error)

    # -- reading -------------------------------------------------------------------------------------------------------

    def order(self, name: str) -> list[Store]:
        """Where an object may lie, in the order in which it is looked for."""
        if object_names.is_pack(name):
            return [*self.members, self.home, *self.beside]
        # What decides, begin.json and manifests among it, is there when the home has it, and not otherwise.
        return [self.home, *self.others] if object_names.is_index(name) or is_leftover(name) else [self.home]

    def has(self, name: str) -> bool:
        """Whether a place that is found here has it."""
        return any(holds(store, name) for store in self.order(name))

    def _first(self, name: str, work: Callable[[Store], Result]) -> Result:
        """From the first place that gives it; places whose copy was turned away come last."""
        wrong: Exception = ObjectNotFound(f"there is no {name} at {self.url}", subject=name)
        missed: list[Store] = []
        for store in self._chosen.order(name, self.order(name)):
            try:
                found = work(store)
            except ObjectNotFound:
                missed.append(store)
                continue
            except (StoreError, CorruptionError) as error:
                wrong = wrong if not isinstance(wrong, ObjectNotFound) else error
                continue
            self._chosen.read(name, store)
            if not self.declared.per_node and store in (*self.members, *self.mirrors) and self.home in missed:
                step = name.rpartition("/")[0]
                self.warn_once(self.home, f"missing {step}", f"{name} is missing in {self.url}: read from {store.url}")
            return found
        raise wrong

    def turn_away(self, name: str) -> bool:
        """What was read last under `name` is not what was saved. Whether there is another copy, which is read from now
        on."""
        used, turned = self._chosen.turn_away(name)
        if used is None:
            return False
        for store in self.order(name):
            if store not in turned and holds(store, name):
                self.warn(f"{name} in {used.url} is damaged: read from {store.url}")
                return True
        return False

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
        """A whole copy of a sealed object that the home has, and not whole."""
        for store in self.others:
            try:
                data = store.get(name, limit=limit)
            except (StoreError, CorruptionError):
                continue
            if canonical_json.is_sealed(data, name):
                self.warn(f"{name} in {self.url} is damaged: read from {store.url}")
                return data
        return None

    def open(self, name: str) -> Reader:
        return self._first(name, lambda store: store.open(name))

    def stat(self, name: str) -> Stat:
        spread = object_names.is_pack(name) or is_leftover(name)
        return self._first(name, lambda store: store.stat(name)) if spread else self.home.stat(name)

    def children(self, prefix: str) -> Listing:
        found = self.home.children(prefix)
        if not found.objects or not object_names.is_step(prefix):
            return found
        objects = set(found.objects)
        for store in self.others:
            there = self._listed(store, prefix, lambda one: list(one.children(prefix).objects))
            objects.update(file for file in there if object_names.is_pack(f"{prefix}/{file}"))
        return Listing(found.directories, tuple(sorted(objects)))

    def walk(self, prefix: str) -> Iterator[Entry]:
        """What the home has, and the packs of its saves wherever they lie."""
        found = {entry.name: entry for entry in self.home.walk(prefix)}
        saves = {name.rpartition("/")[0] for name in found}
        for store in self.others:
            for entry in self._listed(store, prefix, lambda one: list(one.walk(prefix))):
                if object_names.is_pack(entry.name) and entry.name.rpartition("/")[0] in saves:
                    found.setdefault(entry.name, entry)
        yield from (found[name] for name in sorted(found))

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        found = {entry.name: entry for entry in self.home.leftovers(prefix)}
        for store in self.others:
            for entry in self._listed(store, prefix, lambda one: list(one.leftovers(prefix))):
                found.setdefault(entry.name, entry)
        yield from (found[name] for name in sorted(found))

    def _listed(self, store: Store, prefix: str, work: Callable[[Store], list[Result]]) -> list[Result]:
        """A place that cannot be listed hides what lies there, and nothing else."""
        try:
            return work(store)
        except StoreError as error:
            self.warn(f"{prefix or 'all'} of {store.url} cannot be listed: {error.message}")
            return []

    # -- the rest ------------------------------------------------------------------------------------------------------

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        """From the home, then from the other places. What could not be deleted there is told, and swept later."""
        names = list(names)
        self._only_home(names[0] if names else "")
        self.home.delete(names)
        self._chosen.forget(names)
        spread = [name for name in names if object_names.is_spread(name)]
        for store in self.others if spread else ():
            try:
                store.delete([name for name in spread if self.follower(store).is_of_home(name)])
            except StoreError as error:
                self.warn(f"{spread[0]} could not be deleted from {store.url}: {error.message}")

    def settle(self, name: str) -> None:
        if not object_names.is_pack(name):
            self.home.settle(name)
            if object_names.is_copied(name):
                self.bring(name)
            return
        for store in self.order(name):
            if store is self.home or holds(store, name):
                store.settle(name)

    def free_bytes(self) -> int | None:
        """Of the place that is the last one needed for so many copies."""
        return self.tightest()[1]

    def tightest(self) -> tuple[str, int | None]:
        """That place, and its free bytes. One that cannot say, or be asked, may have room: its put decides."""
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
        for store in (self.home, *self.others):
            store.close()


def _free_in(store: Store) -> int | None:
    """None also of a place that does not say: whether it takes a pack is found out by putting it."""
    try:
        return store.free_bytes()
    except StoreError:
        return None
