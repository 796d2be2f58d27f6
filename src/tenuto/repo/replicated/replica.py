"""The other places of a repository follow its home: everything in them except packs is a copy from it. Where an object
has several copies, `ReplicaChoice` decides which one is read."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

from tenuto.errors import AlreadyExists, ObjectNotFound, StoreError
from tenuto.model import canonical_json
from tenuto.record import record
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import MAX_MANIFEST
from tenuto.store.contract import Bytes, Store

_LAST_READS: Final = 1 << 16
"""The number of objects whose last source is known."""
_RECENT: Final = 256
"""The number of values in an `LruCache`."""


@record
class UnreachableReplica:
    """A place of the repository that is out of reach from here. `node`: its node; empty if it is no node's own."""

    url: str
    node: str

    def __str__(self) -> str:
        return f"{self.node} ({self.url})" if self.node else self.url


class LruCache:
    """Holds the most recent values. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[Hashable, None] = {}
        self._lock = threading.Lock()

    def __contains__(self, one: Hashable) -> bool:
        return one in self._known

    def add(self, one: Hashable) -> bool:
        """Adds a value. Returns whether it is new."""
        with self._lock:
            new = one not in self._known
            self._known[one] = None
            if len(self._known) > _RECENT:
                del self._known[next(iter(self._known))]
            return new


class Replica:
    """A place that follows the home. `mark`: its member record when it joined; None if not read, empty if it failed."""

    def __init__(self, store: Store, home: Store) -> None:
        self.store = store
        self.mark: bytes | None = None
        self._home = home
        self._prepared = LruCache()
        self._claims = LruCache()

    @property
    def url(self) -> str:
        return self.store.url

    def prepare(self, name: str) -> None:
        """Prepares the place for the first object of a save: copies the repository record, the claim and the save's
        begin.

        Under one claim a step is saved once, so the place has nothing else there if its claim is the home's. Raises
        StoreError if this is not the place that joined (a disk that is not mounted), or if another line of training has
        used the same numbers.
        """
        step = object_names.step_of(name)
        if step is None or step in self._prepared:
            return
        self._check_mark()
        attempt = step.rpartition("/")[0]
        if attempt not in self._claims:
            self._copy_identical(object_names.REPOSITORY)
            if self._copy_identical(f"{attempt}/{object_names.ATTEMPT}"):
                self._claims.add(attempt)
        # It names what thousands of ranks may write: not every one of them reads it.
        self._copy(f"{step}/{object_names.BEGIN}")
        self._prepared.add(step)

    def _check_mark(self) -> None:
        if self.mark is None:
            return
        if not self.mark:
            raise StoreError(f"{self.url} was left out when training began", subject=self.url)
        try:
            here = self.store.get(object_names.MEMBER, limit=len(self.mark) + 1)
        except ObjectNotFound:
            here = b""
        if here != self.mark:
            raise StoreError(
                f"{self.url} is not the location that it was when training began",
                subject=self.url,
                hint="is its disk mounted? Tenuto uses a location that has come back from the next start on",
            )

    def _copy_identical(self, name: str) -> bool:
        """Copies an object that must be equal in both. Returns whether the home has it. Raises StoreError if the place
        differs."""
        try:
            data = self._home.get(name, limit=MAX_MANIFEST)
        except ObjectNotFound:
            return False
        try:
            there = self.store.get(name, limit=MAX_MANIFEST)
        except ObjectNotFound:
            there = self._put(name, data)
        if there != data and not canonical_json.is_sealed(there, name):
            raise StoreError(f"{name} in {self.url} is damaged", subject=name, hint="remove that file: it is a copy")
        if there != data:
            raise StoreError(
                f"{self.url} has another {name} than {self._home.url}: another line of training lies there",
                subject=name,
                hint="move that directory away, or restore the primary to the state in which that was written",
            )
        return True

    def _put(self, name: str, data: bytes) -> bytes:
        """Returns the data that is there afterwards."""
        try:
            # Several ranks of a node may copy it at once: each with its own temporary.
            self.store.put_if_absent(name, Bytes(data), token=secrets.token_hex(16))
        except AlreadyExists:
            return self.store.get(name, limit=MAX_MANIFEST)
        return data

    def copy_from_home(self, name: str) -> None:
        """Copies what the home has under `name`, if anything, with the records it depends on."""
        self.prepare(name)
        self._copy(name)

    def _copy(self, name: str) -> None:
        try:
            self.store.stat(name)
            return
        except ObjectNotFound:
            pass
        try:
            data = self._home.get(name, limit=MAX_MANIFEST)
        except ObjectNotFound:
            return
        self._put(name, data)

    def has_begun(self, name: str) -> bool:
        """Returns whether the save of `name` was put here; True outside any save."""
        step = object_names.step_of(name)
        return step is None or exists(self.store, f"{step}/{object_names.BEGIN}")

    def is_of_home(self, name: str) -> bool:
        """Returns whether the object here is the home's of that name. Under another claim of the same number it is not,
        and must not be removed. Raises StoreError."""
        attempt = object_names.attempt_of(name)
        if attempt is None or attempt in self._claims:
            return True
        claim = f"{attempt}/{object_names.ATTEMPT}"
        try:
            here = self.store.get(claim, limit=MAX_MANIFEST)
        except ObjectNotFound:
            return True
        try:
            if self._home.get(claim, limit=MAX_MANIFEST) != here:
                return False
        except ObjectNotFound:
            return False
        self._claims.add(attempt)
        return True


class ReplicaChoice:
    """Orders the copies of an object: those not known to be damaged first. Thread-safe."""

    def __init__(self) -> None:
        self._last_read: dict[str, Store] = {}  # the last one read at the end
        self._damaged: dict[str, list[Store]] = {}
        self._lock = threading.Lock()

    def order(self, name: str, stores: Sequence[Store]) -> list[Store]:
        """Returns the stores, damaged copies last."""
        damaged = self._damaged.get(name, ())
        return sorted(stores, key=lambda store: store in damaged)

    def read(self, name: str, store: Store) -> None:
        """Notes that the object was read from `store`."""
        with self._lock:
            self._last_read.pop(name, None)
            self._last_read[name] = store
            if len(self._last_read) > _LAST_READS:
                del self._last_read[next(iter(self._last_read))]

    def sources(self, directory: str) -> list[str]:
        """Returns the URLs of the stores that packs in `directory` were last read from, each once."""
        with self._lock:
            read = [(name, store) for name, store in self._last_read.items() if name.rpartition("/")[0] == directory]
        found = [store.url for name, store in read if object_names.is_pack(name)]
        return list(dict.fromkeys(found))

    def mark_damaged(self, name: str) -> tuple[Store | None, list[Store]]:
        """Marks the copy read last as damaged. Returns its place, and all places with damaged copies; None if unknown,
        or marked before."""
        with self._lock:
            used, damaged = self._last_read.get(name), self._damaged.setdefault(name, [])
            if used is None or used in damaged:
                return None, damaged
            damaged.append(used)
            return used, list(damaged)

    def forget(self, names: Iterable[str]) -> None:
        """Forgets deleted objects."""
        with self._lock:
            for name in names:
                self._last_read.pop(name, None)
                self._damaged.pop(name, None)


def exists(store: Store, name: str) -> bool:
    """Returns whether the object exists; False also if unknown."""
    try:
        return is_there(store, name)
    except StoreError:
        return False


def is_there(store: Store, name: str) -> bool:
    """Returns whether the object exists. Raises StoreError where the store does not say."""
    try:
        store.stat(name)
    except ObjectNotFound:
        return False
    return True
