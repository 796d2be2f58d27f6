"""The header of a safetensors file: a builder, and a parser that trusts nothing.

A file is 8 bytes of little-endian header length, that many bytes of JSON padded with spaces, then the tensors' bytes
without gaps, overlaps or trailing bytes. Every possible fault of a header has its own message. Entries are parsed one
at a time, so that a small file cannot demand much memory.

Source: the safetensors format, https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Final, NoReturn

from tenuto.errors import CorruptionError
from tenuto.model.leaf import DTYPES, METADATA
from tenuto.record import record

MAX_HEADER: Final = 100_000_000
"""The limit of safetensors itself, in bytes."""
ALIGNMENT: Final = 4096
_MAX_ENTRY: Final = 65_536
_MAX_FILE: Final = 2**63 - 1
_LONGEST: Final = 1000
"""Characters of an error: a name may have millions."""

SIZES: Final[Mapping[str, int]] = {row.code: row.size for row in DTYPES.values() if row.code is not None}
"""Bytes per element of every known dtype code."""

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_COLON: Final = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_USUAL: Final = re.compile(
    r'"([^"\\\x00-\x1f]*+)":\{"dtype":"([A-Z0-9_]{1,16})",'
    r'"shape":\[((?:(?:0|[1-9][0-9]{0,17})(?:,(?=[0-9])|(?=\])))*+)\],'
    r'"data_offsets":\[(0|[1-9][0-9]{0,17}),(0|[1-9][0-9]{0,17})\]\}'
)
_ENTRY: Final = re.compile(r"\{[^{}]*\}")


@record
class HeaderEntry:
    """A tensor: dtype code, shape, and its bytes `start..stop-1`, from the file's first byte."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(dict[str, HeaderEntry]):
    """The tensors of a file by name, in header order. `length`: the offset of their bytes. `metadata`: strings."""

    def __init__(self, entries: Mapping[str, HeaderEntry], length: int, metadata: Mapping[str, str]) -> None:
        super().__init__(entries)
        self.length = length
        self.metadata = dict(metadata)


def build_header(
    entries: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str], *, align: int = ALIGNMENT
) -> bytes:
    """Returns the header block of tensors (name, dtype code, shape) stored in this order.

    Its length is a multiple of `align`; the first tensor's bytes follow directly.
    """
    parts = [f'"{METADATA}":{json.dumps(dict(metadata), separators=(",", ":"))}'] if metadata else []
    at = 0
    for name, code, shape in entries:
        stop = at + SIZES[code] * _product(shape)
        parts.append(entry_text(name, code, shape, at, stop))
        at = stop
    return pad_header("{" + ",".join(parts) + "}", align=align)


def entry_text(name: str, code: str, shape: Sequence[int], start: int, stop: int) -> str:
    """Returns one member of the header's JSON; `start..stop-1` count from the end of the header."""
    sizes = ",".join(map(str, shape))
    return f'{encode_basestring_ascii(name)}:{{"dtype":"{code}","shape":[{sizes}],"data_offsets":[{start},{stop}]}}'


def pad_header(text: str, *, align: int = ALIGNMENT) -> bytes:
    """Returns the header block of this JSON (ASCII), padded with spaces to a multiple of `align`."""
    length = -(-(8 + len(text)) // align) * align
    return (length - 8).to_bytes(8, "little") + text.encode("ascii").ljust(length - 8)


def header_length(block: bytes | memoryview, *, name: str, file_length: int, max_header: int = MAX_HEADER) -> int:
    """Returns the length of a file's header block, with its 8 length bytes. Needs only the first 8 bytes."""
    if file_length < 8 or len(block) < 8:
        _refuse(name, 0, f"the file has {min(file_length, len(block))} bytes, which is too short for a header")
    length = int.from_bytes(block[:8], "little")
    if length > max_header:
        _refuse(name, 0, f"the header claims {length} bytes; at most {max_header} are read")
    if length + 8 > file_length:
        _refuse(name, 0, f"the header claims {length} bytes, but the file ends after {file_length - 8} of them")
    if length < 2:
        _refuse(name, 0, f"the header claims {length} bytes, which cannot hold an object")
    return length + 8


def parse_header(
    block: bytes | memoryview, *, name: str, file_length: int | None = None, max_header: int = MAX_HEADER
) -> Header:
    """Returns the tensors of the file that begins with `block`, checked to cover the rest of the file exactly.

    - `block`: at least the full header.
    - `file_length`: in bytes (default: `block` is the full file).
    - `name`: of the file in errors.

    Raises CorruptionError.
    """
    total = len(block) if file_length is None else file_length
    length = header_length(block, name=name, file_length=total, max_header=max_header)
    if len(block) < length:
        _refuse(name, len(block), f"only {len(block)} of the header's {length} bytes were read")
    try:
        text = str(block[8:length], "utf-8")
    except UnicodeDecodeError as error:
        _refuse(name, 8 + error.start, "the header is not UTF-8")
    entries, metadata = _Parser(text, name, length).parse()
    _check_cover(entries, name, length, total)
    return Header(entries, length, metadata)


class _Parser:
    """Parses the members of the header's one object."""

    def __init__(self, text: str, name: str, length: int) -> None:
        self.text, self.name, self.length = text, name, length
        self.at = 0
        self.entries: dict[str, HeaderEntry] = {}
        self.metadata: dict[str, str] | None = None

    def refuse(self, message: str, *, offset: int | None = None) -> NoReturn:
        characters = self.at if offset is None else offset
        _refuse(self.name, 8 + len(self.text[:characters].encode("utf-8", "surrogatepass")), message)

    def space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def expect(self, characters: str) -> str:
        self.space()
        found = self.text[self.at : self.at + 1]
        if not found or found not in characters:
            what = " or ".join(repr(one) for one in characters)
            self.refuse(
                f"the header has {found!r} where {what} belongs" if found else f"the header ends where {what} belongs"
            )
        self.at += 1
        return found

    def parse(self) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
        if not self.text.startswith("{"):
            self.refuse("the header is not a JSON object")
        self.at = 1
        self.space()
        if self.text[self.at : self.at + 1] == "}":
            self.at += 1
        else:
            self.member()
            while self.expect(",}") == ",":
                self.space()
                self.member()
        if self.text[self.at :].strip(" "):
            self.refuse("the header continues after its end")
        return self.entries, self.metadata or {}

    def member(self) -> None:
        found = _USUAL.match(self.text, self.at)
        if found is not None and self.usual(found):
            return
        key = self.string()
        colon = _COLON.match(self.text, self.at)
        if not colon:
            self.refuse("the header has a name without a colon")
        self.at = colon.end()
        if key == METADATA:
            if self.metadata is not None:
                self.refuse(f"the header has {METADATA} twice")
            self.metadata = self.strings()
        elif key in self.entries:
            self.refuse(f"the header names {key!r} twice")
        else:
            self.entries[key] = self.entry(key)

    def usual(self, found: re.Match[str]) -> bool:
        """Takes a member that is whole and spelled as safetensors and Tenuto spell it, in a quarter of the time. All
        others are for the rest of this parser, which says what is wrong with them."""
        key, code, sizes, start, stop = found.groups()
        shape, first, last = tuple(map(int, sizes.split(","))) if sizes else (), int(start), int(stop)
        if key in self.entries or key == METADATA or SIZES.get(code, -1) * _product(shape) != last - first:
            return False
        self.entries[key] = HeaderEntry(code, shape, self.length + first, self.length + last)
        self.at = found.end()
        return True

    def string(self) -> str:
        if not self.text.startswith('"', self.at):
            self.refuse("the header has something other than a string where a name belongs")
        try:
            value, end = _DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            self.refuse(f"the header has a string that is not JSON's: {error.msg}")
        if not _encodable(value):
            self.refuse("the header has a string with a lone surrogate")
        self.at = end
        return str(value)

    def strings(self) -> dict[str, str]:
        found: dict[str, str] = {}
        self.expect("{")
        self.space()
        if self.text[self.at : self.at + 1] == "}":
            self.at += 1
            return found
        while True:
            self.space()
            key = self.string()
            self.expect(":")
            self.space()
            if key in found:
                self.refuse(f"the header's metadata name {key!r} twice")
            found[key] = self.string()
            if self.expect(",}") == "}":
                return found

    def entry(self, key: str) -> HeaderEntry:
        # The match stops at the first brace, so nothing nested is ever built.
        found = _ENTRY.match(self.text, self.at, self.at + _MAX_ENTRY)
        if not found:
            self.refuse(f"the entry of {key!r} is not a flat object of at most {_MAX_ENTRY} characters")
        try:
            fields = _DECODER.decode(found[0])
        except (ValueError, RecursionError) as error:
            self.refuse(f"the entry of {key!r} is not valid JSON: {error}")
        if sorted(field for field, _ in fields) != ["data_offsets", "dtype", "shape"]:
            self.refuse(f"the entry of {key!r} does not have exactly dtype, shape and data_offsets")
        values = dict(fields)
        code, shape, offsets = values["dtype"], values["shape"], values["data_offsets"]
        if not isinstance(code, str) or code not in SIZES:
            self.refuse(f"the entry of {key!r} has the dtype {code!r}, which is not known")
        if not _whole_numbers(shape):
            self.refuse(f"the entry of {key!r} has a shape that is not a list of sizes")
        if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self.refuse(f"the entry of {key!r} has data_offsets that are not a begin and an end")
        nbytes = SIZES[code] * _product(shape, _MAX_FILE)
        if nbytes > _MAX_FILE:
            self.refuse(f"the entry of {key!r} has a shape of more than 2^63 bytes")
        if nbytes != offsets[1] - offsets[0]:
            self.refuse(f"the entry of {key!r} has {offsets[1] - offsets[0]} bytes, where its shape needs {nbytes}")
        self.at = found.end()
        return HeaderEntry(code, tuple(shape), self.length + offsets[0], self.length + offsets[1])


def _check_cover(entries: Mapping[str, HeaderEntry], name: str, length: int, total: int) -> None:
    """Checks that the tensors' bytes follow each other from the end of the header to the end of the file."""
    at = length
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.stop > total:
            _refuse(name, entry.start, f"{key!r} ends at byte {entry.stop}, but the file has {total}")
        if entry.start < at:
            _refuse(name, entry.start, f"{key!r} begins at byte {entry.start}, inside the tensor before it")
        if entry.start > at:
            _refuse(name, at, f"bytes {at} to {entry.start} belong to no tensor")
        at = entry.stop
    if at != total:
        _refuse(name, at, f"bytes {at} to {total} belong to no tensor")


def _no_constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not a whole number")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=list, parse_constant=_no_constant, parse_float=_no_constant)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= _MAX_FILE for one in value)


def _product(shape: Sequence[int], cap: int = _MAX_FILE) -> int:
    """Returns the product, or a value above `cap` without ever computing a much larger number."""
    if 0 in shape:
        return 0
    found = 1
    for size in shape:
        found *= size
        if found > cap:
            return cap + 1
    return found


def _encodable(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse(name: str, offset: int, message: str) -> NoReturn:
    raise CorruptionError(
        f"{name}: {message if len(message) <= _LONGEST else f'{message[:_LONGEST]}…'} (at byte {offset})",
        subject=name,
        hint="tenuto verify finds the checkpoints that are whole",
    ) from None
