"""One store over several places: large objects are dealt out in parts to all of them, small ones lie in each.

In every place:

    tenuto-stripe.json           which stripe this is a place of, and its number: put once, never changed
    objects/<name>               a small object, or the descriptor of a striped one: the same in every place
    stripes/<name>.<file>        this place's parts of a striped object, one after the other

The first place decides which objects exist: a put is decided there and copied to the others, a removal ends there. The
parts of a striped object are durable before its descriptor is put, so it appears whole or not at all; parts that no
descriptor names are leftovers. Nothing is written unless every place has its record: an empty directory where a file
system is not mounted looks like a place otherwise.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.errors import AlreadyExists, CorruptionError, ObjectNotFound, StoreError, TenutoError, UsageError, typed
from tenuto.model.records import Receipt
from tenuto.model.sizes import parse_bytes
from tenuto.record import record
from tenuto.store.base import BaseStore
from tenuto.store.contract import (
    TEMPORARY,
    Bytes,
    Capabilities,
    Content,
    Entry,
    Listing,
    Reader,
    Stat,
    Store,
    Where,
    check_name,
    check_new_name,
    check_prefix,
    check_token,
    final_name,
    is_leftover,
)
from tenuto.store.registry import open_store
from tenuto.store.wrappers.fan_out import put_into_all
from tenuto.store.wrappers.striped_object import Descriptor, Share, StripedReader

SCHEME: Final = "stripe://"
RECORD: Final = "tenuto-stripe.json"
_OBJECTS: Final = "objects"
_STRIPES: Final = "stripes"
_RECORD_LIMIT: Final = 64 << 10
_BLOCK: Final = 4096
_STRIPE_NAME: Final = re.compile(rf"{_STRIPES}/(.+)\.([0-9a-f]{{32}})(?:{re.escape(TEMPORARY)}.*)?", re.ASCII)
_LEFTOVER: Final = re.compile(rf"(.+){re.escape(TEMPORARY)}([0-9a-f]{{32}})", re.ASCII)
Result = TypeVar("Result")


class Stripe(BaseStore):
    """One location over several mounts, such as the NVMe disks of a node, as fast as all of them together.

    Objects of more than one `part` are cut into parts of that length, which go to the mounts in turn and are written
    and read side by side; smaller ones lie on every mount. Losing a mount loses every striped object: a stripe is for
    speed, and a mirror or another tier for safety. Mounts are recognised by a record on each, in any order.

    `part`: a multiple of 4096. A save hands out pieces of at most 64 MiB, each of which should have parts for all
    mounts.
    """

    def __init__(self, *places: Where, part: int | str = "4MiB") -> None:
        self.places: Final = [open_store(place) for place in places]
        self.part: Final = parse_bytes(part, "part")
        urls = [place.url for place in self.places]
        if len(urls) < 2 or len(set(urls)) < len(urls):
            raise UsageError(
                f"a stripe needs two or more locations, each once: {', '.join(urls) or 'none given'}",
                subject=", ".join(urls) or "Stripe()",
                hint='Stripe("/one/mount/checkpoints", "/another/mount/checkpoints")',
            )
        if any("," in url for url in urls):
            raise UsageError(
                "the locations of a stripe have no comma in their names",
                subject=", ".join(urls),
                hint="mount or link the location at a path without a comma",
            )
        if self.part % _BLOCK:
            raise UsageError(
                f"part={part!r} is not a multiple of 4096 bytes: parts could not bypass the page cache",
                subject="part",
                hint='part="4MiB"',
            )
        self._id: str | None = None
        """The stripe's id, once a record has been seen."""
        self._order: list[Store | None] | None = None
        """The places by their numbers, as they were seen last; None for one that is lost."""
        self._whole = False
        """Whether all places have been seen: from then on none is made anew."""

    def __repr__(self) -> str:
        return f"Stripe({', '.join(repr(place.url) for place in self.places)}, part={self.part})"

    @property
    def url(self) -> str:
        return SCHEME + ",".join(place.url for place in self.places)

    @property
    def capabilities(self) -> Capabilities:
        each = [place.capabilities for place in self.places]
        return Capabilities(
            commits=all(one.commits for one in each),
            persistent=all(one.persistent for one in each),
            lists_times=all(one.lists_times for one in each),
            part_bytes=min(self.part, max(one.part_bytes for one in each)),
            parallel=sum(one.parallel for one in each),
        )

    def probe(self) -> Capabilities:
        for place in self._to_write():
            place.probe()
        return self.capabilities

    # -- places --------------------------------------------------------------------------------------------------------

    def _read_records(self) -> list[Store | None] | None:
        """Reads every place's record. Returns the places by their numbers, with None for lost ones; None if no place
        has a record: nothing was ever put."""
        records = [(place, found) for place in self.places if (found := _record(place)) is not None]
        if not records:
            return None
        first_place, first = records[0]
        if first.places != len(self.places):
            raise StoreError(
                f"{first_place.url} is one of {first.places} locations of a stripe, and {len(self.places)} are given",
                subject=first_place.url,
                hint="give all of them, in any order",
            )
        order: list[Store | None] = [None] * first.places
        for place, found in records:
            if found.stripe != first.stripe or found.places != first.places or order[found.number] is not None:
                raise StoreError(
                    f"{place.url} and {first_place.url} are not two locations of one stripe",
                    subject=place.url,
                    hint=f"compare {RECORD} in both: `stripe` is the same in all locations of a stripe",
                )
            order[found.number] = place
        self._id, self._order = first.stripe, order
        return order

    def _present(self, *, anew: bool = False) -> list[Store]:
        """Returns the places to read from: the one that decides first."""
        order = self._read_records() if anew or self._order is None or None in self._order else self._order
        if order is None and self._id is not None:
            raise self._lost(self.places[0])
        return list(self.places) if order is None else [place for place in order if place is not None]

    def _to_write(self) -> list[Store]:
        """Returns all places, each just seen to be what it was. Raises StoreError, which names it, if one is lost."""
        while True:
            # What was known before the records are read: other threads may begin the stripe meanwhile.
            known, whole, order = self._id, self._whole, self._read_records()
            found = [] if order is None else [place for place in order if place is not None]
            missing = [place for place in self.places if place not in found]
            if not missing:
                self._whole = True
                return found
            if whole or (order is None and known is not None):
                raise self._lost(missing[0])
            used = next((place for place in self.places if _is_used(place)), None)
            if used is None:
                self._begin(order or [None] * len(missing), missing)
            elif self._read_records() == order:  # else another process has begun it meanwhile
                raise self._lost(missing[0]) if found else self._taken(used)

    def _begin(self, order: Sequence[Store | None], missing: Sequence[Store]) -> None:
        """Puts the records that are missing, while all places are empty; the first place's last: where that is, every
        place had its own. Of several processes one decides, and the others look again."""
        stripe = self._id or secrets.token_hex(16)
        numbers = [number for number, place in enumerate(order) if place is None]
        for number, place in reversed(list(zip(numbers, missing, strict=True))):
            body = {"stripe": stripe, "place": number, "places": len(self.places), "url": self.url}
            try:
                place.put_if_absent(RECORD, Bytes(json.dumps(body).encode()), token=stripe)
            except AlreadyExists:
                if _record(place) is None:
                    raise self._lost(place) from None  # there, and not to be read
                return

    def _taken(self, place: Store) -> StoreError:
        return StoreError(
            f"{place.url} holds something already, and does not belong to a stripe",
            subject=place.url,
            hint="give an empty directory on each of the mounts",
        )

    def _lost(self, place: Store) -> StoreError:
        return StoreError(
            f"{place.url} is not the location of this stripe that it was: its {RECORD} is missing or cannot be read; "
            "nothing is written while a location is lost, and only small objects can be read",
            subject=place.url,
            hint=f"{typed('findmnt', '-T', place.url)}  # is its file system mounted?",
        )

    def _is_lost(self, place: Store) -> bool:
        if self._id is None:
            return False
        found = _record(place)
        return found is None or found.stripe != self._id

    def _ask(self, act: Callable[[Store], Result], *, anew: bool = False) -> Result:
        """Asks the place that decides; where it is lost or fails, the next one."""
        failure: StoreError | None = None
        for place in self._present(anew=anew):
            try:
                with _own_names():
                    return act(place)
            except ObjectNotFound:
                if not self._is_lost(place):
                    raise
                self._order = None
                failure = self._lost(place)
            except StoreError as error:
                failure = failure or error
        raise failure or self._lost(self.places[0])

    # -- putting -------------------------------------------------------------------------------------------------------

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        check_new_name(name)
        check_token(token)
        places = self._to_write()
        if content.length <= self.part:
            data = b"".join(bytes(piece) for piece in content.pieces())
            if len(data) != content.length:
                raise StoreError(f"{name} was announced with {content.length} bytes and has {len(data)}", subject=name)
            if len(data) == Descriptor.LENGTH and data.startswith(Descriptor.MAGIC):
                raise StoreError(f"{name} reads like the descriptor of a striped object", subject=name)
            self._put_into_each(places, name, data, token)
        else:
            self._put_striped(places, name, content, token)
        return Receipt(name, content.length, self.url)

    def _put_into_each(self, places: Sequence[Store], name: str, data: bytes, token: str) -> None:
        def copy(place: Store) -> None:
            try:
                place.put_if_absent(at, Bytes(data), token=token)
            except AlreadyExists:
                # Not decided there: left by a put or a removal that died between the places.
                if place.stat(at).length != len(data) or place.get(at, limit=len(data)) != data:
                    place.delete([at])
                    place.put_if_absent(at, Bytes(data), token=token)

        at = _at(name)
        with _own_names():
            places[0].put_if_absent(at, Bytes(data), token=token)
            parallel_for(copy, places[1:], len(places))

    def _put_striped(self, places: Sequence[Store], name: str, content: Content, token: str) -> None:
        with suppress(ObjectNotFound):
            places[0].stat(_at(name))  # avoids writing gigabytes in vain; the descriptor decides
            raise AlreadyExists(f"{name} exists already ({self.url})", subject=name)
        descriptor = Descriptor(content.length, self.part, secrets.token_hex(16))
        shares = [Share(place, descriptor, number, len(places)) for number, place in enumerate(places)]
        stripe = _stripe(name, descriptor.file)
        try:
            found = put_into_all([share for share in shares if share.length], stripe, content, token=descriptor.file)
            for outcome in found:
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:
            self._discard(places, stripe)
            raise
        try:
            self._put_into_each(places, name, descriptor.encode(), token)
        except AlreadyExists:
            self._discard(places, stripe)
            raise

    def _discard(self, places: Sequence[Store], stripe: str) -> None:
        for place in places:
            with suppress(StoreError):  # what stays is listed among the leftovers
                place.delete([stripe])

    # -- reading -------------------------------------------------------------------------------------------------------

    def open(self, name: str) -> Reader:
        check_name(name)

        def opened(place: Store) -> Reader | Descriptor:
            reader = place.open(_at(name))
            if reader.length != Descriptor.LENGTH:
                return StripedReader(name, Descriptor(reader.length, max(reader.length, 1), ""), [reader])
            with reader:
                data = bytearray(reader.length)
                reader.read_into(0, memoryview(data))
            descriptor = Descriptor.decode(name, bytes(data))
            if descriptor is None:
                return StripedReader(name, Descriptor(len(data), len(data), ""), [place.open(_at(name))])
            return descriptor

        found = self._ask(opened)
        return self._open_striped(name, found) if isinstance(found, Descriptor) else found

    def _open_striped(self, name: str, descriptor: Descriptor) -> Reader:
        readers: list[Reader | None] = []
        try:
            order = self._order or list[Store | None](self.places)
            for number, place in enumerate(order):
                if not descriptor.share_length(number, len(order)):
                    readers.append(None)
                    continue
                if place is None:
                    raise self._lost(next(one for one in self.places if one not in order))
                try:
                    readers.append(place.open(_stripe(name, descriptor.file)))
                except ObjectNotFound:
                    if self._is_lost(place):
                        raise self._lost(place) from None
                    raise CorruptionError(
                        f"the parts of {name} in {place.url} are missing", subject=name, object=name
                    ) from None
        except BaseException:
            for reader in readers:
                if reader is not None:
                    reader.close()
            raise
        return StripedReader(name, descriptor, readers)

    def get(self, name: str, *, limit: int) -> bytes:
        with self.open(name) as reader:
            if reader.length > limit:
                raise CorruptionError(f"{name} has {reader.length} bytes where at most {limit} belong", subject=name)
            data = bytearray(reader.length)
            reader.read_into(0, memoryview(data))
        return bytes(data)

    def stat(self, name: str) -> Stat:
        def read(place: Store) -> Stat:
            found = place.stat(_at(name))
            return Stat(self._length(place, name, found.length), found.modified_ns)

        check_name(name)
        return self._ask(read)

    def _length(self, place: Store, name: str, stored: int) -> int:
        descriptor = _descriptor(place, name) if stored == Descriptor.LENGTH else None
        return stored if descriptor is None else descriptor.length

    # -- listing -------------------------------------------------------------------------------------------------------

    def children(self, prefix: str, *, after: str = "") -> Listing:
        check_prefix(prefix)
        return self._ask(lambda place: place.children(_at(prefix), after=after), anew=True)

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        check_prefix(prefix)
        if not leftovers:
            return self._objects(prefix)
        found = {entry.name: entry for entry in self._objects(prefix)}
        for place in self._present():
            for entry in place.walk(_at(prefix), leftovers=True):
                if is_leftover(entry.name):
                    name = entry.name[len(_OBJECTS) + 1 :]
                    found.setdefault(name, Entry(name, entry.length, entry.modified_ns))
        found.update(self._loose_stripes(prefix))
        return iter(sorted(found.values(), key=lambda entry: entry.name))

    def _objects(self, prefix: str) -> Iterator[Entry]:
        place, *_ = self._present(anew=True)
        for entry in place.walk(_at(prefix)):
            name = entry.name[len(_OBJECTS) + 1 :]
            with suppress(ObjectNotFound):  # removed meanwhile
                yield Entry(name, self._length(place, name, entry.length), entry.modified_ns)

    def _loose_stripes(self, prefix: str) -> dict[str, Entry]:
        """Returns the parts that no descriptor names, under the names of temporaries that `delete` accepts."""
        loose: dict[str, Entry] = {}
        present = self._present()
        for place in present:
            for entry in place.walk(f"{_STRIPES}/{prefix}" if prefix else _STRIPES, leftovers=True):
                found = _STRIPE_NAME.fullmatch(entry.name)
                if found is None:
                    continue
                name, file = found.groups()
                shown = f"{name}{TEMPORARY}{file}"
                if shown in loose or not self._is_named(present[0], name, file):
                    before = loose[shown].length if shown in loose else 0
                    loose[shown] = Entry(shown, before + entry.length, entry.modified_ns)
        return loose

    def _is_named(self, place: Store, name: str, file: str) -> bool:
        try:
            descriptor = _descriptor(place, name)
        except ObjectNotFound:
            return False
        except CorruptionError:
            return True  # which parts it named is unknown: they are freed with the object
        return descriptor is not None and descriptor.file == file

    # -- removing and flushing -----------------------------------------------------------------------------------------

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        listed = [check_name(name) for name in names]
        if not listed or (self._id is None and self._read_records() is None):
            return  # nothing was ever put
        places = self._to_write()
        stripes: list[str] = []
        for name in listed:
            loose = _LEFTOVER.fullmatch(name)
            if loose is not None:
                stripe = _stripe(*loose.groups())
                stripes += [stripe, f"{stripe}{TEMPORARY}{loose[2]}"]
                continue
            with suppress(ObjectNotFound, CorruptionError):  # damaged: its parts become leftovers
                descriptor = _descriptor(places[0], name)
                if descriptor is not None:
                    stripes.append(_stripe(name, descriptor.file))
        with _own_names():
            # The first place last: as long as it has an object, the removal can be repeated.
            for place in reversed(places):
                place.delete([_at(name) for name in listed])
            if stripes:
                parallel_for(lambda place: place.delete(stripes), places, len(places))

    def settle(self, name: str) -> None:
        check_name(name)
        with _own_names():
            for place in self._present(anew=True):
                place.settle(_at(name))
                with suppress(ObjectNotFound, CorruptionError):
                    descriptor = _descriptor(place, name)
                    if descriptor is not None:
                        place.settle(_stripe(name, descriptor.file))

    def free_bytes(self) -> int | None:
        """Returns what striped objects can take: the fullest place limits all."""
        each = [place.free_bytes() for place in self.places]
        known = [free for free in each if free is not None]
        return min(known) * len(each) if len(known) == len(each) else None

    def close(self) -> None:
        for place in self.places:
            place.close()


# --------------------------------------------------------------------------------------------------
# Names, the record of a place, and descriptors as they lie in one.


def _at(name: str) -> str:
    return f"{_OBJECTS}/{name}" if name else _OBJECTS


def _stripe(name: str, file: str) -> str:
    return f"{_STRIPES}/{name}.{file}"


@contextmanager
def _own_names() -> Iterator[None]:
    """Makes errors of a place name the object as the stripe's user does."""
    try:
        yield
    except TenutoError as error:
        if error.subject is not None:
            error.subject = error.subject.removeprefix(f"{_OBJECTS}/")
        raise


def stripe_around(place: Store) -> str | None:
    """Returns the URL of the stripe that was begun with this place; None if it is no place of one."""
    found = _record(place)
    return None if found is None else found.url


def _is_used(place: Store) -> bool:
    return any(final_name(entry.name) != RECORD for entry in place.walk("", leftovers=True))


@record
class Record:
    stripe: str
    number: int
    places: int
    url: str
    """As it was begun; mounts may have moved since."""


def _record(place: Store) -> Record | None:
    """Reads the record of a place; None if there is none, or the place cannot be read: it is lost then."""
    try:
        found = json.loads(place.get(RECORD, limit=_RECORD_LIMIT))
        stripe, number, places = found["stripe"], found["place"], found["places"]
        if isinstance(stripe, str) and isinstance(number, int) and isinstance(places, int) and 0 <= number < places:
            return Record(stripe, number, places, str(found.get("url"))) if places <= _RECORD_LIMIT else None
    except (StoreError, CorruptionError, ValueError, TypeError, KeyError):
        pass
    return None


def _descriptor(place: Store, name: str) -> Descriptor | None:
    """Reads the descriptor of a striped object; None if the object is not striped."""
    with place.open(_at(name)) as reader:
        if reader.length != Descriptor.LENGTH:
            return None
        data = bytearray(reader.length)
        reader.read_into(0, memoryview(data))
    return Descriptor.decode(name, bytes(data))
