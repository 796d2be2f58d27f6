"""What a disk may hold after a crash, given the calls made before it: the weak model that POSIX allows.

- A write that no fsync of its file followed is on the disk in any subset of its 4096-byte blocks; a block may hold the
  old bytes, the new ones, a sector-wise mix, or, where nothing was ever there, zeroes or stale rubbish.
- A file's size changes on its own: new size without the data, data without the new size.
- An entry of a directory (create, link, rename, unlink, mkdir, rmdir) that no fsync of that directory followed is there
  or not, in any combination with others; only on one and the same name is their order kept. Not even the two halves of
  a rename belong together.
- fsync of a file makes its data and size durable and none of its names; fsync of a directory its entries and no data.
- A flush that failed promises nothing, and neither does a later one of the same data.

`Persistence` replays calls; at each point it gives the open questions as `Variable`s (oldest answer first, newest last)
and makes the `DiskImage` that a choice of answers means.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Final, Generic, TypeVar

from tenuto.testing.recorder import Call
from tenuto.testing.simulated_disk import BLOCK, ROOT, ZEROES, Contents, DiskImage, cut, overwrite

SECTOR: Final = 512
RUBBISH: Final = random.Random(0x5EED).randbytes(BLOCK)
"""Stale bytes of a block that was allocated and not written."""


T = TypeVar("T")


@dataclass(slots=True)
class _History(Generic[T]):
    """The values that one name, block or size had since it was last surely durable; `values[0]` is durable."""

    values: list[T]
    calls: list[int]
    """The number of the call that made each value; -1: durable before."""
    stuck: int = 0
    """How many values a failed flush has left in doubt."""

    @property
    def open(self) -> bool:
        return any(value != self.values[-1] for value in self.values)

    def add(self, value: T, call: int) -> None:
        if value in self.values:  # the newest answer stands last
            at = self.values.index(value)
            del self.values[at], self.calls[at]
            self.stuck -= at < self.stuck
        self.values.append(value)
        self.calls.append(call)

    def flush(self) -> bool:
        """A flush that succeeded. False: the values stay in doubt, for nothing was written since one that failed."""
        if self.stuck == len(self.values) > 1:
            return False
        self.values, self.calls, self.stuck = self.values[-1:], [-1], 0
        return True

    def fail(self) -> None:
        self.stuck = len(self.values)


@dataclass(slots=True)
class _File:
    path: str
    base: list[bytes] = field(default_factory=list)
    """Durable blocks."""
    live: list[bytes] = field(default_factory=list)
    """What a reader saw before the crash."""
    size: _History[int] = field(default_factory=lambda: _History([0], [-1]))
    blocks: dict[int, _History[bytes]] = field(default_factory=dict)

    def write(self, offset: int, data: bytes, call: int) -> None:
        before = len(self.live)
        changed = overwrite(self.live, offset, data)
        for number in range(before, changed.start):
            if number in self.blocks:
                self.blocks[number].add(ZEROES, call)
        for number in changed:
            history = self._history(number)
            old, new = history.values[-1], self.live[number]
            split = SECTOR * (1 + (call + number) % 7)
            history.add(new[:split] + old[split:], call)
            history.add(new, call)
        self._grow(offset + len(data), call)

    def reserve(self, length: int, call: int) -> None:
        for number in range(len(self.live), -(-length // BLOCK)):
            self._history(number)
        self._grow(length, call)

    def truncate(self, length: int, call: int) -> None:
        cut(self.live, length)
        self.size.add(length, call)

    def _grow(self, end: int, call: int) -> None:
        if end > self.size.values[-1]:
            self.size.add(end, call)

    def _history(self, number: int) -> _History[bytes]:
        if number not in self.blocks:
            fresh = number >= len(self.base)
            self.blocks[number] = (
                _History([RUBBISH, ZEROES], [-1, -1]) if fresh else _History([self.base[number]], [-1])
            )
        return self.blocks[number]

    def flush(self) -> None:
        self.base = list(self.live)
        self.blocks = {number: history for number, history in self.blocks.items() if not history.flush()}
        self.size.flush()

    def fail(self) -> None:
        self.size.fail()
        for history in self.blocks.values():
            history.fail()

    def contents(self, size: int, blocks: dict[int, bytes]) -> Contents:
        count = -(-size // BLOCK)
        held = [blocks[n] if n in blocks else self._settled(n) for n in range(count)]
        return Contents(tuple(held), size)

    def _settled(self, number: int) -> bytes:
        if number in self.blocks:
            return self.blocks[number].values[-1]
        return self.base[number] if number < len(self.base) else ZEROES


@dataclass(frozen=True, slots=True)
class Variable:
    """One open question: which of `count` answers the disk holds; the last one is what the program believes.

    `kind` "name": subject (directory inode, name); "size": the file's inode; "block": (inode, block number).
    """

    kind: str
    subject: tuple[int, str] | tuple[int, int]
    path: str
    count: int
    calls: tuple[int, ...]

    def describe(self, answer: int) -> str:
        """What is lost if `answer` is not the newest."""
        lost = sorted({call for call in self.calls[answer + 1 :] if call >= 0})
        what = {"name": "entry", "size": "size", "block": f"block {self.subject[1]}"}[self.kind]
        return f"{what} of {self.path}: not (all) on the disk what call {', '.join(map(str, lost)) or 'before'} made"


class Persistence:
    """Replays calls from an empty disk, or from `base`, all of it durable."""

    def __init__(self, base: DiskImage | None = None) -> None:
        self._entries: dict[tuple[int, str], _History[int | None]] = {}
        self._files: dict[int, _File] = {}
        self._directories: dict[int, str] = {ROOT: ""}
        if base is not None:
            self._load(base)

    def _load(self, base: DiskImage) -> None:
        paths = {ROOT: ""}
        pending = [ROOT]
        while pending:
            directory = pending.pop()
            for name, inode in base.directories[directory].items():
                self._entries[directory, name] = _History([inode], [-1])
                paths[inode] = f"{paths[directory]}/{name}"
                if inode in base.directories:
                    self._directories[inode] = paths[inode]
                    pending.append(inode)
                else:
                    held = base.files[inode]
                    self._files[inode] = _File(
                        paths[inode], list(held.blocks), list(held.blocks), _History([held.size], [-1])
                    )

    def replay(self, call: Call, number: int) -> None:
        """The effect of call `number`, all of it still in the air unless it is a flush."""
        match call.kind:
            case "create":
                self._files[call.inode] = _File(call.path)
                self._enter(call.directory, call.name, call.inode, number)
            case "mkdir":
                self._directories[call.inode] = call.path
                self._enter(call.directory, call.name, call.inode, number)
            case "link":
                self._enter(call.directory, call.name, call.inode, number)
            case "rename":
                assert call.source is not None
                self._enter(call.directory, call.name, call.inode, number)
                self._enter(*call.source, None, number)
            case "unlink" | "rmdir":
                self._enter(call.directory, call.name, None, number)
            case "pwrite":
                self._files[call.inode].write(call.offset, call.data, number)
            case "reserve":
                self._files[call.inode].reserve(call.length, number)
            case "truncate":
                self._files[call.inode].truncate(call.length, number)
            case "fsync":
                file = self._files[call.inode]
                file.fail() if call.failed else file.flush()
            case "fsync_directory":
                for (directory, _), history in self._entries.items():
                    if directory == call.inode:
                        history.fail() if call.failed else history.flush()

    def _enter(self, directory: int, name: str, inode: int | None, number: int) -> None:
        history = self._entries.get((directory, name))
        if history is None:
            history = self._entries[directory, name] = _History([None], [-1])
        history.add(inode, number)

    def now(self) -> Instant:
        return Instant(self._entries, self._files, self._directories)

    def instants(self) -> Iterator[Instant]:
        """What may crash at this point: here all of it, at once."""
        yield self.now()


class Instant:
    """The states that are possible at one point; valid until the next replay."""

    def __init__(
        self,
        entries: dict[tuple[int, str], _History[int | None]],
        files: dict[int, _File],
        directories: dict[int, str],
    ) -> None:
        self._entries, self._files = entries, files
        self._names: dict[int, dict[str, int]] = {}
        self._contents: dict[int, Contents] = {}
        self.variables = tuple(self._reach(directories))

    def _reach(self, directories: dict[int, str]) -> Iterator[Variable]:
        """The open questions about whatever some answer makes reachable; fills what is settled on the way."""
        by_directory: dict[int, list[tuple[str, _History[int | None]]]] = {}
        for (directory, name), history in self._entries.items():
            by_directory.setdefault(directory, []).append((name, history))
        pending, seen = [ROOT], {ROOT}
        while pending:
            directory = pending.pop()
            settled = self._names[directory] = {}
            for name, history in by_directory.get(directory, ()):
                newest = history.values[-1]
                if newest is not None:
                    settled[name] = newest
                if history.open:
                    path = f"{directories[directory]}/{name}"
                    yield Variable("name", (directory, name), path, len(history.values), tuple(history.calls))
                for inode in history.values:
                    if inode is None or inode in seen:
                        continue
                    seen.add(inode)
                    if inode in directories:
                        pending.append(inode)
                    else:
                        yield from self._reach_file(inode)

    def _reach_file(self, inode: int) -> Iterator[Variable]:
        file = self._files[inode]
        self._contents[inode] = file.contents(file.size.values[-1], {})
        if file.size.open:
            yield Variable("size", (inode, 0), file.path, len(file.size.values), tuple(file.size.calls))
        largest = max(file.size.values)
        for number, history in sorted(file.blocks.items()):
            if history.open and number * BLOCK < largest:
                yield Variable("block", (inode, number), file.path, len(history.values), tuple(history.calls))

    @property
    def count(self) -> int:
        """How many combinations of answers there are (several may mean the same disk)."""
        return prod(variable.count for variable in self.variables)

    def image(self, choice: Sequence[int]) -> DiskImage:
        """The disk that the answers mean; `choice[i]` answers `variables[i]`."""
        names, contents = dict(self._names), dict(self._contents)
        touched: set[int] = set()
        files: dict[int, tuple[int, dict[int, bytes]]] = {}
        for variable, answer in zip(self.variables, choice, strict=True):
            if answer == variable.count - 1:
                continue
            inode, part = variable.subject
            if variable.kind == "name":
                if inode not in touched:
                    touched.add(inode)
                    names[inode] = dict(names[inode])
                value = self._entries[inode, str(part)].values[answer]
                if value is None:
                    names[inode].pop(str(part), None)
                else:
                    names[inode][str(part)] = value
                continue
            size, blocks = files.setdefault(inode, (self._files[inode].size.values[-1], {}))
            if variable.kind == "size":
                files[inode] = (self._files[inode].size.values[answer], blocks)
            else:
                blocks[int(part)] = self._files[inode].blocks[int(part)].values[answer]
        for inode, (size, blocks) in files.items():
            contents[inode] = self._files[inode].contents(size, blocks)
        return DiskImage(names, contents)

    def choices(self, limit: int, source: random.Random) -> Iterator[tuple[int, ...]]:
        """All combinations if there are at most `limit`; else about `limit` of them: everything on the disk, nothing of
        it, each single thing missing, each single thing there, and the rest by chance."""
        counts = [variable.count for variable in self.variables]
        if self.count <= limit:
            yield from product(*(range(count - 1, -1, -1) for count in counts))
            return
        newest, oldest = tuple(count - 1 for count in counts), (0,) * len(counts)
        chosen = [newest, oldest]
        for at, count in enumerate(counts):
            chosen += [(*newest[:at], answer, *newest[at + 1 :]) for answer in range(count - 1)]
            chosen.append((*oldest[:at], count - 1, *oldest[at + 1 :]))
        yield from chosen
        for _ in range(limit - len(chosen)):
            # A biased coin reaches both corners: nearly all there, and nearly nothing.
            bias = source.choice((0.1, 0.5, 0.9))
            yield tuple(count - 1 if source.random() < bias else source.randrange(count) for count in counts)
