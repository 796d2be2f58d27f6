"""The repository key and its slots.

A repository key is 32 random bytes, and has a number. Each slot of the *key ring* wraps the newest one, so that any
slot opens the repository; the newest key wraps all older ones, so that old checkpoints stay readable. Only whoever can
open a slot can make one that opens with the same secret: nobody else can slip in a key of theirs.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import field, replace
from typing import Final

from tenuto.errors import CorruptionError, KeyMissing, Tampered, UsageError, WrongKey
from tenuto.model import canonical_json
from tenuto.record import record
from tenuto.seal import cipher
from tenuto.seal.cipher import KEY, MAX_KEY_NUMBER, Buffer, Digests, Identity, PackKey, PackSealer
from tenuto.seal.secret_sources import Lock, Secret
from tenuto.units import count

MAX_SLOTS: Final = 32
MAX_OLDER: Final = 4096
DIGEST: Final = 32
"""Bytes of the SHA-256 of an object that a key vouches for."""
MAX_VOUCHED: Final = 100_000


@record
class Slot:
    """One way to the repository key. `wrapped`: that key, under the slot's own. `created`: for the eye."""

    id: str
    lock: Lock
    wrapped: bytes
    created: str


@record
class KeyRing:
    """`key`: the number of the newest repository key. `older`: the others by number, each wrapped by the newest. A
    ring without slots is that of a repository whose keys were destroyed. `vouched`: SHA-256 of each object without a
    code that counts all the same, as what lay there before the first key; `vouched_code`: the code of all of them."""

    repository: str
    key: int
    slots: tuple[Slot, ...]
    older: Mapping[int, bytes]
    vouched: frozenset[bytes] = frozenset()
    vouched_code: str = ""


class RepositoryKeys:
    """The keys of one repository, open. Seals with the newest, and opens with whichever is named. `vouched`: as in its
    ring, checked."""

    def __init__(
        self, repository: str, number: int, keys: Mapping[int, bytes], vouched: frozenset[bytes] = frozenset()
    ) -> None:
        self.repository = repository
        self.number = number
        self.vouched = vouched
        self._keys = dict(keys)

    def __repr__(self) -> str:
        return f"RepositoryKeys({self.repository!r}, number={self.number})"

    def __reduce__(self) -> str:
        raise UsageError("keys are not pickled", subject="keys", hint="tenuto.Checkpointer(key=…) in each process")

    @property
    def newest(self) -> bytes:
        return self._keys[self.number]

    def key(self, number: int, name: str) -> bytes:
        """Returns the key with this number, which the object `name` needs. Raises KeyMissing."""
        if number not in self._keys:
            raise KeyMissing(
                f"{name} needs key {number} of its repository, and the newest one there is {self.number}: the key ring "
                "was set back to an older state"
                if number > self.number
                else f"{name} needs key {number} of its repository, which is not on the key ring any more",
                subject=name,
                hint="put the newest object below keys/ back, from a copy of the repository",
            )
        return self._keys[number]

    def new_pack(self, identity: Identity, *, start: int = 0) -> PackSealer:
        """Returns what seals one pack, with a fresh data key."""
        return PackSealer(self.newest, self.number, identity, start=start)

    def open_pack(self, wrapped: str, identity: Identity) -> PackKey:
        """Returns the data key of a pack from what its index says. Raises KeyMissing, Tampered, CorruptionError."""
        number, rest = cipher.split_number(wrapped, identity.name)
        return cipher.open_data_key(self.key(number, identity.name), _bytes(rest, identity.name), identity)

    def hide(self, digests: Digests, number: int, name: str) -> Digests:
        """Returns digests of contents, uint8 [n, 16], as a sealed index has them: equal ones stay equal, and tell
        nothing else to who has no key. Raises KeyMissing, as `key`."""
        return cipher.hide(self.key(number, name), digests)

    def sign_object(self, data: Buffer) -> str:
        """Returns the code of an object that stays readable: the key's number, a colon, and 64 hexadecimal digits."""
        return f"{self.number}:{cipher.sign_object(self.newest, data)}"

    def made(self, code: str, name: str) -> bool:
        """Returns whether a code names a key that is here. Raises CorruptionError for what is no code."""
        return cipher.split_number(code, name)[0] in self._keys

    def check_object(self, data: Buffer, code: str, name: str) -> None:
        """Raises KeyMissing, Tampered."""
        number, digits = cipher.split_number(code, name)
        cipher.check_object(self.key(number, name), data, digits, name)


def _bytes(digits: str, name: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise CorruptionError(f"{name}: its wrapped key is not hexadecimal", subject=name) from None


# --------------------------------------------------------------------------------------------------
# Opening.


def open_ring(ring: KeyRing, given: Sequence[Secret]) -> RepositoryKeys:
    """Tries each secret on each slot that it may fit. Raises WrongKey, naming what was tried; KeyMissing where nothing
    was given that fits any slot, and where a service refused."""
    tried: list[str] = []
    refused: list[KeyMissing] = []
    for secret in given:
        for slot in ring.slots:
            if not secret.fits(slot.lock):
                continue
            try:
                key = _open_slot(ring, slot, secret.slot_key(slot.lock, ring.repository))
            except KeyMissing as error:
                refused.append(error)
                continue
            if key is not None:
                return _opened(ring, key)
            tried.append(secret.words)
    if tried:
        raise WrongKey(
            f"{' and '.join(dict.fromkeys(tried))} {'opens' if len(set(tried)) == 1 else 'open'} none of the slots of "
            f"repository {ring.repository}",
            subject=ring.repository,
            hint="tenuto key ls WHERE shows the slots that there are",
        )
    if refused:
        raise refused[0]
    raise no_key(ring)


def no_key(ring: KeyRing) -> KeyMissing:
    kinds = ", ".join(sorted({slot.lock.kind for slot in ring.slots}))
    return KeyMissing(
        f"repository {ring.repository} is sealed, and no key was given that fits its slots ({kinds})",
        subject=ring.repository,
        hint="key=FILE, key='env:NAME', or set TENUTO_KEY_FILE, TENUTO_KEY or TENUTO_PASSPHRASE",
    )


def _open_slot(ring: KeyRing, slot: Slot, slot_key: bytes) -> bytes | None:
    key = cipher.unwrap(slot_key, slot.wrapped, purpose="slot", bound=_bound(ring, slot.id, slot.lock))
    return key if key is not None and len(key) == KEY else None


def _wrap(ring: KeyRing, id: str, lock: Lock, slot_key: bytes, key: bytes) -> bytes:
    return cipher.wrap(slot_key, key, purpose="slot", bound=_bound(ring, id, lock))


def _opened(ring: KeyRing, newest: bytes) -> RepositoryKeys:
    keys = RepositoryKeys(ring.repository, ring.key, _all_keys(ring, newest), ring.vouched)
    if ring.vouched:
        keys.check_object(_vouched_statement(ring.repository, ring.vouched), ring.vouched_code, "keys")
    return keys


def _vouched_statement(repository: str, vouched: Set[bytes]) -> bytes:
    return canonical_json.dumps(["tenuto vouched 1", repository, b"".join(sorted(vouched)).hex()])


def _all_keys(ring: KeyRing, newest: bytes) -> dict[int, bytes]:
    keys = {ring.key: newest}
    for number, wrapped in ring.older.items():
        bound = _older_bound(ring.repository, number, ring.key)
        key = cipher.unwrap(newest, wrapped, purpose="older key", bound=bound)
        if key is None or len(key) != KEY:
            raise Tampered(
                f"key {number} of repository {ring.repository} was altered on its key ring",
                subject="keys",
                object="keys",
                hint="put the newest object below keys/ back, from a copy of the repository",
            )
        keys[number] = key
    return keys


def _bound(ring: KeyRing, id: str, lock: Lock) -> bytes:
    cost = None if lock.cost is None else [lock.cost.n, lock.cost.r, lock.cost.p]
    return canonical_json.dumps(
        ["tenuto slot 1", ring.repository, ring.key, id, lock.kind, lock.name, lock.data.hex(), cost]
    )


def _older_bound(repository: str, number: int, by: int) -> bytes:
    return canonical_json.dumps(["tenuto older key 1", repository, number, by])


# --------------------------------------------------------------------------------------------------
# Changing. Each returns another ring, and changes nothing.


@record
class NewSlot:
    """A slot that is to be, with its key: the same one if it has to be added again."""

    id: str
    lock: Lock
    slot_key: bytes = field(repr=False)
    created: str


def new_slot(repository: str, secret: Secret, created: str) -> NewSlot:
    """Raises UsageError for a secret that is too weak, KeyMissing where a service refuses."""
    return NewSlot(secrets.token_hex(16), *secret.draw(repository), created)


def first_ring(repository: str, new: NewSlot, vouched: Set[bytes], destroyed: KeyRing | None = None) -> KeyRing:
    """Draws the first key of a repository. `vouched`: of what lies there already. `destroyed`: the ring that was, whose
    numbers are not used again."""
    ring = KeyRing(repository, destroyed.key + 1 if destroyed else 1, (), {})
    key = secrets.token_bytes(KEY)
    ring = replace(ring, slots=(_new_slot(ring, key, new),))
    return vouching(ring, RepositoryKeys(repository, ring.key, {ring.key: key}), vouched)


def vouching(ring: KeyRing, keys: RepositoryKeys, more: Set[bytes]) -> KeyRing:
    """Has the keys vouch for more objects as they lie there. `keys`: as opened from this ring."""
    vouched = keys.vouched | more
    if len(vouched) > MAX_VOUCHED:
        raise UsageError(
            f"{len(vouched):,} objects without a code are more than a key ring can vouch for ({MAX_VOUCHED:,})",
            subject=ring.repository,
            hint="remove what is not needed (tenuto keep WHERE --latest N --now), or seal a new repository",
        )
    if not vouched:
        return ring
    return replace(ring, vouched=vouched, vouched_code=keys.sign_object(_vouched_statement(ring.repository, vouched)))


def with_slot(ring: KeyRing, keys: RepositoryKeys, new: NewSlot) -> KeyRing:
    """Adds a slot. `keys`: as opened from this ring."""
    if len(ring.slots) >= MAX_SLOTS:
        raise UsageError(
            f"there are {MAX_SLOTS} slots already", subject=ring.repository, hint="tenuto key rm WHERE --slot ID"
        )
    return replace(ring, slots=(*ring.slots, _new_slot(ring, keys.newest, new)))


def without_slot(ring: KeyRing, id: str) -> KeyRing:
    """Removes a slot; with the last one goes everything that any key of the repository has sealed."""
    slots = tuple(slot for slot in ring.slots if slot.id != id)
    if not slots:
        return KeyRing(ring.repository, ring.key, (), {})
    return replace(ring, slots=slots)


def rotated(ring: KeyRing, given: Sequence[Secret]) -> KeyRing:
    """Draws a new repository key, for what is sealed from now on, wraps it for each slot, and the older ones by it.

    Raises WrongKey naming the slots of which no secret was given: a slot is wrapped by its secret alone, so that nobody
    who knows nothing but the old key comes to know the new one, or can replace it. KeyMissing where a service refuses,
    WrongKey too where the ring does not open at all.
    """
    keys = open_ring(ring, given)
    key, number = secrets.token_bytes(KEY), ring.key + 1
    if number > MAX_KEY_NUMBER or len(ring.older) >= MAX_OLDER:
        raise UsageError(f"key {ring.key} is the last one", subject=ring.repository, hint="begin another repository")
    new = KeyRing(ring.repository, number, (), {}, ring.vouched, ring.vouched_code)
    slots, closed = [], []
    for slot in ring.slots:
        fitting = (secret.slot_key(slot.lock, ring.repository) for secret in given if secret.fits(slot.lock))
        opens = next((slot_key for slot_key in fitting if _open_slot(ring, slot, slot_key) is not None), None)
        if opens is None:
            closed.append(f"{slot.id[:8]} ({slot.lock.kind})")
        else:
            slots.append(replace(slot, wrapped=_wrap(new, slot.id, slot.lock, opens, key)))
    if closed:
        raise WrongKey(
            f"no secret was given for {count(len(closed), 'slot')}: {', '.join(closed)}. The new key is wrapped by the "
            "secret of each slot",
            subject=ring.repository,
            hint=f"give them too, or remove the slot first: tenuto key rm WHERE --slot {closed[0][:8]}",
        )
    older = {
        one: cipher.wrap(
            key, keys.key(one, "keys"), purpose="older key", bound=_older_bound(ring.repository, one, number)
        )
        for one in (*ring.older, ring.key)
    }
    return replace(new, slots=tuple(slots), older=older)


def _new_slot(ring: KeyRing, key: bytes, new: NewSlot) -> Slot:
    return Slot(new.id, new.lock, _wrap(ring, new.id, new.lock, new.slot_key, key), new.created)
