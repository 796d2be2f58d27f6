"""Zip archives as containers of tensors: where each member's bytes lie, checked before anything is read by it.

Used by npz, `.pt` and `.keras` files. Stored members are read in place, by ranges; deflated ones in blocks.
"""

from __future__ import annotations

import threading
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tenuto.formats.contract import RawFile, Section, Tensor, check_shape
from tenuto.record import record
from tenuto.state.contract import Buffer

_LOCAL: Final = b"PK\x03\x04"
_LOCAL_BYTES: Final = 30
_MOST_MEMBERS: Final = 1_000_000
_READ_BYTES: Final = 1 << 20
_DEFLATED_MOST: Final = 1032
"""Times its own size that deflated data can stand for. No lower limit would do: zeros, as in a fresh optimizer's state,
come close to it. Members are read in blocks, so a large one takes no memory; the place that it goes to has to have the
room, which is looked at before the first byte is written."""


@record
class Member:
    """A member of an archive. `start`: where its stored bytes begin in the file; `stored`: how many they are; `length`:
    what they are without the compression."""

    name: str
    start: int
    stored: int
    length: int
    deflated: bool
    crc: int


class Archive:
    """The members of a zip file by name."""

    def __init__(self, file: RawFile) -> None:
        """Raises CorruptionError for what is no whole archive, names that lead elsewhere, members that overlap or lie
        outside of the file, and methods of compression other than deflate."""
        self.file = file
        self._lock = threading.Lock()
        try:
            self._zip = zipfile.ZipFile(Section(file))
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            file.refuse(f"no whole zip archive: {error}")
        self.members: dict[str, Member] = {}
        infos = self._zip.infolist()
        if len(infos) > _MOST_MEMBERS:
            file.refuse(f"it has {len(infos)} members")
        for info in infos:
            if not info.is_dir():
                self._add(info)
        end = 0
        for member in sorted(self.members.values(), key=lambda one: one.start):
            if member.stored and member.start < end:
                file.refuse(f"{member.name!r} begins at byte {member.start}, inside the member before it")
            end = max(end, member.start + member.stored)

    def _add(self, info: zipfile.ZipInfo) -> None:
        file, name = self.file, info.filename
        if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or "\0" in info.orig_filename:
            file.refuse(f"it has a member {name!r}, a name that leads elsewhere")
        if name in self.members:
            file.refuse(f"it has two members {name!r}")
        if info.flag_bits & 0x1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            file.refuse(f"{name!r} is encrypted, or compressed by a method that is not deflate")
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            file.refuse(f"{name!r} is stored, and has {info.compress_size} bytes for {info.file_size}")
        if info.file_size > info.compress_size * _DEFLATED_MOST:
            file.refuse(f"{name!r} claims {info.file_size} bytes in {info.compress_size}: more than deflate can hold")
        local = file.read(info.header_offset, _LOCAL_BYTES)
        if local[:4] != _LOCAL:
            file.refuse(f"{name!r} has no header at byte {info.header_offset}")
        names, extra = int.from_bytes(local[26:28], "little"), int.from_bytes(local[28:30], "little")
        start = info.header_offset + _LOCAL_BYTES + names + extra
        if start + info.compress_size > file.length:
            file.refuse(f"{name!r} ends at byte {start + info.compress_size}, and the file has {file.length}")
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        self.members[name] = Member(name, start, info.compress_size, info.file_size, deflated, info.CRC)

    def read(self, name: str, most: int) -> bytes:
        """Returns a member's bytes, verified by its checksum. CorruptionError where there are more than `most`,
        whatever the archive claims."""
        member = self.members.get(name)
        if member is None:
            self.file.refuse(f"it has no member {name!r}")
        if member.length > most:
            self.file.refuse(f"{name!r} has {member.length} bytes, where at most {most} belong")
        with self._lock, self._open(name) as stream:
            try:
                found: bytes = stream.read(most + 1)
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                self.file.refuse(f"{name!r} is damaged: {error}")
        if len(found) != member.length:
            self.file.refuse(f"{name!r} has {len(found)} bytes, where the archive says {member.length}")
        return found

    def head(self, name: str, length: int) -> bytes:
        """Returns the first `length` bytes of a member, or all of a shorter one."""
        member = self.members[name]
        if not member.deflated:
            return self.file.read(member.start, min(length, member.length))
        with self._lock, self._open(name) as stream:
            try:
                return bytes(stream.read(length))
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                self.file.refuse(f"{name!r} is damaged: {error}")

    def _open(self, name: str) -> Any:
        try:
            return self._zip.open(name)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            self.file.refuse(f"{name!r} cannot be read: {error}")

    def close(self) -> None:
        self._zip.close()
        self.file.close()


class DeflatedTensor(Tensor):
    """A tensor in a deflated member, from its byte `offset` on. Read from the first byte to the last it costs one pass;
    reading back begins again."""

    __slots__ = ("_archive", "_at", "_lock", "_member", "_offset", "_stream")

    def __init__(self, archive: Archive, name: str, offset: int, dtype: str, shape: Sequence[int]) -> None:
        """Raises CorruptionError where the member is shorter than the tensor."""
        super().__init__(dtype, shape)
        file = archive.file
        check_shape(file.path, file.what, name, shape)
        self._archive, self._member, self._offset = archive, archive.members[name], offset
        self._lock = threading.Lock()
        self._stream: Any = None
        self._at = 0
        if offset + self.nbytes > self._member.length:
            file.refuse(f"{name!r} has {self._member.length} bytes, and its shape needs {offset + self.nbytes}")

    def read_into(self, out: Buffer, start: int = 0) -> None:
        name, file = self._member.name, self._archive.file
        begin = self._offset + start
        with self._lock:
            try:
                if self._stream is None or begin < self._at:
                    self._stream, self._at = self._archive._open(name), 0
                while self._at < begin:
                    self._at += len(self._some(begin - self._at))
                done = 0
                while done < len(out):
                    data = self._some(len(out) - done)
                    out[done : done + len(data)] = np.frombuffer(data, np.uint8)
                    done += len(data)
                    self._at += len(data)
                if self._at == self._member.length:
                    self._stream.read(1)  # there is nothing, and the checksum of what there was is compared
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                file.refuse(f"{name!r} is damaged: {error}")

    def _some(self, most: int) -> bytes:
        data: bytes = self._stream.read(min(most, _READ_BYTES))
        if not data:
            self._archive.file.refuse(f"{self._member.name!r} ends inside its tensor")
        return data
