"""The keys of a repository: its key ring in the store, and how a process finds what opens it.

`keys/<n>.json`, the highest number counts. A ring is put whole under the next number, so that of two changes at once
one begins again; the lower numbers are then removed, since what they hold would still open with a slot that is gone.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Final

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    KeyMissing,
    ObjectNotFound,
    StoreUnavailable,
    Tampered,
    UsageError,
    typed,
)
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import key_records, object_names, objects
from tenuto.repo.format.manifest import MAX_MANIFEST
from tenuto.repo.format.object_names import KEYS, numbered
from tenuto.repo.refs import numbers
from tenuto.repo.repository import Repo, now_text
from tenuto.seal.cipher import KEY
from tenuto.seal.keys import KeyRing, RepositoryKeys, open_ring
from tenuto.seal.secret_sources import Passphrase, RawKey, Secret, from_file, from_variable, of_service
from tenuto.store.registry import is_scratch

KEY_FILE: Final = "TENUTO_KEY_FILE"
KEY_TEXT: Final = "TENUTO_KEY"
PASSPHRASE: Final = "TENUTO_PASSPHRASE"
_NAMING: Final = (KEY_FILE, KEY_TEXT, PASSPHRASE)
VARIABLE: Final = "env:"
_ACTED_ON: Final = (object_names.RUNS, "refs", object_names.PROOFS, "trash")
THREADS: Final = 16
"""How many objects are read at once from a store where each is a request."""
_TRIES: Final = 20

KeySource = str | os.PathLike[str] | Callable[[], bytes | str]
"""A key file, `env:NAME`, or what returns a key of 32 bytes or a passphrase."""


def change_ring(repo: Repo, change: Callable[[KeyRing | None], KeyRing]) -> KeyRing:
    """Puts what `change` makes of the newest ring, and removes every other one; puts nothing if that is the same ring.
    A crash leaves the ring before, or the new one.

    `change` is called again where another process was faster; it has to bear that its own outcome is in the ring it
    gets, and may raise.
    """
    token = secrets.token_hex(16)
    for _ in range(_TRIES):
        newest, before = repo.read_ring()
        ring = change(before)
        if ring == before:
            tidy(repo)
            return ring
        number = newest + 1
        name = numbered(KEYS, number)
        body = {**key_records.ring_body(ring, now_text()), "id": token}
        try:
            objects.put(repo.store, name, objects.encode("keys", name, body, repo.id), token=token)
        except AlreadyExists:
            continue
        # The number may have been another ring's that was removed meanwhile. It was removed after a higher one was
        # durable, so that one is seen here.
        if max(numbers(repo, KEYS), default=0) == number:
            tidy(repo)
            return ring
        repo.store.delete([name])
    raise StoreUnavailable(f"others have changed the key ring of {repo.url} {_TRIES} times", subject=KEYS)


def tidy(repo: Repo) -> None:
    """Removes the rings that do not count: a crash may have left them, and removed slots open them."""
    there = numbers(repo, KEYS)
    repo.store.delete([numbered(KEYS, number) for number in there[:-1]])


def find_key(repo: Repo, given: KeySource | None = None) -> RepositoryKeys:
    """Opens the repository's keys with what was given; else with what the environment has (`TENUTO_KEY_FILE`,
    `TENUTO_KEY`, `TENUTO_PASSPHRASE`, and the variables and services that slots name).

    Raises KeyMissing where the repository has no keys, or none was given; WrongKey where what was given opens no slot;
    CorruptionError for a damaged key ring.
    """
    return _opened(ring_of(repo), given)


def _opened(ring: KeyRing, given: KeySource | None) -> RepositoryKeys:
    return open_ring(ring, [secret_from(given)] if given is not None else [*from_environment(), *named_by(ring)])


def unlock(repo: Repo, given: KeySource | None = None, *, writing: bool = False) -> None:
    """Opens the keys of a sealed repository for this process; does nothing where there are none and none are given, as
    an argument or by the environment: then somebody may have taken them away, to have plain objects believed.

    What `tenuto certify` saves in the place of a repository has no keys. writing: for a process that saves: what it
    wrote without the keys would lie there unsealed.

    Raises KeyMissing where keys are given and the repository has none, or where a process that saves has none;
    WrongKey; CorruptionError for a damaged key ring.
    """
    if is_scratch(repo.store):
        return
    named = "key=" if given is not None else next((name for name in _NAMING if os.environ.get(name)), "")
    try:
        ring = repo.read_ring()[1] if given is not None or repo.had(KEYS) else None
    except CorruptionError:
        if named or writing:
            raise
        return  # what has no code is refused by `Repo.vouch` all the same
    if not named and (ring is None or not (ring.slots or writing)):
        return
    ring = usable_ring(repo, ring, named)
    try:
        repo.keys = _opened(ring, given)
    except KeyMissing:
        if given is not None or writing:
            raise


def without_code(repo: Repo, id: CheckpointId | None = None) -> dict[str, bytes]:
    """Returns the SHA-256 of each intact object, by name, that is acted on and that no key vouches for: manifests,
    attempts' records, notes, refs, proofs. `id`: of this checkpoint and its attempt alone."""
    if id is None:
        entries = (entry.name for top in _ACTED_ON for entry in repo.store.walk(top))
        names = [name for name in entries if _is_acted_on(name)]
    else:
        directory = object_names.notes_directory(id)
        noted = [numbered(directory, number) for number in numbers(repo, directory)]
        names = [id.manifest, object_names.attempt_name(id.run, id.attempt), *noted]
    found: dict[str, bytes] = {}

    def read(name: str) -> None:
        try:
            data = repo.store.get(name, limit=MAX_MANIFEST)
            code = str(canonical_json.open_seal(data, name=name).get("code", "")) if repo.keys is not None else ""
        except (ObjectNotFound, CorruptionError):
            return  # damaged, it counts for nothing
        try:
            if repo.keys is not None:
                repo.vouch(name, data, code)
                return
        except (Tampered, KeyMissing):
            pass
        found[name] = hashlib.sha256(data).digest()

    parallel_for(read, names, THREADS if repo.store.capabilities.remote else 1)
    return found


def _is_acted_on(name: str) -> bool:
    parts = name.split("/")
    if parts[0] == object_names.RUNS:
        return parts[-1] in (object_names.MANIFEST, object_names.ATTEMPT) or object_names.NOTES in parts[-2:-1]
    return parts[-1].endswith(".json")


def refuse_if_sealed(repo: Repo, what: str, *, hint: str) -> None:
    """Raises UsageError where the repository has keys: `what` would write a checkpoint there that is not sealed."""
    if repo.closed_ring is not None or repo.keys is not None:
        raise UsageError(f"{repo.url} is sealed, and {what} would not be", subject=repo.url, hint=hint)


def ring_of(repo: Repo) -> KeyRing:
    """Returns the key ring. Raises KeyMissing where the repository has none."""
    return usable_ring(repo, repo.read_ring()[1])


def usable_ring(repo: Repo, ring: KeyRing | None, named: str = "") -> KeyRing:
    """Returns the ring that was read. Raises KeyMissing where there is none, or one without slots. `named`: what names
    a key for it."""
    if ring is None:
        add = typed("tenuto", "key", "add", repo.url, "--key-file", "tenuto.key")
        raise KeyMissing(
            f"{f'{named} is set, and ' if named in _NAMING else ''}the repository at {repo.url} has no keys: nothing "
            "in it is sealed",
            subject=repo.url,
            hint=f"to seal what is saved from now on: {add}"
            + (f"; for one that is not to be sealed: unset {named}" if named in _NAMING else ""),
        )
    if not ring.slots:
        raise KeyMissing(
            f"the keys of the repository at {repo.url} were destroyed: what was sealed there cannot be read any more",
            subject=repo.url,
            hint=f"for what is saved from now on: {typed('tenuto', 'key', 'add', repo.url)} --key-file FILE",
        )
    return ring


def secret_from(given: KeySource) -> Secret:
    """Reads what a caller has given."""
    if callable(given):
        found = given()
        if isinstance(found, bytes) and len(found) == KEY:
            return RawKey(found, "the key that key= returned")
        if isinstance(found, str) and found:
            return Passphrase(found, "the passphrase that key= returned")
        raise UsageError(
            f"key= returned neither {KEY} bytes nor a passphrase", subject="key", hint="key=lambda: getpass.getpass()"
        )
    if isinstance(given, str) and given.startswith(VARIABLE):
        return from_variable(given.removeprefix(VARIABLE))
    return from_file(given)


def from_environment() -> Iterator[Secret]:
    """Yields what the environment has for any repository."""
    if os.environ.get(KEY_FILE):
        yield from_file(os.environ[KEY_FILE])
    if os.environ.get(KEY_TEXT):
        yield from_variable(KEY_TEXT)
    if os.environ.get(PASSPHRASE):
        yield Passphrase(os.environ[PASSPHRASE], f"the passphrase in {PASSPHRASE}")


def named_by(ring: KeyRing) -> Iterator[Secret]:
    """Yields what slots name: variables that are set, then services, which are asked last."""
    names = sorted({slot.lock.name for slot in ring.slots if slot.lock.kind == "environment"})
    yield from (from_variable(name) for name in names if os.environ.get(name))
    yield from (secret for slot in ring.slots if (secret := of_service(slot.lock)) is not None)
