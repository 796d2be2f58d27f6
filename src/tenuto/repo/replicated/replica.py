"""The other places of a repository, which follow its home: what one has beside packs is a copy of what lies there."""

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
    """A place of the repository that is not found from here. `node`: whose own it is; empty where it is no node's."""

    url: str
    node: str

    def __str__(self) -> str:
        return f"{self.node} ({self.url})" if self.node else self.url


class Replica:
    """`mark`: what said whose place it is when it joined; None where nobody has looked, empty where it could not."""

    def __init__(self, store: Store, home: Store) -> None:
        self.store = store
        self.mark: bytes | None = None
        self._home = home
        self._escorted = LruCache()
        self._claims = LruCache()

    @property
    def url(self) -> str:
        return self.store.url

    def escort(self, name: str) -> None:
        """Before the first object of a save, what it lies under: who the repository is, the claim, the save's begin.
        Under one claim a step is saved once, so that nothing else can lie there where the claim is the home's.

        StoreError where this is not the place that has joined (a disk that is not mounted), or where something else
        lies there: another line of training has had the same numbers.
        """
        step = object_names.step_of(name)
        if step is None or step in self._escorted:
            return
        self._check_mark()
        attempt = step.rpartition("/")[0]
        if attempt not in self._claims:
            self._bring_the_same(object_names.REPOSITORY)
            if self._bring_the_same(f"{attempt}/{object_names.ATTEMPT}"):
                self._claims.add(attempt)
        self._bring(
            f"{step}/{object_names.BEGIN}"
        )  # it names what thousands of ranks may write: not read by each of them
        self._escorted.add(step)

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

    def _bring_the_same(self, name: str) -> bool:
        """Whether the home has it. StoreError where the place has another one."""
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
        """What lies there afterwards."""
        try:
            # Several ranks of a node may bring it at the same time: each by a temporary of its own.
            self.store.put_if_absent(name, Bytes(data), token=secrets.token_hex(16))
        except AlreadyExists:
            return self.store.get(name, limit=MAX_MANIFEST)
        return data

    def bring(self, name: str) -> None:
        """Has the place hold a copy of what the home holds under `name`, if it does, and what that lies under."""
        self.escort(name)
        self._bring(name)

    def _bring(self, name: str) -> None:
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
        """Whether the save that `name` belongs to was put here; True for what belongs to none."""
        step = object_names.step_of(name)
        return step is None or holds(self.store, f"{step}/{object_names.BEGIN}")

    def is_of_home(self, name: str) -> bool:
        """Whether what lies here under `name` is what the home calls so. Under another claim of the same number it is
        not: nothing of that is removed. Raises StoreError."""
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


def holds(store: Store, name: str) -> bool:
    """Whether there is an object of that name; False also where nobody can tell."""
    try:
        store.stat(name)
    except StoreError:
        return False
    return True
