"""The bytes of a key ring (`keys/<n>.json`), read as what anybody may have written."""

from __future__ import annotations

from typing import Final, get_args

from tenuto.model.records import Json
from tenuto.repo.format import objects
from tenuto.repo.format.objects import Fields
from tenuto.seal.cipher import KEY, MAX_KEY_NUMBER, WRAPPED
from tenuto.seal.keys import DIGEST, MAX_OLDER, MAX_SLOTS, MAX_VOUCHED, KeyRing, Slot
from tenuto.seal.secret_sources import MAX_DATA, MAX_NAME, Cost, Kind, Lock

KINDS: Final[dict[str, Kind]] = {kind: kind for kind in get_args(Kind)}
_WRAPPED: Final = 2 * (KEY + WRAPPED)
"""Hexadecimal digits of a wrapped key."""


def ring_body(ring: KeyRing, created: str) -> dict[str, Json]:
    """Returns the fields of a ring, but for those that every object has."""
    older: dict[str, Json] = {str(number): wrapped.hex() for number, wrapped in ring.older.items()}
    body: dict[str, Json] = {"created": created, "key": ring.key, "older": older}
    if ring.vouched:
        body["vouched"] = {"code": ring.vouched_code, "sha256": b"".join(sorted(ring.vouched)).hex()}
    return {**body, "slots": [_slot_json(slot) for slot in ring.slots]}


def _slot_json(slot: Slot) -> Json:
    lock, cost = slot.lock, slot.lock.cost
    return {
        "cost": None if cost is None else [cost.n, cost.r, cost.p],
        "created": slot.created,
        "data": lock.data.hex(),
        "id": slot.id,
        "kind": lock.kind,
        "name": lock.name,
        "wrapped": slot.wrapped.hex(),
    }


def decode_ring(name: str, data: bytes, repository: str) -> KeyRing:
    """Raises CorruptionError for anything that `ring_body` cannot have written, before any number in it is used; so
    also for a slot that would cost more memory or time to try than scrypt may have."""
    found = objects.decode("keys", name, data, repository)
    slots = found.sequence("slots")
    if len(slots) > MAX_SLOTS:
        raise found.refuse(f"has {len(slots)} slots")
    number = found.whole("key", minimum=1, maximum=MAX_KEY_NUMBER)
    older = found.inner(found.mapping("older"), "'older'")
    if len(older.values) > MAX_OLDER:
        raise found.refuse(f"has {len(older.values)} older keys")
    keys = {}
    for key in older.values:
        if not key.isascii() or not key.isdigit() or not 1 <= int(key[:9]) < number or str(int(key[:9])) != key:
            raise found.refuse(f"{key[:40]!r} is not the number of an older key")
        keys[int(key)] = bytes.fromhex(older.hex(key, _WRAPPED))
    opening = tuple(_slot(found.inner(slot, "a slot")) for slot in slots)
    return KeyRing(repository, number, opening, keys, *_vouched(found))


def _vouched(found: Fields) -> tuple[frozenset[bytes], str]:
    if "vouched" not in found.values:
        return frozenset(), ""
    inner = found.inner(found.mapping("vouched"), "'vouched'")
    text = inner.text("sha256", limit=2 * DIGEST * MAX_VOUCHED)
    if len(text) % (2 * DIGEST):
        raise found.refuse("'sha256' is not a list of digests")
    data = bytes.fromhex(inner.hex("sha256", len(text), limit=len(text)))
    return frozenset(data[at : at + DIGEST] for at in range(0, len(data), DIGEST)), inner.text("code")


def _slot(found: Fields) -> Slot:
    kind = found.text("kind")
    if kind not in KINDS:
        raise found.refuse(f"{kind[:40]!r} is not a kind of slot that this version knows")
    digits = len(found.text("data", limit=2 * MAX_DATA))
    lock = Lock(
        KINDS[kind],
        found.text("name", limit=MAX_NAME),
        bytes.fromhex(found.hex("data", digits + digits % 2)) if digits else b"",
        _cost(found),
    )
    if (lock.cost is None) == (kind == "passphrase"):
        raise found.refuse(f"a slot of kind {kind} {'lacks' if lock.cost is None else 'has'} the cost of a passphrase")
    wrapped = bytes.fromhex(found.hex("wrapped", _WRAPPED))
    return Slot(found.hex("id", 32), lock, wrapped, found.text("created", limit=64))


def _cost(found: Fields) -> Cost | None:
    if found.values.get("cost", 0) is None:
        return None
    numbers = found.sequence("cost")
    if len(numbers) != 3 or not all(type(number) is int for number in numbers):
        raise found.refuse("'cost' is not three whole numbers")
    cost = Cost(*(number for number in numbers if isinstance(number, int)))
    if not cost.bearable:
        raise found.refuse(f"a slot asks scrypt for more than it may use: n={cost.n}, r={cost.r}, p={cost.p}")
    return cost
