"""Exports a checkpoint to one file in another format: completely or not at all, and only verified bytes."""

from __future__ import annotations

import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np

from tenuto.engine.read.choose import CheckpointLeaves
from tenuto.errors import CorruptionError, MissingExtra, StoreError, StoreFull, UsageError, did_you_mean, install, typed
from tenuto.model.leaf import LeafSpec, dtype
from tenuto.model.records import Manifest
from tenuto.repo.format.safetensors import build_header
from tenuto.state.contract import Buffer, LoadReport, Prepared
from tenuto.state.restore.match import match_state
from tenuto.state.restore.selection import Selection
from tenuto.state.tree import KEYED, LEAVES, kind_of, leaf_nodes, leaf_paths, walk

Patterns = list[str] | None
SHOWN = 5


class Export(ABC):
    """A file written next to its final path. `remarks`: what the format could not represent."""

    def __init__(self, out: Path, include: Patterns, exclude: Patterns) -> None:
        self.out = out
        self.leaves = 0
        self.entry: str | None = None
        """The entry of the state that is written, under the names that its tensors have in it."""
        self.choices: list[str] = []
        """Entries and paths of tensors that could be chosen."""
        self.remarks: list[str] = []
        self._include = include
        self._exclude = exclude
        self._part = out.with_name(f".{out.name}.{os.getpid()}.part")

    @abstractmethod
    def prepare(self, manifest: Manifest, leaves: CheckpointLeaves) -> Prepared:
        """Returns the target of each wanted leaf. Called again for each checkpoint that is tried."""

    def publish(self, *, force: bool) -> None:
        """Makes the file durable and gives it its name. Raises UsageError if the name was taken meanwhile."""
        descriptor = os.open(self._part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if force:
            os.replace(self._part, self.out)
            return
        try:
            os.link(self._part, self.out)
        except FileExistsError:
            raise UsageError(
                f"{self.out} is there already", subject=str(self.out), hint="--force replaces it"
            ) from None
        except OSError:  # no hard links here: then only the earlier check keeps it from replacing a file
            os.replace(self._part, self.out)

    def __enter__(self) -> Export:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._part.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            look = f"{typed('ls', '-ld', self.out.parent)}  # is it there, who may write to it, and is it mounted so"
            raise (StoreFull if full else StoreError)(
                f"{self.out} cannot be written: {error.strerror or error}",
                subject=str(self.out),
                hint="make room there, or write elsewhere" if full else look,
            ) from error

    def _open(self) -> int:
        self._part.unlink(missing_ok=True)
        return os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


class _Slice:
    """A leaf's place in the mapped file."""

    def __init__(self, view: Buffer) -> None:
        self._view = view

    @property
    def buffer(self) -> Buffer | None:
        return self._view

    def span(self) -> None:
        return None

    def fill(self, data: Buffer) -> None:
        self._view[:] = data


class SafetensorsExport(Export):
    """Writes the leaves under their paths, read from the store straight into the file's pages."""

    def __init__(self, out: Path, include: Patterns, exclude: Patterns, strip: str, entry: str | None) -> None:
        super().__init__(out, include, exclude)
        self._strip = strip
        self._asked = entry

    def prepare(self, manifest: Manifest, leaves: CheckpointLeaves) -> Prepared:
        if leaf_paths(manifest.tree) != [spec.path for spec in leaves.specs if not spec.private]:
            raise CorruptionError(f"the index of {manifest.id} does not list the leaves that its tree names")
        # Tied tensors have a name each: the model that loads the file asks for all of them.
        numbers = {path: node["n"] for path, node in leaf_nodes(manifest.tree)}
        paths = list(numbers)
        entries = list(dict.fromkeys(path.partition("/")[0] for path in paths))
        self.choices = [*entries, *paths]
        self.entry = self._entry(manifest, paths, entries)
        prefix = f"{self.entry}/" if self.entry else self._strip
        selected = Selection(self._include, self._exclude).takes

        def takes(path: str) -> bool:
            return (self.entry is None or path.startswith(prefix)) and selected(path)

        chosen = [(path, leaves.specs[number]) for path, number in numbers.items() if takes(path)]
        chosen.sort(key=lambda one: (-one[1].itemsize, one[0]))
        self.leaves = len(chosen)
        header = build_header(self._entries(chosen, prefix), self._metadata(manifest))
        whole = self._map(header, sum(spec.nbytes for _, spec in chosen))
        wants: dict[int, Buffer] = {}
        again: list[tuple[str, Buffer, Buffer]] = []
        at = len(header)
        for path, spec in chosen:
            place = whole[at : at + spec.nbytes]
            at += spec.nbytes
            first = wants.setdefault(numbers[path], place)
            if first is not place:
                again.append((path, first, place))
        self.remarks = self._remarks(manifest, chosen, [path for path, _, _ in again], takes)

        def apply() -> None:
            for _, first, place in again:
                place[:] = first

        return Prepared([(number, _Slice(place)) for number, place in wants.items()], apply, LoadReport())

    def _entry(self, manifest: Manifest, paths: list[str], entries: list[str]) -> str | None:
        """Returns the entry to write: the one asked for, else the state's one model, unless paths were chosen."""
        if self._asked is not None:
            if not any(path.startswith(f"{self._asked}/") for path in paths):
                raise UsageError(
                    f"{manifest.id} has no entry {self._asked!r} with tensors in it; there are: {_few(entries)}",
                    subject=self._asked,
                    hint=did_you_mean(self._asked, entries) or f"--entry {entries[0]}" if entries else None,
                )
            return self._asked
        if self._include or self._exclude or self._strip or kind_of(manifest.tree) not in KEYED:
            return None
        nodes = {path: node for path, node in walk(manifest.tree) if path and "/" not in path}
        models = [name for name, node in nodes.items() if kind_of(node) == "module"]
        if not models and kind_of(nodes.get("model")) in KEYED and any(path.startswith("model/") for path in paths):
            models = ["model"]
        if len(models) > 1:
            raise UsageError(
                f"{manifest.id} has {len(models)} models: {_few(models)}",
                subject=str(manifest.id),
                hint=f"--entry {models[0]}, or --include '*' for every tensor of the state",
            )
        return models[0] if models else None

    def _entries(self, chosen: list[tuple[str, LeafSpec]], prefix: str) -> list[tuple[str, str, tuple[int, ...]]]:
        paths = [path for path, _ in chosen]
        if self._strip and not any(path.startswith(self._strip) for path in paths):
            prefixes = list(dict.fromkeys(start for path in paths for start in _prefixes(path)))
            raise UsageError(
                f"--strip {self._strip}: no name begins so; names are {_few(paths)}",
                subject=self._strip,
                hint=did_you_mean(self._strip, prefixes) or "leave --strip out",
            )
        entries = []
        for path, spec in chosen:
            code = dtype(spec.dtype).code
            name = path.removeprefix(prefix)
            entries.append((name, code, spec.shape) if code else (name, "U8", (spec.nbytes,)))
        if len({name for name, _, _ in entries}) != len(entries) or any(not name for name, _, _ in entries):
            raise UsageError(
                f"without {self._strip!r} two leaves have one name, or one has none",
                subject=self._strip,
                hint="--strip less, or --include fewer leaves; a *.pt file keeps the state's own nesting",
            )
        return entries

    def _metadata(self, manifest: Manifest) -> dict[str, str]:
        # Hugging Face loaders require "format".
        return {"format": "pt", "tenuto.checkpoint": str(manifest.id), "tenuto.content": manifest.content}

    def _map(self, header: bytes, nbytes: int) -> Buffer:
        """Maps the file at its final length, with space reserved first: a full disk would otherwise raise SIGBUS."""
        total = len(header) + nbytes
        descriptor = self._open()
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, total)
            os.ftruncate(descriptor, total)
            whole = np.frombuffer(mmap.mmap(descriptor, total), np.uint8)
        finally:
            os.close(descriptor)
        whole[: len(header)] = np.frombuffer(header, np.uint8)
        return whole

    def _remarks(
        self, manifest: Manifest, chosen: list[tuple[str, LeafSpec]], tied: list[str], takes: Callable[[str], bool]
    ) -> list[str]:
        remarks = []
        raw = [path for path, spec in chosen if dtype(spec.dtype).code is None]
        if raw:
            remarks.append(f"safetensors has no such dtype; written as bytes (U8): {_few(raw)}")
        nodes = [(path, node) for path, node in walk(manifest.tree) if path and takes(path)]
        if tied:
            remarks.append(f"tied to another tensor, and written under their own names too: {_few(tied)}")
        plain = sum(
            kind_of(node) not in LEAVES and type(node) is not dict and type(node) is not list for _, node in nodes
        )
        if plain:
            remarks.append(f"a safetensors file holds no plain values: {plain} are left out; a *.pt file holds them")
        return remarks


class TorchExport(Export):
    """Writes the complete state as nested dicts, lists, tensors and plain values."""

    def __init__(self, out: Path, include: Patterns, exclude: Patterns) -> None:
        super().__init__(out, include, exclude)
        try:
            from tenuto.integrations.torch.for_commands import write_pt
        except ImportError:
            raise MissingExtra("a *.pt file needs torch", hint=install("torch")) from None
        self._write = write_pt

    def prepare(self, manifest: Manifest, leaves: CheckpointLeaves) -> Prepared:
        found = match_state(
            manifest.tree, leaves.private, leaves.specs, include=self._include, exclude=self._exclude, strict=False
        )
        self.leaves = len(found.wants)

        def apply() -> None:
            with os.fdopen(self._open(), "wb") as file:
                self.remarks = self._write(found.apply(), file)

        return Prepared(found.wants, apply, found.report)


def _prefixes(path: str) -> list[str]:
    """Returns what can be stripped of a path: up to each slash, and up to each point behind the last one."""
    return [
        path[: at + 1] for at, letter in enumerate(path) if letter == "/" or (letter == "." and "/" not in path[at:])
    ]


def _few(paths: list[str]) -> str:
    more = len(paths) - SHOWN
    return ", ".join(paths[:SHOWN]) + (f" and {more} more" if more > 0 else "")
