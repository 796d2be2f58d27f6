"""The layout of an image: which leaf lies where in which pack.

Leaves are ordered by the largest power of two, 64 at most, that divides their length, descending, then by path: so each
is aligned to that power without a hole, for safetensors refuses holes. Large tensors begin at lines of the processor's
cache then: a copy into the image takes longer where they do not. A pack's tensors begin at a multiple of
4096; packs too, so that an image is written in aligned blocks. Beyond a header of 64 MiB or 500,000 leaves a further
pack is begun. Leaves that the home is to have too are in packs of their own, behind the others.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np

from tenuto.codec.digest import digest
from tenuto.errors import DuplicatePath, UsageError
from tenuto.model.leaf import METADATA, DType, LeafSpec, dtype
from tenuto.record import record
from tenuto.repo.format.object_names import pack_file
from tenuto.repo.format.safetensors import ALIGNMENT, entry_text, pad_header

SAVE_ID_KEY: Final = "tenuto.save_id"
SAVE_ID_CHARACTERS: Final = 32
_LINE: Final = 64
"""Bytes of a line of the cache."""
_PREFIX: Final = f'{{"{METADATA}":{{{json.dumps(SAVE_ID_KEY)}:"'
_SAVE_ID_AT: Final = 8 + len(_PREFIX)

Array = np.ndarray[Any, Any]


@record
class PackPlan:
    """One pack: `start`, where its first byte lies in the image; `header_length` and `length` (the file's) in bytes."""

    name: str
    start: int
    header_length: int
    length: int


@record(eq=False)
class BufferLayout:
    """Where every leaf lies. Columns are int64 [n] by leaf number (the row of `specs`).

    pack: number of the pack; offset: from the pack's first byte; start: from the image's first byte; length: bytes.
    order: leaf numbers as they follow each other in the image. nbytes: what the arena must hold, a multiple of 4096.
    """

    packs: tuple[PackPlan, ...]
    nbytes: int
    pack: Array
    offset: Array
    start: Array
    length: Array
    order: Array
    templates: tuple[bytes, ...]
    """Header blocks with a save id of zeros."""

    def header(self, number: int, save_id: str) -> bytes:
        """Returns the header block of pack `number`, padding included."""
        template = self.templates[number]
        return template[:_SAVE_ID_AT] + _save_id(save_id) + template[_SAVE_ID_AT + SAVE_ID_CHARACTERS :]

    def header_digest(self, number: int, save_id: str) -> bytes:
        """Returns the digest of that block, as an index has it."""
        return digest(self.header(number, save_id))

    def stamp(self, buffer: Array, save_id: str) -> None:
        """Writes every header into the image (`buffer`, uint8, at least `nbytes`) and zeroes what no leaf fills."""
        for number in range(len(self.packs)):
            self.stamp_header(number, buffer, save_id)
            self.stamp_tail(number, buffer)

    def stamp_header(self, number: int, buffer: Array, save_id: str) -> None:
        """Writes the header of pack `number`."""
        plan = self.packs[number]
        block = buffer[plan.start : plan.start + plan.header_length]
        block[:] = np.frombuffer(self.templates[number], np.uint8)
        block[_SAVE_ID_AT : _SAVE_ID_AT + SAVE_ID_CHARACTERS] = np.frombuffer(_save_id(save_id), np.uint8)

    def stamp_tail(self, number: int, buffer: Array) -> None:
        """Zeroes what lies between the end of pack `number` and the next multiple of 4096."""
        end = self.packs[number].start + self.packs[number].length
        buffer[end : _aligned(end)] = 0


def plan_layout(
    specs: Sequence[LeafSpec],
    *,
    rank: int = 0,
    in_home: Collection[int] = (),
    max_header: int = 64 << 20,
    max_leaves: int = 500_000,
) -> BufferLayout:
    """Plans the layout of these leaves in rank `rank`'s image; `in_home`: as `Flattened.in_home`. Raises DuplicatePath
    if two leaves have one path, or two parts of a leaf the same offsets."""
    forms = _forms(specs)
    order = _arrange(specs, forms)
    home = np.isin(order, list(in_home))
    count = len(specs)
    length = np.fromiter((form.nbytes for form in forms), np.int64, count)
    pack, offset, start = (np.zeros(count, np.int64) for _ in range(3))
    packs: list[PackPlan] = []
    templates: list[bytes] = []
    at = 0
    groups = [order[~home], order[home]] if in_home else [order]
    for group, leaves in enumerate(groups):
        for number, (first, stop, template) in enumerate(_split(specs, forms, leaves, max_header, max_leaves)):
            members = leaves[first:stop]
            ends = np.cumsum(length[members])
            begins = len(template) + ends - length[members]
            nbytes = len(template) + int(ends[-1] if len(ends) else 0)
            plan = PackPlan(pack_file(rank, number, home=group > 0), at, len(template), nbytes)
            pack[members], offset[members], start[members] = len(packs), begins, begins + at
            packs.append(plan)
            templates.append(template)
            at = _aligned(at + plan.length)
    return BufferLayout(tuple(packs), at, pack, offset, start, length, np.concatenate(groups), tuple(templates))


def stored_name(spec: LeafSpec) -> str:
    """Returns its name in a pack: the path, and for a part of a leaf where it begins. No path has an `@` in it."""
    return spec.path if spec.offsets is None else f"{spec.path}@{','.join(map(str, spec.offsets))}"


@record
class _Form:
    """The properties of leaves of one dtype and shape: their rank in the image, their length, their entry."""

    rank: int
    nbytes: int
    code: str
    shape: tuple[int, ...]


def _forms(specs: Sequence[LeafSpec]) -> list[_Form]:
    """Returns the form of each leaf. States have many leaves of few forms."""
    known: dict[tuple[str, tuple[int, ...]], _Form] = {}
    found: list[_Form] = []
    for spec in specs:
        key = spec.dtype, spec.shape
        form = known.get(key)
        if form is None:
            kind: DType = dtype(spec.dtype)
            nbytes = spec.nbytes
            plain = kind.code is not None
            form = known[key] = _Form(
                -_alignment(nbytes), nbytes, kind.code or "U8", spec.shape if plain else (nbytes,)
            )
        found.append(form)
    return found


def _arrange(specs: Sequence[LeafSpec], forms: Sequence[_Form]) -> Array:
    """Returns the leaf numbers in image order."""
    ranked = sorted(
        (form.rank, spec.path, spec.offsets or (), number)
        for number, (spec, form) in enumerate(zip(specs, forms, strict=True))
    )
    seen: set[str] = set()
    for spec in specs:
        assert spec.path != METADATA, "the state refuses this path"
        name = spec.path if spec.offsets is None else stored_name(spec)
        if name in seen:
            raise DuplicatePath(f"two leaves have the path {name!r}", subject=spec.path)
        seen.add(name)
    return np.fromiter((one[-1] for one in ranked), np.int64, len(ranked))


def _alignment(nbytes: int) -> int:
    """Returns at least the natural alignment of the items, since a length is a multiple of theirs."""
    return min(nbytes & -nbytes, _LINE) if nbytes else _LINE


def _split(
    specs: Sequence[LeafSpec], forms: Sequence[_Form], order: Array, max_header: int, max_leaves: int
) -> Iterator[tuple[int, int, bytes]]:
    """Yields a run of leaves in image order for each pack: first, stop, header block. One pack even without leaves."""
    parts: list[str] = []
    # Ends in a brace and padding; the eight bytes of the length come first.
    room = empty = max_header - len(_PREFIX) - SAVE_ID_CHARACTERS - len('"}}') - 8
    first = data = 0
    for position, number in enumerate(order.tolist()):
        path, form = stored_name(specs[number]), forms[number]
        part = entry_text(path, form.code, form.shape, data, data + form.nbytes)
        if parts and (len(parts) == max_leaves or len(part) + 1 > room):
            yield first, position, _template(parts)
            parts, room, first, data = [], empty, position, 0
            part = entry_text(path, form.code, form.shape, 0, form.nbytes)
        parts.append(part)
        room -= len(part) + 1
        data += form.nbytes
    yield first, len(order), _template(parts)


def _template(parts: list[str]) -> bytes:
    return pad_header(_PREFIX + "0" * SAVE_ID_CHARACTERS + '"}' + "".join("," + part for part in parts) + "}")


def _save_id(save_id: str) -> bytes:
    if len(save_id) != SAVE_ID_CHARACTERS or not save_id.isascii() or not save_id.isalnum():
        raise UsageError(f"{save_id!r} is not a save id: {SAVE_ID_CHARACTERS} letters and digits", subject=save_id)
    return save_id.encode("ascii")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
