"""What a repository says of itself: its id, and how it cuts leaves. Two objects say it, so that a flipped bit in one
does not make every checkpoint unreachable.

`tenuto.json` decides: whoever creates a repository puts it first, by create-if-absent. `tenuto.copy.json` says the same
under its own name. One that is damaged or missing is put anew from the other, which is durable before anything is
removed: at any moment one of the two is whole.
"""

from __future__ import annotations

import secrets
from typing import Final

from tenuto.codec.digest import DIGEST_NAME
from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    ObjectNotFound,
    RepositoryError,
    StoreDenied,
    StoreError,
    StoreFull,
    typed,
)
from tenuto.events import warn
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.repo.format import objects
from tenuto.repo.format.object_names import REPOSITORY, REPOSITORY_COPY
from tenuto.store.contract import Store, is_unreadable

NAMES: Final = (REPOSITORY, REPOSITORY_COPY)
DIGESTS: Final[dict[str, Json]] = {"chunk": DIGEST_NAME, "content": "sha-256", "object": DIGEST_NAME}


@record
class Identity:
    """`id`: 32 hexadecimal digits, drawn at creation. `chunk_bytes`: of a leaf's chunks. `created`, `version`: for the
    eye."""

    id: str
    chunk_bytes: int
    created: str
    version: str

    def encode(self, name: str) -> bytes:
        """Returns the bytes of one of the two objects."""
        body: dict[str, Json] = {
            "chunk_bytes": self.chunk_bytes,
            "created": self.created,
            "digests": DIGESTS,
            "id": self.id,
            "version": self.version,
        }
        return objects.encode("repository", name, body, None)


def decode(name: str, data: bytes) -> Identity:
    """Raises CorruptionError, and FormatTooNew."""
    found = objects.decode("repository", name, data, None)
    if found.mapping("digests") != DIGESTS:
        raise found.refuse("uses digests that this version does not know")
    return Identity(
        found.hex("id", 32),
        found.whole("chunk_bytes", minimum=1, maximum=objects.MAX_CHUNK),
        found.text("created"),
        found.text("version"),
    )


def read_identity(store: Store) -> tuple[Identity, str] | None:
    """Returns what the store's repository says of itself, and what is wrong with `tenuto.json`, empty if nothing; None
    where neither object is. The copy is read only where `tenuto.json` cannot be. Raises CorruptionError where neither
    can be read, and FormatTooNew."""
    wrong: list[str] = []
    missing = 0
    for name in NAMES:
        try:
            return decode(name, store.get(name, limit=objects.SMALL)), "; ".join(wrong)
        except ObjectNotFound:
            wrong.append(f"{name} is missing")
            missing += 1
        except CorruptionError as error:
            wrong.append(error.message)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            wrong.append(error.message)
    if missing == len(NAMES):
        return None
    raise CorruptionError(
        f"{REPOSITORY} at {store.url} is not Tenuto's, or damaged: {'; '.join(wrong)}",
        subject=REPOSITORY,
        hint=f"put {REPOSITORY} or {REPOSITORY_COPY} back from a backup, or {REPOSITORY} from another place of this "
        "repository: its checkpoints are not touched by this",
    )


def warn_of_damage(store: Store, wrong: str) -> None:
    """Warns that `tenuto.json` cannot be read."""
    warn(f"{wrong} ({store.url}); {REPOSITORY_COPY} says the same, and the next training there puts it right")


def keep_twice(store: Store, identity: Identity, *, whole: bool) -> None:
    """Puts the two objects right: each that is missing, or not what it has to be. `whole`: `tenuto.json` is, as its
    reader knows, and is not read again. Where this process may not write, or
    the place is full, one stays as it is: the other says it all. Raises RepositoryError where the two are whole and
    name two repositories."""
    for name, other in ((REPOSITORY, REPOSITORY_COPY), (REPOSITORY_COPY, REPOSITORY)):
        if whole and name == REPOSITORY:
            continue
        data = identity.encode(name)
        wrong = _problem(store, name, data, identity.id)
        if wrong is None:
            continue
        # Durable before the damaged one goes, whoever has put it.
        store.settle(other)
        if wrong:
            warn(f"{wrong} ({store.url}); it is put back from {other}")
        try:
            if wrong:
                store.delete([name])
            objects.put(store, name, data, token=secrets.token_hex(16))
        except AlreadyExists as taken:  # another process was as quick, and may be of a newer version
            if _problem(store, name, data, identity.id) is not None:
                raise taken
        except (StoreDenied, StoreFull) as error:
            if wrong:
                warn(f"{name} is not put back: {error.message}")


def _problem(store: Store, name: str, expected: bytes, id: str) -> str | None:
    """Returns what is wrong with one of the two; empty if it is missing, None if nothing is wrong."""
    try:
        data = store.get(name, limit=objects.SMALL)
        if data == expected:
            return None
        found = decode(name, data)
    except ObjectNotFound:
        return ""
    except CorruptionError as error:
        return error.message
    except StoreError as error:
        if not is_unreadable(error):
            raise
        return error.message
    if found.id != id:
        raise two_repositories(store, found.id, id)
    return None  # a field more, of a newer version


def refuse_two(store: Store, id: str) -> None:
    """Raises RepositoryError where `tenuto.copy.json` is whole and of another repository than this one."""
    try:
        found = decode(REPOSITORY_COPY, store.get(REPOSITORY_COPY, limit=objects.SMALL))
    except (CorruptionError, StoreError):
        return  # it says nothing
    if found.id != id:
        raise two_repositories(store, id, found.id)


def two_repositories(store: Store, one: str, other: str) -> RepositoryError:
    return RepositoryError(
        f"{REPOSITORY} and {REPOSITORY_COPY} at {store.url} are of two repositories, {one} and {other}: one of the two "
        "was copied here",
        subject=REPOSITORY,
        hint=f"`{typed('tenuto', 'verify', store.url)}` says whose the checkpoints are; remove the other one's file",
    )
