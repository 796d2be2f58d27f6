"""Small objects: sealed canonical JSON with a kind and a format number, read strictly."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from tenuto.errors import AlreadyExists, CorruptionError, FormatTooNew, ObjectNotFound, UsageError
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Receipt
from tenuto.record import record
from tenuto.store.contract import Bytes, Store

FORMAT: Final = 1
"""Raised when readers of the previous format would fail; fields that a reader may ignore do not raise it."""
ENCODED: Final = 2
"""Of an index whose chunks are encoded, or lie in packs of other checkpoints, and of what has `bases`."""
ROUNDED: Final = 4
"""Of an index in which chunks are decoded from the rounding of others, and of its manifest. 3 is no format: files that
are kept for ever have it for one that is too new."""
_KNOWN: Final[Mapping[str, tuple[int, ...]]] = {
    "index": (FORMAT, ENCODED, ROUNDED),
    "manifest": (FORMAT, ENCODED, ROUNDED),
    "begin": (FORMAT, ENCODED),
}
"""By kind, where it is not `FORMAT` alone."""
MAX_BASES: Final = 100_000
UNSIGNED: Final = "-"
"""The code in the bytes that the code of an object is made of."""
Sign = Callable[[bytes], str]
"""Makes the code of an object that a holder of the repository's key puts."""
SMALL: Final = 16 << 20
"""The limit in bytes for objects other than manifests and indexes."""
MAX_CHUNK: Final = 1 << 30
_HEX: Final = re.compile(r"[0-9a-f]+")


def encode(
    kind: str,
    name: str,
    body: Mapping[str, Json | canonical_json.Spelled],
    repository: str | None,
    *,
    format: int = FORMAT,
    sign: Sign | None = None,
) -> bytes:
    """Returns the bytes of an object of this kind for `name`. `repository`: the id of the repository that it is written
    into; None for the repository's own object, which has it as `id`. `sign`: gives it a code, where there are keys."""
    whose = {} if repository is None else {"repository": repository}
    values = {**body, **whose, "format": format, "kind": kind, "path": name}
    if sign is not None:
        values["code"] = sign(signed_part(canonical_json.seal({**values, "code": UNSIGNED}), UNSIGNED))
    return canonical_json.seal(values)


def signed_part(data: bytes, code: str) -> bytes:
    """Returns the bytes that the code of an object is made of: all but the code itself and the digest."""
    return data[: -canonical_json.TAIL].replace(b'"code":"%s"' % code.encode(), b'"code":"%s"' % UNSIGNED.encode(), 1)


def decode(kind: str, name: str, data: bytes, repository: str | None) -> Fields:
    """Returns the fields of an object read from `name` in this repository. Raises CorruptionError if it is damaged, a
    copy, of another repository, or of another kind. `repository`: None for an object that says whose it is."""
    found = Fields(canonical_json.open_seal(data, name=name), name)
    check_format(found)
    if found.values.get("path") != name:
        copied = Origin(str(found.values.get("path")), repository or "")
        raise CorruptionError(f"{name} {copied.words(repository)}, not an object of this location", subject=name)
    if repository is not None:
        check_repository(found, repository)
    if found.values.get("kind") != kind:
        raise CorruptionError(f"{name} is a {str(found.values.get('kind'))[:40]!r}, not a {kind}", subject=name)
    return found


def checked(kind: str, name: str, values: Json, repository: str) -> Fields | None:
    """Returns fields cut out of a sealed object read from `name`; None where `decode` would refuse."""
    if not isinstance(values, dict) or values.get("kind") != kind or origin_in(values, name, repository):
        return None
    found = Fields(values, name)
    check_format(found)
    return found


@record
class Origin:
    """Where an object was written that lies in another place: its name there, and the repository's id."""

    path: str
    repository: str

    def words(self, repository: str | None) -> str:
        """Says where it comes from, for a reader of `repository`."""
        if repository in (None, self.repository):
            return f"is a copy of {self.path[:300]!r}"
        return f"belongs to repository {self.repository[:40]}, this is {repository}"


def origin_in(values: Mapping[str, Json], name: str, repository: str) -> Origin | None:
    """Returns where an intact object with these fields, read from `name`, was written; None if right there."""
    if values.get("path") == name and values.get("repository") == repository:
        return None
    return Origin(str(values.get("path")), str(values.get("repository", "none")))


def origin(name: str, data: bytes, repository: str) -> Origin | None:
    """Returns where an object read from `name` was written; None if right there, or if it is damaged."""
    try:
        return origin_in(canonical_json.open_seal(data, name=name), name, repository)
    except CorruptionError:
        return None


def is_copy(name: str, data: bytes, repository: str) -> bool:
    """Returns whether `data`, read from `name`, is intact but was written under another name, or in another
    repository: then it takes part in nothing."""
    return origin(name, data, repository) is not None


def check_repository(found: Fields, repository: str) -> None:
    """Raises CorruptionError if an object was written into another repository."""
    whose = Origin(found.name, found.text("repository"))
    if whose.repository != repository:
        raise CorruptionError(
            f"{found.name} {whose.words(repository)}",
            subject=found.name,
            hint="it was copied here from another repository: `tenuto verify` names all that was",
        )


def check_format(found: Fields) -> None:
    number = found.whole("format")
    known = _KNOWN.get(str(found.values.get("kind")), (FORMAT,))
    if number > known[0] and number not in known:
        raise FormatTooNew(
            f"{found.name} has format {number}; this version reads formats up to {known[-1]}",
            subject=found.name,
            hint="read it with the Tenuto that wrote it, or a newer one",
        )


def put(store: Store, name: str, data: bytes, *, token: str) -> Receipt:
    """Puts `data`, which only this writer can have written (it contains a fresh random id).

    Raises AlreadyExists if the name has another writer's object. An equal object is this writer's own, whose reply was
    lost, and counts once it is settled.
    """
    try:
        return store.put_if_absent(name, Bytes(data), token=token)
    except AlreadyExists as taken:
        try:
            there = store.get(name, limit=len(data))
        except (ObjectNotFound, CorruptionError):
            raise taken from None
        if there != data:
            raise
        store.settle(name)
        return Receipt(name, len(data), store.url)


class Fields:
    """Typed access to an object's fields. A missing field or wrong type is a CorruptionError that names both."""

    __slots__ = ("name", "values")

    def __init__(self, values: dict[str, Json], name: str) -> None:
        self.values = values
        self.name = name

    def refuse(self, message: str) -> CorruptionError:
        return CorruptionError(f"{self.name}: {message}", subject=self.name)

    def _get(self, key: str, kind: type, what: str) -> Any:
        value = self.values.get(key)
        if type(value) is not kind:
            raise self.refuse(f"{key!r} is not {what}")
        return value

    def text(self, key: str, *, limit: int = 4096) -> str:
        value: str = self._get(key, str, "a string")
        if len(value) > limit:
            raise self.refuse(f"{key!r} is longer than {limit} characters")
        return value

    def hex(self, key: str, length: int, *, limit: int = 4096) -> str:
        value = self.text(key, limit=limit)
        if len(value) != length or not _HEX.fullmatch(value):
            raise self.refuse(f"{key!r} is not {length} hexadecimal digits")
        return value

    def whole(self, key: str, *, minimum: int = 0, maximum: int = canonical_json.MAX_INTEGER) -> int:
        value: int = self._get(key, int, "a whole number")
        if not minimum <= value <= maximum:
            raise self.refuse(f"{key!r} is {value}, which is not within {minimum} and {maximum}")
        return value

    def flag(self, key: str) -> bool:
        return bool(self._get(key, bool, "a truth value"))

    def mapping(self, key: str) -> dict[str, Json]:
        found: dict[str, Json] = self._get(key, dict, "an object")
        return found

    def sequence(self, key: str) -> list[Json]:
        found: list[Json] = self._get(key, list, "a list")
        return found

    def inner(self, value: Json, what: str) -> Fields:
        """Returns the fields of an object inside this one."""
        if not isinstance(value, dict):
            raise self.refuse(f"{what} is not an object")
        return Fields(value, self.name)

    def checkpoint(self, key: str) -> CheckpointId | None:
        """Returns a checkpoint's identity, None if the field is null."""
        return None if self.values.get(key, 0) is None else self.checkpoint_of(self.mapping(key), repr(key))

    def checkpoint_of(self, value: Json, what: str) -> CheckpointId:
        inner = self.inner(value, what)
        try:
            return CheckpointId(inner.text("run"), inner.whole("attempt", minimum=1), inner.whole("step"))
        except UsageError as error:
            raise self.refuse(f"{what} is not a checkpoint: {error.message}") from None

    def bases(self, id: CheckpointId) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints of which `id` may name packs; none of them twice, and not itself."""
        if "bases" not in self.values:
            return ()
        rows = self.sequence("bases")
        if len(rows) > MAX_BASES:
            raise self.refuse(f"names {len(rows)} checkpoints that it rests on")
        found = tuple(self.checkpoint_of(row, "a checkpoint that it rests on") for row in rows)
        if len({id, *found}) != len(found) + 1:
            raise self.refuse("names a checkpoint that it rests on twice, or itself")
        return found


def bases_json(bases: tuple[CheckpointId, ...]) -> dict[str, Json]:
    """Returns the field `bases` of an object: absent where there are none."""
    return {"bases": [checkpoint_json(id) for id in sorted(bases)]} if bases else {}


def checkpoint_json(id: CheckpointId | None) -> Json:
    return None if id is None else {"attempt": id.attempt, "run": id.run, "step": id.step}
