"""The other places of a repository, which follow its home: everything in them except packs is a copy from it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from tenuto.errors import AlreadyExists, ObjectNotFound, StoreError
from tenuto.model import canonical_json
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import MAX_MANIFEST
from tenuto.repo.replicated.read_memory import LruCache
from tenuto.store.contract import Bytes, Store


@dataclass(frozen=True, slots=True)
class UnreachableReplica:
    """A place of the repository that is out of reach from here. `node`: its node; empty if it is no node's own."""

    url: str
    node: str

    def __str__(self) -> str:
        return f"{self.node} ({self.url})" if self.node else self.url


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
        self._copy(
            f"{step}/{object_names.BEGIN}"
        )  # it names what thousands of ranks may write: not read by each of them
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
                f"{self.url} is not the place that it was when training began",
                subject=self.url,
                hint="is its disk mounted? A place that has come back is used again from the next start on",
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
                hint="move that directory away, or set the home to where it was when that was written",
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


def exists(store: Store, name: str) -> bool:
    """Returns whether the object exists; False also if unknown."""
    try:
        store.stat(name)
    except StoreError:
        return False
    return True
