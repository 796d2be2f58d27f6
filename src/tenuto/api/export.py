"""Writes a checkpoint, or a part of one, in another format: completely or not at all, and only verified bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tenuto.engine.read.choose import (
    CheckpointLeaves,
    Skipped,
    choose,
    exactly,
    restore_checkpoint,
    restore_latest,
)
from tenuto.engine.read.opened import Leaf, Opened, open_checkpoint
from tenuto.errors import MissingExtra, UsageError, did_you_mean, install, typed
from tenuto.events import Emitter, Progress, RestoredEvent
from tenuto.formats.beside import Beside
from tenuto.formats.contract import SHARD_BYTES, Content, Tensor, run_boxes
from tenuto.formats.convert import ConvertedTensor, Renaming, converts, overflowed
from tenuto.formats.hugging_face import FILES
from tenuto.formats.read_back import ReadBack, read_back
from tenuto.formats.registry import Format, formats
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import dtype, join, unescape
from tenuto.model.records import Manifest
from tenuto.record import record
from tenuto.repo.keys import unlock
from tenuto.repo.lineage import resolve
from tenuto.repo.repository import Repo
from tenuto.state import frameworks
from tenuto.state.contract import Buffer, Prepared
from tenuto.state.restore.match import match_state
from tenuto.state.restore.selection import Selection
from tenuto.state.tree import KEYED, LEAVES, items, kind_of, leaf_nodes, segment, walk

SHOWN: Final = 5
TORCH_SUFFIXES: Final = (".pt", ".pth")


@record
class Choice:
    """What of a checkpoint is written, and how.

    entry: this entry of the state, its tensors under the names that they have in it; None and nothing else given: the
    state's one model, or all of a state without one.
    include, exclude: globs over paths. strip, rename: what becomes of names (`Renaming`). dtype: the type that
    floating-point tensors are rounded to.
    """

    entry: str | None = None
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    strip: str = ""
    rename: Sequence[str] = ()
    dtype: str | None = None
    shard_bytes: int = SHARD_BYTES


@record
class Exported:
    """What `export` has written. bytes: of tensors that were read and verified. read_back: by which tool it was read
    again. remarks: what the format could not represent, and what that tool did not find. skipped: damaged newer
    checkpoints."""

    out: Path
    format: str
    id: CheckpointId
    leaves: int
    entry: str | None
    bytes: int
    seconds: float
    remarks: Sequence[str]
    read_back: ReadBack
    skipped: Sequence[Skipped] = ()


class LeafTensor(Tensor):
    """A leaf of a checkpoint, verified as it is read."""

    __slots__ = ("_leaf",)

    def __init__(self, leaf: Leaf) -> None:
        super().__init__(leaf.dtype, leaf.shape)
        self._leaf = leaf

    def read_into(self, out: Buffer, start: int = 0) -> None:
        at, size = 0, self.itemsize
        for box in run_boxes(self.shape, start // size, (start + len(out)) // size):
            nbytes = box.size * size
            self._leaf.read_into(out[at : at + nbytes], box)
            at += nbytes


def writable() -> list[str]:
    """Returns the names of the formats that are written."""
    return ["torch", *(one.name for one in formats() if one.writes and one.name != "torch")]


def target(out: Path, to: str | None) -> Format | None:
    """Returns the format to write, told by its name or by that of the file; None for a file of `torch.save`. Raises
    UsageError for what is not written."""
    if to == "torch" or (to is None and out.suffix in TORCH_SUFFIXES):
        return None
    for one in formats():
        if one.writes and (one.name == to if to is not None else out.suffix in one.suffixes):
            return one
    names = ", ".join(writable())
    if to is not None:
        raise UsageError(
            f"{to!r} is not a format that is written; there are: {names}", subject=to, hint=did_you_mean(to, writable())
        )
    raise UsageError(
        f"{out} is neither a *.safetensors nor a *.pt file, and no --to names a format: {names}",
        subject=str(out),
        hint=f"name it {out.stem}.safetensors",
    )


def export(
    repo: Repo,
    out: Path,
    run: Callable[[], str],
    step: int | str | CheckpointId,
    *,
    to: str | None = None,
    choice: Choice | None = None,
    force: bool = False,
    emitter: Emitter | None = None,
) -> Exported:
    """Writes a checkpoint to `out`, a file or a directory, in the format `to`, or that of the suffix.

    run: returns the run whose `latest` is meant. For "latest", damaged checkpoints are skipped, each in an event.
    Raises UsageError if `out` is there already and not to be replaced, and for a choice that makes no sense; what
    reading and writing raise.
    """
    choice, emit = choice or Choice(), emitter or Emitter()
    unlock(repo)
    format = target(out, to)
    beside = Beside(out)
    beside.check(force=force)
    with beside:
        if format is None:
            written = _export_torch(repo, beside, run, step, choice=choice, emitter=emit)
        else:
            written = _Export(repo, beside, format, choice, emit).run(run, step)
        beside.publish(force=force)
    return written


class _Export:
    """One export, through the writer of a format."""

    def __init__(self, repo: Repo, beside: Beside, format: Format, choice: Choice, emitter: Emitter) -> None:
        if choice.entry is not None and (choice.include or choice.strip):
            raise UsageError(
                "--entry chooses tensors and their names: it cannot be combined with --include or --strip",
                subject="--entry",
                hint=f"leave them out, or write --include {choice.entry} --strip {choice.entry}/",
            )
        self._repo, self._beside, self._format, self._choice, self._emitter = repo, beside, format, choice, emitter
        self._rename = Renaming(choice.rename)

    def run(self, run: Callable[[], str], step: int | str | CheckpointId) -> Exported:
        skipped: Sequence[Skipped] = ()
        written: Exported | None = None
        if step == "latest":
            name = run()
            written, skipped, _ = choose(self._repo, name, lambda id, _: self._write(id), self._emitter)
            if written is None:
                resolve(self._repo, name, "latest")  # raises, naming what there is
                raise AssertionError("a run without a checkpoint is named by an error")
        else:
            id = step if isinstance(step, CheckpointId) else resolve(self._repo, run(), step)
            written = exactly(self._repo, id, self._write)
        return replace(written, skipped=skipped)

    def _write(self, id: CheckpointId) -> Exported:
        """Writes one checkpoint beside the final path. CorruptionError where it is damaged: then the next is tried."""
        began = time.perf_counter()
        self._beside.clear()
        with open_checkpoint(self._repo, id, rank=None, emitter=self._emitter) as opened:
            tree = opened.node()
            numbers = {path: node["n"] for path, node in leaf_nodes(tree)}
            entry = self._entry(opened, tree, list(numbers))
            prefix = f"{entry}/" if entry else self._choice.strip
            selected = Selection(_listed(self._choice.include), _listed(self._choice.exclude)).takes

            def takes(path: str) -> bool:
                return (entry is None or path.startswith(prefix)) and selected(path)

            chosen = sorted(filter(takes, numbers), key=lambda path: (-dtype(opened[path].dtype).size, path))
            if not chosen and (self._choice.include or self._choice.exclude):
                raise self._nothing_left(opened, list(numbers))
            tensors = self._tensors(opened, chosen, prefix)
            total = sum(tensor.nbytes for tensor in tensors.values())

            def progress(done: int) -> None:
                if self._emitter.listened:
                    self._emitter.emit(Progress("restore", str(id), done, total))

            metadata = {"tenuto.checkpoint": str(id), "tenuto.content": opened.content}
            content = Content(tensors, _files(opened, tree), metadata, self._choice.shard_bytes, progress)
            remarks = self._format.write(self._beside.part, content)
            again = read_back(self._format, self._beside.part, content.tensors)
            remarks += again.remarks
            remarks += self._remarks(tree, chosen, numbers, takes)
            if lost := overflowed(tensors.values(), tensors):
                remarks.append(f"{self._choice.dtype} is too short for values that have become infinite: {_few(lost)}")
            read = {numbers[path]: opened[path].nbytes for path in chosen}
            seconds = time.perf_counter() - began
            self._emitter.emit(RestoredEvent(id, sum(read.values()), seconds, opened.content))
        return Exported(
            self._beside.out, self._format.name, id, len(chosen), entry, sum(read.values()), seconds, remarks, again
        )

    def _entry(self, opened: Opened, tree: Any, paths: list[str]) -> str | None:
        """Returns the entry to write: the one asked for, else the state's one model, unless paths were chosen."""
        choice = self._choice
        entries = list(dict.fromkeys(path.partition("/")[0] for path in paths))
        if choice.entry is not None:
            if not any(path.startswith(f"{choice.entry}/") for path in paths):
                raise UsageError(
                    f"{opened.id} has no entry {choice.entry!r} with tensors in it; there are: {_few(entries)}",
                    subject=choice.entry,
                    hint=did_you_mean(choice.entry, entries) or f"--entry {entries[0]}" if entries else None,
                )
            return choice.entry
        if choice.include or choice.exclude or choice.strip or kind_of(tree) not in KEYED:
            return None
        nodes = {path: node for path, node in walk(tree) if path and "/" not in path}
        models = [name for name, node in nodes.items() if kind_of(node) == "module"]
        if not models and kind_of(nodes.get("model")) in KEYED and any(path.startswith("model/") for path in paths):
            models = ["model"]
        if len(models) > 1:
            raise UsageError(
                f"{opened.id} has {len(models)} models: {_few(models)}",
                subject=str(opened.id),
                hint=f"--entry {models[0]}, or --include '*' for every tensor of the state",
            )
        return models[0] if models else None

    def _tensors(self, opened: Opened, chosen: list[str], prefix: str) -> dict[str, Tensor]:
        strip = self._choice.strip
        if strip and not any(path.startswith(strip) for path in chosen):
            prefixes = list(dict.fromkeys(start for path in chosen for start in _prefixes(path)))
            raise UsageError(
                f"--strip {strip}: no name begins so; names are {_few(chosen)}",
                subject=strip,
                hint=did_you_mean(strip, prefixes) or "leave --strip out",
            )
        below = [path.removeprefix(prefix) for path in chosen]
        names = [name if "/" in name else unescape(name) for name in below]
        if len(set(names)) != len(names) or "" in names:
            raise UsageError(
                f"without {strip!r} two leaves have one name, or one has none",
                subject=strip,
                hint="--strip less, or --include fewer leaves; a *.pt file keeps the state's own nesting",
            )
        self._rename.check(names)
        found: dict[str, Tensor] = {}
        for path, name in zip(chosen, names, strict=True):
            tensor: Tensor = LeafTensor(opened[path])
            if self._choice.dtype is not None and converts(tensor, self._choice.dtype):
                tensor = ConvertedTensor(tensor, self._choice.dtype)
            found[self._rename(name)] = tensor
        return found

    def _nothing_left(self, opened: Opened, paths: list[str]) -> UsageError:
        choices = [*dict.fromkeys(path.partition("/")[0] for path in paths), *paths]
        wanted = (self._choice.include or [""])[0].rstrip("*/")
        return UsageError(
            f"no tensor of {opened.id} is left by --include and --exclude; nothing was written",
            subject=str(opened.id),
            hint=did_you_mean(wanted, choices)
            or f"{typed('tenuto', 'show', self._repo.url, '--run', opened.run)} shows the paths",
        )

    def _remarks(
        self, tree: Any, chosen: list[str], numbers: dict[str, int], takes: Callable[[str], bool]
    ) -> list[str]:
        remarks = []
        first: dict[int, str] = {}
        tied = [path for path in chosen if first.setdefault(numbers[path], path) != path]
        if tied:
            remarks.append(f"tied to another tensor, and written under their own names too: {_few(tied)}")
        nodes = [(path, node) for path, node in walk(tree) if path and takes(path)]
        plain = sum(
            kind_of(node) not in LEAVES and type(node) is not dict and type(node) is not list for _, node in nodes
        )
        if plain:
            what = "a safetensors file" if self._format.name == "safetensors" else f"{self._format.title}, as written,"
            remarks.append(f"{what} holds no plain values: {plain} are left out; a *.pt file holds them")
        return remarks


def _listed(patterns: Sequence[str] | None) -> list[str] | None:
    return None if patterns is None else list(patterns)


def _files(opened: Opened, tree: Any) -> Any:
    """Returns the entry with the files of a model, if the state has one."""
    if kind_of(tree) not in KEYED:
        return None
    node = next((value for key, value in items(tree) if key == FILES), None)
    if node is not None and kind_of(node) == "object":  # an object whose state they are
        node = node.get("v")
    if kind_of(node) not in KEYED:
        return None
    return {FILES: {key: opened.plain(join(FILES, segment(key))) for key, _ in items(node)}}


def _export_torch(
    repo: Repo,
    beside: Beside,
    run: Callable[[], str],
    step: int | str | CheckpointId,
    *,
    choice: Choice,
    emitter: Emitter,
) -> Exported:
    """Writes the complete state as nested dicts, lists, tensors and plain values."""
    if choice.strip or choice.entry is not None:
        raise UsageError(
            "--entry and --strip are for *.safetensors files; a *.pt file keeps the state's own nesting",
            subject="--strip" if choice.strip else "--entry",
            hint="use --include, or write a *.safetensors file",
        )
    if choice.rename or choice.dtype:
        raise UsageError(
            "a *.pt file keeps the state's own names and element types",
            subject="--rename" if choice.rename else "--dtype",
            hint="write a *.safetensors file",
        )
    torch = frameworks.named("torch")
    assert torch is not None, "it is built in"
    try:
        files = torch.ability("files")
    except ImportError:
        raise MissingExtra("a *.pt file needs torch", hint=install("torch")) from None
    leaves, remarks = 0, list[str]()

    def prepare(manifest: Manifest, about: CheckpointLeaves) -> Prepared:
        nonlocal leaves
        found = match_state(
            manifest.tree,
            about.private,
            about.specs,
            include=_listed(choice.include),
            exclude=_listed(choice.exclude),
            strict=False,
        )
        leaves = len(found.wants)

        def apply() -> None:
            nonlocal remarks
            beside.clear()
            descriptor = os.open(beside.part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with os.fdopen(descriptor, "wb") as file:
                remarks = files.write_file(found.apply(), file)
            files.read_back(beside.part)

        return Prepared(found.wants, apply, found.report)

    if step != "latest":
        id = step if isinstance(step, CheckpointId) else resolve(repo, run(), step)
        result = restore_checkpoint(repo, id, prepare, emitter=emitter)
    else:
        name = run()
        newest = restore_latest(repo, name, prepare, emitter=emitter)
        # None: there is no checkpoint; resolving raises an error that lists what exists.
        result = newest or restore_checkpoint(repo, resolve(repo, name, "latest"), prepare, emitter=emitter)
    again = ReadBack("torch")
    about = (result.bytes, result.seconds, remarks, again, result.skipped)
    return Exported(beside.out, "torch", result.id, leaves, None, *about)


def _prefixes(path: str) -> list[str]:
    """Returns what can be stripped of a path: up to each slash, and up to each point behind the last one."""
    return [
        path[: at + 1] for at, letter in enumerate(path) if letter == "/" or (letter == "." and "/" not in path[at:])
    ]


def _few(paths: list[str]) -> str:
    more = len(paths) - SHOWN
    return ", ".join(paths[:SHOWN]) + (f" and {more} more" if more > 0 else "")
