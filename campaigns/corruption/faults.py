"""Faults: what can become of an object's bytes, drawn over every class of byte of every object.

A byte class is a part of an object that means one thing: a pack's header length, its header, the padding, a leaf's
bytes; each column of an index; each field of a sealed object, its digest included.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from campaigns.corruption.shapes import Shape
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId, parse_attempt, parse_step
from tenuto.repo.format.safetensors import parse_header

SECTOR: Final = 512
PAGE: Final = 4096


@dataclass(frozen=True)
class Target:
    """An object that a fault may strike. `id`: the checkpoint that it lies under or belongs to, if any."""

    name: str
    kind: str
    id: CheckpointId | None
    run: str
    classes: tuple[tuple[str, int, int], ...]
    """Byte classes: what they mean, first byte, end."""
    donors: tuple[tuple[str, bytes], ...]
    """Other objects of the kind: where from, and their bytes."""


@dataclass(frozen=True)
class Fault:
    """`data`: what lies under the name afterwards; None: nothing."""

    target: Target
    kind: str
    what: str
    data: bytes | None

    def __str__(self) -> str:
        return f"{self.kind} of {self.target.name}: {self.what}"


def targets(shape: Shape) -> list[Target]:
    """Every object that anything vouches for, with its byte classes and what could lie there instead."""
    ours = {name: kind_of(name, data) for name, data in shape.objects.items()}
    theirs = {name: kind_of(name, data) for name, data in shape.twin.items()}
    listed = {
        id.directory
        for id in (*shape.saved, *(id_of(name) for name in shape.objects if name.startswith("trash/")))
        if id is not None
    }
    found = []
    for name, data in shape.objects.items():
        kind, id = ours[name], id_of(name)
        if kind in ("pack", "index") and (id is None or id.directory not in listed):
            continue  # of a save that never committed: no digest of it exists anywhere
        donors = [
            (_origin(name, other), other_data)
            for other, other_data in shape.objects.items()
            if ours[other] == kind and other_data != data
        ]
        donors += [
            ("another repository", shape.twin[other])
            for other in shape.twin
            if theirs[other] == kind and (other == name or kind in TOKENED) and shape.twin[other] != data
        ]
        run = name.split("/")[1] if name.startswith("runs/") else "main"
        found.append(Target(name, kind, id, run, tuple(byte_classes(kind, data)), tuple(donors)))
    return found


TOKENED: Final = frozenset({"trash", "gc mark", "tombstone"})
"""Kinds whose names are random."""


def kind_of(name: str, data: bytes) -> str:
    parts = name.split("/")
    if parts[0] in ("refs", "trash"):
        return {"refs": "ref", "trash": "trash"}[parts[0]]
    if parts[0] == "tombstones":
        return "gc mark" if parts[1] == "gc" else "tombstone"
    if "notes" in parts:
        return "note"
    if "lease" in parts:
        return "lease"
    file = parts[-1]
    if file == "manifest.json":
        return "aborted mark" if data.startswith(b'{"by":') else "manifest"
    plain = {
        "tenuto.json": "repository",
        "tenuto.copy.json": "repository",
        "attempt.json": "attempt",
        "begin.json": "begin",
    }
    return plain.get(file) or ("index" if file.endswith(".index") else "pack")


def id_of(name: str) -> CheckpointId | None:
    """The checkpoint in whose directory the object lies, or whose removal it speaks of."""
    parts = name.split("/")
    if parts[:2] == ["tombstones", "gc"]:
        parts = parts[1:]
    if len(parts) < 5:
        return None
    attempt, step = parse_attempt(parts[2]), parse_step(parts[3])
    return CheckpointId(parts[1], attempt, step) if attempt is not None and step is not None else None


def _origin(name: str, other: str) -> str:
    """How far `other` lies from `name`."""
    if not (name.startswith("runs/") and other.startswith("runs/")):
        return "another name"
    mine, theirs = name.split("/"), other.split("/")
    if mine[1] != theirs[1]:
        return "another run"
    if mine[2] != theirs[2]:
        return "another attempt"
    return "another step" if mine[3] != theirs[3] else "another number"


def byte_classes(kind: str, data: bytes) -> Iterator[tuple[str, int, int]]:
    if kind == "pack" and b'"tenuto.pack"' in data[:4096]:
        block = 8 + int.from_bytes(data[:8], "little")
        text = 8 + len(data[8:block].rstrip(b" "))
        yield "header length", 0, 8
        yield "header", 8, text
        if block > text:
            yield "header padding", text, block
        yield "encoded chunks", block, len(data)
        return
    if kind in ("pack", "index"):
        header = parse_header(data, name=kind)
        text = 8 + len(data[8 : header.length].rstrip(b" "))
        yield "header length", 0, 8
        yield "header", 8, text
        if header.length > text:
            yield "header padding", text, header.length
        for name, entry in header.items():
            if entry.stop > entry.start:
                yield f"column {name}" if kind == "index" else "tensor bytes", entry.start, entry.stop
        return
    found = canonical_json.loads(data)
    assert isinstance(found, dict)
    at = 1
    for key, value in found.items():
        stop = at + len(key) + 3 + len(canonical_json.dumps(value))
        yield f"field {key}", at, stop
        at = stop + 1
    yield "brackets and commas", 0, 1


Change = Callable[[bytes, int, int, random.Random, Shape], tuple[str, bytes]]
"""Bytes, the byte class's first byte and end, a source, the shape: what was done, and the changed bytes."""


def _flip(data: bytes, low: int, high: int, source: random.Random, shape: Shape) -> tuple[str, bytes]:
    at, bit = source.randrange(low, high), source.randrange(8)
    return f"bit {bit} of byte {at}", _put(data, at, bytes([data[at] ^ 1 << bit]))


def _byte(data: bytes, low: int, high: int, source: random.Random, shape: Shape) -> tuple[str, bytes]:
    at, value = source.randrange(low, high), source.randrange(256)
    return f"byte {at} is {value}", _put(data, at, bytes([value]))


def _zeroed(size: int) -> Change:
    def change(data: bytes, low: int, high: int, source: random.Random, shape: Shape) -> tuple[str, bytes]:
        start = source.randrange(low, high) // size * size
        stop = min(start + size, len(data))
        return f"bytes {start} to {stop} are zero", _put(data, start, bytes(stop - start))

    return change


def _other_sector(data: bytes, low: int, high: int, source: random.Random, shape: Shape) -> tuple[str, bytes]:
    size = source.choice((SECTOR, PAGE))
    start = source.randrange(low, high) // size * size
    stop = min(start + size, len(data))
    name = source.choice(list(shape.objects))
    other = shape.objects[name]
    where = source.randrange(-(-len(other) // size)) * size
    piece = other[where : where + stop - start]
    return f"bytes {start} to {start + len(piece)} are those of {name} from {where}", _put(data, start, piece)


def _truncate(data: bytes, low: int, high: int, source: random.Random, shape: Shape) -> tuple[str, bytes]:
    length = source.randrange(low, high)
    return f"{length} of {len(data)} bytes", data[:length]


def _extend(data: bytes, low: int, high: int, source: random.Random, shape: Shape) -> tuple[str, bytes]:
    count = source.choice((1, 2, 16, SECTOR, PAGE))
    more = source.choice((bytes(count), b"\n" * count, b" " * count, source.randbytes(count), data[-count:]))
    return f"{len(more)} more bytes", data + more


def _swap(data: bytes, low: int, high: int, source: random.Random, shape: Shape) -> tuple[str, bytes]:
    """Two rows of the byte class change places; rows are as long as items, digests or chunks may be."""
    size, one, other = _rows(data, low, high, source)
    out = bytearray(data)
    out[one : one + size], out[other : other + size] = data[other : other + size], data[one : one + size]
    return f"{size} bytes at {one} and {other} swapped", bytes(out)


def _duplicate(data: bytes, low: int, high: int, source: random.Random, shape: Shape) -> tuple[str, bytes]:
    """A row twice: over another one, or in between, so that all that follows moves."""
    size, one, other = _rows(data, low, high, source)
    row = data[one : one + size]
    if source.random() < 0.5:
        return f"{size} bytes at {one} again at {other}", _put(data, other, row)
    return f"{size} bytes at {one} inserted at {other}", data[:other] + row + data[other:]


def _rows(data: bytes, low: int, high: int, source: random.Random) -> tuple[int, int, int]:
    size = source.choice([size for size in (1, 2, 4, 8, 16, 64, 256, SECTOR) if 2 * size <= high - low] or [1])
    count = max((high - low) // size, 1)
    return size, low + source.randrange(count) * size, low + source.randrange(count) * size


def _put(data: bytes, at: int, piece: bytes) -> bytes:
    return data[:at] + piece + data[at + len(piece) :]


CHANGES: Final[Mapping[str, Change]] = {
    "bit flip": _flip,
    "byte overwritten": _byte,
    "512-byte sector zeroed": _zeroed(SECTOR),
    "4096-byte sector zeroed": _zeroed(PAGE),
    "sector of elsewhere": _other_sector,
    "truncated": _truncate,
    "extended": _extend,
    "rows swapped": _swap,
    "range duplicated": _duplicate,
}
FOREIGN: Final = "another object's content"
MISSING: Final = "missing"
KINDS: Final[Sequence[str]] = (*CHANGES, FOREIGN, MISSING)
_WEIGHTS: Final = (30, 15, 6, 4, 8, 8, 5, 8, 8, 6, 2)
_TRIES: Final = 50


def draw(shape: Shape, target: Target, source: random.Random) -> Fault:
    """One fault that changes the object. What would leave it as it is, is drawn again."""
    for _ in range(_TRIES):
        (kind,) = source.choices(KINDS, _WEIGHTS)
        if kind == MISSING:
            return Fault(target, kind, "gone", None)
        data = shape.objects[target.name]
        if kind == FOREIGN:
            if not target.donors:
                continue
            origin, changed = source.choice(target.donors)
            return Fault(target, kind, origin, changed)
        label, low, high = source.choice(target.classes)
        what, changed = CHANGES[kind](data, low, high, source, shape)
        if changed == data:
            continue
        whose = next((origin for origin, other in target.donors if other == changed), None)
        if whose is not None:  # a small object is but one sector
            return Fault(target, FOREIGN, whose, changed)
        return Fault(target, kind, f"{label}: {what}", changed)
    raise AssertionError(f"no fault changes {target.name}")
