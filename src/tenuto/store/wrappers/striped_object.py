"""How a striped object lies in its places: its descriptor, and its parts on the way in and out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.errors import CorruptionError
from tenuto.model.records import Receipt
from tenuto.store.base import BaseReader
from tenuto.store.contract import Content, Reader, Store
from tenuto.store.wrappers.delegating import DelegatingStore


class Descriptor:
    """What lies under the name of a striped object: always `LENGTH` bytes, so that a listing shows which objects may be
    one. Part k lies in place (k + first) mod n, behind that place's earlier parts."""

    MAGIC: Final = b"tenuto-stripe-1 "
    LENGTH: Final = len(MAGIC) + 20 + 1 + 12 + 1 + 32 + 1 + 32 + 1
    _TEXT: Final = re.compile(rb"tenuto-stripe-1 (\d{20}) (\d{12}) ([0-9a-f]{32}) ([0-9a-f]{32})\n")

    __slots__ = ("file", "length", "part")

    def __init__(self, length: int, part: int, file: str) -> None:
        self.length = length
        self.part = part
        self.file = file

    def encode(self) -> bytes:
        body = self.MAGIC + f"{self.length:020d} {self.part:012d} {self.file} ".encode()
        return body + hashlib.sha256(body).hexdigest()[:32].encode() + b"\n"

    @classmethod
    def decode(cls, name: str, data: bytes) -> Descriptor | None:
        """Returns None if `data` is an object of its own. Raises CorruptionError if it is a damaged descriptor."""
        if not data.startswith(cls.MAGIC):
            return None
        found = cls._TEXT.fullmatch(data)
        if found is None or hashlib.sha256(data[:-33]).hexdigest()[:32].encode() != found[4] or not int(found[2]):
            raise CorruptionError(
                f"the descriptor of {name}, which says where its parts lie, is damaged", subject=name, object=name
            )
        return cls(int(found[1]), int(found[2]), found[3].decode())

    def first(self, places: int) -> int:
        """Returns the place of part 0: not the same for all, so that places fill alike."""
        return int(self.file[:8] or "0", 16) % places

    def share(self, part: int, places: int) -> int:
        return (part + self.first(places)) % places

    def share_length(self, number: int, places: int) -> int:
        """Returns the bytes of all parts in one place."""
        parts = -(-self.length // self.part)
        behind = (number - self.first(places)) % places  # its first part
        count = len(range(behind, parts, places))
        short = parts * self.part - self.length if count and self.share(parts - 1, places) == number else 0
        return count * self.part - short

    def cuts(self, offset: int, length: int, places: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields, for each part that a range touches: place, offset in the place's parts, offset in the range,
        length."""
        done = 0
        while done < length:
            part, inside = divmod(offset + done, self.part)
            step = min(self.part - inside, length - done)
            yield self.share(part, places), part // places * self.part + inside, done, step
            done += step


@dataclass
class Share(DelegatingStore):
    """One place while a striped object is put: takes its own parts of the content, and nothing of the rest."""

    inner: Store
    descriptor: Descriptor
    number: int
    places: int

    @property
    def length(self) -> int:
        return self.descriptor.share_length(self.number, self.places)

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        return self.inner.put_if_absent(name, ShareContent(self, content), token=token)


@dataclass(frozen=True)
class ShareContent:
    share: Share
    content: Content

    @property
    def length(self) -> int:
        return self.share.length

    def pieces(self) -> Iterator[memoryview]:
        offset, share = 0, self.share
        for whole in self.content.pieces():
            piece = whole.cast("B") if whole.itemsize != 1 or whole.ndim != 1 else whole
            for number, _, start, length in share.descriptor.cuts(offset, len(piece), share.places):
                if number == share.number:
                    yield piece[start : start + length]
            offset += len(piece)


class StripedReader(BaseReader):
    """Reads an object from its shares; one that lies whole in one place is a stripe of one. Owns `readers`."""

    def __init__(self, name: str, descriptor: Descriptor, readers: Sequence[Reader | None]) -> None:
        super().__init__(name, descriptor.length)
        self._descriptor = descriptor
        self._shares = readers
        self._open = [reader for reader in readers if reader is not None]

    @property
    def alignment(self) -> int:
        """The largest of all shares: what the page cache has of one is served from there all the same."""
        return max((reader.alignment for reader in self._open), default=1)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        over = offset + buffer.nbytes - self.length
        if 0 < over < self.alignment:
            buffer = buffer.cast("B") if buffer.itemsize != 1 or buffer.ndim != 1 else buffer
            if over < len(buffer):
                self.fetch(offset, buffer)
                return
        super().read_into(offset, buffer)

    def fetch(self, offset: int, buffer: memoryview) -> None:
        def read(cut: tuple[int, int, int, int]) -> None:
            number, at, start, length = cut
            if offset + start >= self.length:
                return  # padding behind the object: undefined
            reader = self._shares[number]
            if reader is None or (short := reader.length - at) <= 0:
                raise CorruptionError(
                    f"{self.name} ends before byte {offset + start + 1}: a location has fewer of its parts than its "
                    "descriptor says",
                    subject=f"{self.name}@{offset + start}",
                    object=self.name,
                )
            if short < length and offset + start + length > self.length and reader.alignment == 1:
                length = short  # padded at its end for the shares that bypass the page cache
            reader.read_into(at, buffer[start : start + length])

        cuts = list(self._descriptor.cuts(offset, len(buffer), len(self._shares)))
        parallel_for(read, cuts, len(self._open))

    def view(self) -> memoryview | None:
        return self._shares[0].view() if len(self._shares) == 1 and self._shares[0] is not None else None

    def close(self) -> None:
        for reader in self._open:
            reader.close()
